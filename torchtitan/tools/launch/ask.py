"""Questions of a command: answered by flags, or on a terminal by hand."""

import sys
import termios
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchtitan.utils.errors import ConfigError, UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Question(Generic[T]):
    """Something that a command must know."""

    flag: str
    """What answers it on the command line, as `--model FAMILY/SIZE`."""
    text: str
    choices: str
    """What is possible, in one or more lines."""
    parse: Callable[[str], T]
    """The answer's value. Raises a UserError, whose message starts with a flag."""
    default: str | None = None
    """None: it depends on an answer that is missing."""
    required: bool = True
    """Without a terminal, the flag must be given. Otherwise the default is the answer."""


class Asker:
    """Asks what the flags leave open."""

    def __init__(self, *, interactive: bool, accept: bool):
        """
        Args:
            interactive: somebody is at the terminal.
            accept: take all defaults instead of asking.
        """
        self.interactive = interactive and not accept
        self.accept = accept
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def answer(self, question: Question[T], given: str | None) -> T | None:
        """The answer; None if it is missing or wrong, which `check` reports."""
        if given is None and self.interactive:
            return self._ask(question)
        if given is None and (self.accept or not question.required):
            given = question.default
        elif given is None:
            self._missing.append(f"{question.flag} is missing: {question.choices}")
        if given is None:
            return None
        try:
            return question.parse(given)
        except UserError as error:
            self._wrong += error.problems if isinstance(error, ConfigError) else [str(error)]
            return None

    def check(self) -> None:
        """
        Raises:
            ConfigError: flags are missing or wrong.
        """
        advice = (
            "Run it in a terminal to be asked, or pass --yes to accept the defaults"
            if self._missing
            else ""
        )
        if problems := [*self._wrong, *self._missing]:
            raise ConfigError(problems, where="on the command line", advice=advice)

    def _ask(self, question: Question[T]) -> T:
        print(f"\n{question.text}\n  {question.choices}")
        while True:
            answer = (
                _read(f"> [{question.default}] " if question.default else "> ") or question.default
            )
            if answer is None:
                continue
            try:
                return question.parse(answer)
            except UserError as error:
                print(f"  {error}", file=sys.stderr)

    def choose(self, text: str, most: int) -> int:
        """A number from 1 to `most`; the first if nobody is asked."""
        if not self.interactive or most == 1:
            return 1
        while True:
            answer = _read(f"{text} > [1] ") or "1"
            if answer.isdecimal() and 1 <= int(answer) <= most:
                return int(answer)
            print(f"  a number from 1 to {most}", file=sys.stderr)


def _read(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError:
        raise UserError("the input ended before the last question") from None


def discard_typed() -> None:
    """Forget what was typed while nothing was asked: it would answer the next question."""
    if sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def in_lines(words: Sequence[str], width: int = 100) -> str:
    """Words with commas between them, in lines of at most `width`."""
    return "\n  ".join(textwrap.wrap(", ".join(words), width, break_on_hyphens=False))
