"""The clock of a run: this rank's current activity, and the time spent on each kind of activity.

    with phase("data", "waiting for data from c4"):
        batch = next(batches)

Subscribers are called at every change: the run record and the metrics add up time. The hang watch
reads `current()` to report where a rank hangs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Literal, NamedTuple

Kind = Literal[
    "start", "first_step", "steps", "repeated", "data", "staging", "saves", "validation", "other"
]
DATA = "waiting for data"
SAVING = "saving"
"""Prefixes of activities that wait for data or storage. The hang watch waits longer for storage,
and the diagnosis looks for both.
"""
CHECKPOINT_GROUP = "checkpoint"
"""Description of the process group of saves. A save in the background blocks no rank."""


class Activity(NamedTuple):
    """A rank's activity."""

    kind: Kind
    """The kind of time it is charged to."""
    activity: str
    """Words that can follow "has been"."""
    step: int
    since: float
    """`monotonic()` when this activity began."""


class Exchange(NamedTuple):
    """An all-to-all whose numbers of rows depend on the data; collectives record only sums."""

    number: int
    """Sequence number in this process; all ranks of a group make the same exchanges in order."""
    ranks: Sequence[int]
    sent: Sequence[int]
    """Rows sent to each of `ranks`."""
    expected: Sequence[int]
    """Rows that will come from each of `ranks`."""


Subscriber = Callable[[Activity, float], None]
"""Called when an activity ends or a nested one begins, with the activity and `monotonic()`."""

_current = Activity("start", "starting", 0, monotonic())
_subscribers: list[Subscriber] = []
_exchanges: deque[Exchange] = deque(maxlen=64)


def current() -> Activity:
    """The innermost activity. Every change makes a new object, so `is` shows any progress."""
    return _current


def begin(kind: Kind, activity: str, step: int = 0) -> None:
    """Enter a phase that lasts until the next `begin`; nested phases return to it."""
    _change(Activity(kind, activity, step, monotonic()))


@contextmanager
def phase(kind: Kind, activity: str, step: int | None = None) -> Iterator[None]:
    """Charge the time inside to `kind`, and nested time to the innermost phase.

    An exception leaves the phase in place, because that is where the run failed.
    """
    outer = _current
    _change(Activity(kind, activity, outer.step if step is None else step, monotonic()))
    yield
    _change(outer._replace(since=monotonic()))


def note(activity: str) -> None:
    """Name the activity that begins now within the current phase. Costs a microsecond."""
    global _current
    _current = _current._replace(activity=activity, since=monotonic())


def note_exchange(ranks: Sequence[int], sent: Sequence[int], expected: Sequence[int]) -> None:
    """Record an exchange that begins now, for the diagnosis of a hang. Costs a microsecond."""
    number = _exchanges[-1].number + 1 if _exchanges else 1
    _exchanges.append(Exchange(number, ranks, sent, expected))


def last_exchanges() -> list[Exchange]:
    """The last exchanges, oldest first. With CUDA, the host is ahead of the running exchange."""
    return list(_exchanges)


def forget_exchanges() -> None:
    """Number exchanges from 1 again, on all ranks together."""
    _exchanges.clear()


class Stopwatch:
    """Seconds spent on each kind of phase, until `close`."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = monotonic()
        _subscribers.append(self._add)

    def _add(self, ended: Activity, at: float) -> None:
        self._seconds[ended.kind] += at - self._since
        self._since = at

    def lap(self) -> dict[str, float]:
        """Seconds by kind since the last call or the start; 0 for kinds that did not occur."""
        self._add(_current, monotonic())
        lap = self._seconds
        self._seconds = defaultdict(float)
        return lap

    def close(self) -> None:
        if self._add in _subscribers:
            _subscribers.remove(self._add)


def _change(to: Activity) -> None:
    global _current
    ended = _current
    _current = to
    for subscriber in _subscribers:
        subscriber(ended, to.since)
