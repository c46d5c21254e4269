"""Values that a command needs: flags answer for them, defaults, or the user on a terminal."""

import sys
from collections.abc import Callable
from typing import TypeVar

from torchtitan.utils.errors import ConfigError, UserError

T = TypeVar("T")


class Asker:
    """Asks for the values that no flag gives, or collects what is missing and wrong."""

    def __init__(self, *, defaults: bool):
        """
        Args:
            defaults: use defaults instead of asking.
        """
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty() and not defaults
        self.defaults = defaults
        self._problems: list[str] = []
        self._advice = ""
        self.answers: list[str] = []
        """Words of the command line that give the answers and defaults."""

    def value(
        self,
        flag: str,
        text: str | None,
        parse: Callable[[str], T],
        *,
        values: str,
        default: str | None,
    ) -> T | None:
        """A parsed value; None if it is missing or wrong, which `check` reports.

        Args:
            flag: how the command line gives it, such as `--data NAME`.
            text: text of the flag; None if it is absent.
            parse: parses text. Raises a UserError whose message starts with the flag.
            values: description of the possible values.
            default: None if it depends on another missing value.
        """
        words = flag.split()[:1] if flag.startswith("--") else []
        if text is None and self.interactive:
            text, value = _ask(f"{flag}: {values}", parse, default)
            self.answers += [*words, text]
            return value
        if text is None and not self.defaults:
            self._problems.append(f"{flag} is missing: {values}")
            self._advice = "Run it in a terminal to be asked, or pass --yes to accept the defaults"
            return None
        if text is None:
            if default is None:
                return None
            text = default
            self.answers += [*words, text]
        try:
            return parse(text)
        except UserError as error:
            self._problems += error.problems if isinstance(error, ConfigError) else [str(error)]
            return None

    def check(self) -> None:
        """
        Raises:
            ConfigError: values are missing or wrong.
        """
        if self._problems:
            raise ConfigError(self._problems, where="on the command line", advice=self._advice)


def _ask(question: str, parse: Callable[[str], T], default: str | None) -> tuple[str, T]:
    """An answer and its parsed value; a wrong answer is asked again."""
    from rich.prompt import Prompt

    while True:
        try:
            answer = Prompt.ask(question, default=default or "")
        except EOFError:
            raise UserError("the input ended before the last question") from None
        try:
            return answer, parse(answer)
        except UserError as error:
            print(f"  {error}", file=sys.stderr)
