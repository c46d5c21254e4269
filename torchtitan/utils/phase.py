"""The one clock of a run: what this rank is doing, and since when.

    with phase("data", "waiting for data from c4", step=7):
        batch = next(batches)

The watch's thread reads `current()`, to say where a rank hangs. The ledger and the metrics `subscribe`, to add up where
the time went: nested time counts for the innermost phase.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

Kind = Literal["start", "step", "data", "save", "validation", "other"]
DATA, SAVING = "waiting for data", "saving"
"""How the activities of "data" and "save" begin; the diagnosis of a hang looks for them."""
CHECKPOINT_GROUP = "checkpoint"
"""Description of the process group that saves run on. A save in the background blocks nobody."""


class Phase(NamedTuple):
    """What a rank is doing."""

    kind: Kind
    """What its time counts as."""
    activity: str
    """In words that follow "has been"."""
    step: int
    since: float
    """`time.monotonic()` when this activity began."""


Subscriber = Callable[[Phase, float], None]
"""Called with a phase that ends, or that an inner one interrupts, and `time.monotonic()` of that moment."""

_current = Phase("start", "starting", 0, time.monotonic())
_subscribers: list[Subscriber] = []


def current() -> Phase:
    """The innermost phase. A new object after every change, so `is` tells whether anything has moved."""
    return _current


def begin(kind: Kind, activity: str, step: int = 0) -> None:
    """Enter a phase that lasts until the next `begin` or `phase`. Called once per run, before any `phase`."""
    _change(Phase(kind, activity, step, time.monotonic()))


@contextmanager
def phase(kind: Kind, activity: str, step: int | None = None) -> Iterator[None]:
    """Time inside counts as `kind`.

    An exception leaves the phase in place: it is where the run failed.
    """
    outer = _current
    _change(Phase(kind, activity, outer.step if step is None else step, time.monotonic()))
    yield
    _change(outer._replace(since=time.monotonic()))


def note(activity: str) -> None:
    """Name the part of the current phase that begins now. Costs a microsecond."""
    global _current
    _current = _current._replace(activity=activity, since=time.monotonic())


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Call `subscriber` at every change of phase; the result ends that."""
    _subscribers.append(subscriber)
    return lambda: _subscribers.remove(subscriber)


def _change(to: Phase) -> None:
    global _current
    ended, _current = _current, to
    for subscriber in _subscribers:
        subscriber(ended, to.since)
