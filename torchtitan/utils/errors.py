"""Errors for people: one clear message, an exit code, and a traceback only on request."""

import difflib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence

DEBUG_ENV = "TORCHTITAN_DEBUG"


class UserError(Exception):
    """Something the user can mend. The message says what is wrong, where it was set, and what to change."""

    exit_code = 1


class ConfigError(UserError):
    """One or more mistakes in the configuration, reported together."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class NonFiniteError(UserError):
    """The loss or the gradient became NaN or infinite and `training.on_nonfinite = "stop"`."""


class GuardError(UserError):
    """The training guard sees no sense in going on."""


class HangError(UserError):
    """A collective took longer than its time limit; the message names who held it up."""


class CheckpointError(UserError):
    """A checkpoint can't be written, read or trusted."""


def report(error: UserError) -> None:
    """Print `error` for a person, with the traceback only if `TORCHTITAN_DEBUG=1`."""
    if os.environ.get(DEBUG_ENV) == "1":
        traceback.print_exception(error)
        return
    lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        print(f"error: {len(error.problems)} problems in the configuration", file=sys.stderr)
        for problem in error.problems:
            print("  - " + problem.replace("\n", "\n    "), file=sys.stderr)
    else:
        print("error: " + "\n       ".join(lines), file=sys.stderr)
    sys.stderr.flush()


_ANOTHER_RANK_FAILED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
)
"""What a rank's collectives say when another rank has gone: never the cause."""


def from_another_rank(error: BaseException | str) -> bool:
    """Whether `error`, or its text, only says that another rank has gone."""
    return any(text in str(error) for text in _ANOTHER_RANK_FAILED)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about a misspelt word; empty if nothing is near."""
    near = difflib.get_close_matches(word, list(known), 1, cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def run_main(main: Callable[[list[str]], int | None], argv: list[str] | None = None, *, rank: int = 0) -> int:
    """Run `main(argv)`; its exit code. Failures are told once and by the rank that has the cause.

    A `UserError` becomes its message, an unexpected error its traceback, and an error that only says that another rank
    has gone one line. A mistake in the configuration or a hang, which all ranks meet alike, is told by rank 0.
    """
    try:
        code = main(sys.argv[1:] if argv is None else argv) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        if rank == 0 or not isinstance(error, (ConfigError, HangError)):
            report(error)
        return error.exit_code
    except KeyboardInterrupt:
        if rank == 0:
            print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + signal.SIGPIPE
        if os.environ.get(DEBUG_ENV) != "1" and from_another_rank(error):
            print(f"rank {rank}: stopped, because another rank did", file=sys.stderr)
        else:
            traceback.print_exception(error)
        return 1


def _nobody_reads() -> bool:
    """Whether what standard output is piped into, as `head`, has ended."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its exit
    return True
