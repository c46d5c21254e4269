"""Questions that a command asks: flags answer them, or the user on a terminal."""

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
    """A value that a command needs from the user."""

    flag: str
    """The flag that answers it, such as `--model FAMILY/SIZE`."""
    text: str
    choices: str
    """Description of possible answers, in one or more lines."""
    parse: Callable[[str], T]
    """Parses an answer. Raises a UserError whose message starts with a flag."""
    default: str | None = None
    """Default answer; None if it depends on a missing answer."""
    required: bool = True
    """Whether the flag must be given without a terminal; if not, the default is used."""


class Asker:
    """Asks what the flags leave open."""

    def __init__(self, *, interactive: bool, accept: bool):
        """
        Args:
            interactive: whether a user is at the terminal.
            accept: whether to take all defaults instead of asking.
        """
        self.interactive = interactive and not accept
        self.accept = accept
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def answer(self, question: Question[T], text: str | None) -> T | None:
        """The parsed answer; None if it is missing or wrong, which `check` reports.

        Args:
            text: value of the flag; None if it was not given.
        """
        if text is None:
            if self.interactive:
                return self._ask(question)
            if self.accept or not question.required:
                text = question.default
            else:
                self._missing.append(f"{question.flag} is missing: {question.choices}")
        if text is None:
            return None
        try:
            return question.parse(text)
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
        """Ask for a number from 1 to `most`; 1 without a terminal."""
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
    """Discard input typed before a question: it would count as the answer."""
    if sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def wrapped(words: Sequence[str], width: int = 100) -> str:
    """Words joined by commas and wrapped at `width` characters."""
    return "\n  ".join(textwrap.wrap(", ".join(words), width, break_on_hyphens=False))
