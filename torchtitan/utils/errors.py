"""Errors for users: one clear message, an exit code, and a traceback only on request."""

import difflib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan.utils.limits import PROBLEM_CHARACTERS
from torchtitan.utils.wording import cut

DEBUG_ENV = "TORCHTITAN_DEBUG"
EMPTY = "must not be empty; is a variable of the shell unset?"


class UserError(Exception):
    """An error the user can fix: the message says what is wrong, where, and what to change."""

    exit_code = 1
    on_all_ranks = False
    """Whether all ranks raise it; then only rank 0 reports it."""


MAX_PROBLEMS = 20
"""Maximum number of problems in a message."""


class ConfigError(UserError):
    """Mistakes in the configuration, reported together."""

    exit_code = 2
    on_all_ranks = True

    def __init__(
        self, problems: Sequence[str], *, where: str = "in the configuration", advice: str = ""
    ):
        """
        Args:
            where: the location that the heading of several problems names.
            advice: a line after them.
        """
        self.problems = [cut(problem, PROBLEM_CHARACTERS) for problem in dict.fromkeys(problems)]
        self.where = where
        self.advice = advice
        lines = self.summary()
        if advice:
            lines.append(advice)
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        # From a process of the planner.
        make = partial(type(self), where=self.where, advice=self.advice)
        return make, (self.problems,)

    def summary(self) -> list[str]:
        """The first problems, and the number of further ones."""
        lines = self.problems[:MAX_PROBLEMS]
        more = len(self.problems) - MAX_PROBLEMS
        if more > 0:
            lines.append(f"and {more:,} more")
        return lines


class NonFiniteError(UserError):
    """The loss or gradient became NaN or infinite with `training.on_nonfinite = "stop"`."""

    on_all_ranks = True


class GuardError(UserError):
    """The guard gave up: too many spikes, or copies of the weights differ."""

    on_all_ranks = True


class OutOfMemoryError(UserError):
    """An allocation failed, on the device or on the host."""

    exit_code = 12  # ENOMEM: a launcher chooses its advice by it


class HangError(UserError):
    """A collective timed out; the message names the rank that blocks the others."""

    on_all_ranks = True


class CheckpointError(UserError):
    """A checkpoint can't be written or read, or is damaged."""


class FormatBugError(CheckpointError):
    """A checkpoint's content doesn't fit its format, which is never the user's mistake."""


class DamageError(CheckpointError):
    """A checkpoint's files are damaged or false. An earlier checkpoint may be intact."""


def report(error: UserError) -> None:
    """Print the message of `error`, or its traceback if `TORCHTITAN_DEBUG=1`."""
    if os.environ.get(DEBUG_ENV) == "1":
        traceback.print_exception(error)
    else:
        print(error_text(error), file=sys.stderr, flush=True)


def error_text(error: BaseException) -> str:
    """The message of `error`, for the terminal."""
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        lines = [f"error: {len(error.problems):,} problems {error.where}"]
        lines += ["  - " + problem.replace("\n", "\n    ") for problem in error.summary()]
        if error.advice:
            lines.append(error.advice)
        return "\n".join(lines)
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    lines = str(error).splitlines() or [type(error).__name__]
    return f"error: {name}" + "\n       ".join(lines)


_ANOTHER_RANK_FAILED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
)
"""Messages of collectives after another rank has died; never the cause of a failure."""
_TIMED_OUT = ("Timed out waiting", "collective operation timeout")
"""Messages of collectives that another rank did not enter in time."""


def from_another_rank(error: BaseException | str) -> bool:
    """Whether `error`, or its text, only reports that another rank has died."""
    return any(text in str(error) for text in _ANOTHER_RANK_FAILED)


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, as the log and the run's files record it."""

    kind: str
    """Name of the exception's class."""
    message: str
    """Never empty."""
    expected: bool
    """The user can fix it, or asked for it, so a traceback is of no use."""
    elsewhere: bool
    """It only reports that another rank has died."""
    is_cause: bool
    """It is not the consequence of another rank's death or of a hang."""

    @property
    def headline(self) -> str:
        """The first line of the message."""
        return self.message.splitlines()[0]

    @property
    def end(self) -> str:
        """The way the run ended, as `run.json` records it."""
        if self.kind == KeyboardInterrupt.__name__:
            return "interrupted"
        return f"failed: {'another rank stopped' if self.elsewhere else self.headline}"


def failure_of(error: BaseException) -> Failure:
    """Describe an error."""
    text = str(error)
    elsewhere = from_another_rank(text)
    return Failure(
        kind=type(error).__name__,
        message=text.strip() or type(error).__name__,
        expected=isinstance(error, UserError | KeyboardInterrupt),
        elsewhere=elsewhere,
        is_cause=not elsewhere and not any(words in text for words in _TIMED_OUT),
    )


def reason(error: Exception) -> str:
    """The text of an error whose message names the file: without its name."""
    return str(getattr(error, "strerror", None) or error)


def did_you_mean(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about a misspelt word: a suggestion, or empty."""
    near = difflib.get_close_matches(word, list(candidates), 1, cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def show_warnings(warnings: Iterable[str]) -> None:
    """Print warnings (legal, but probably a mistake) where there is no log."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
