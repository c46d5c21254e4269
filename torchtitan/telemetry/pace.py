"""How long a run still takes, from the steps it has made since its start."""

from collections import deque
from collections.abc import Callable
from statistics import median_low
from time import monotonic

_RECENT = 100
"""Steps that show how fast it goes now."""
_USUAL = 3.0
"""An interval of more than this many usual ones includes something that isn't a step."""


class Pace:
    """The time between steps, with what happens there: validation, saves, waiting for data,
    compilation.

    What an interval takes beyond three usual ones counts as an interruption. The steps that are
    left are expected to take as long as recent ones do without interruptions, and to be interrupted
    as often as all since the start. So a validation every thousand steps counts in proportion, and
    a single pause changes the estimate by little.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = monotonic):
        self.total = total_steps
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._count = 0
        self._interrupted = 0.0
        """Seconds of interruptions before the recent intervals."""
        self._last: float | None = None
        self._left = total_steps

    def step_done(self, step: int) -> None:
        """Record that `step` has just ended."""
        now = self._clock()
        self._left = self.total - step
        if self._last is not None:
            if len(self._recent) == _RECENT:
                self._interrupted += max(0.0, self._recent[0] - _USUAL * median_low(self._recent))
            self._recent.append(now - self._last)
            self._count += 1
        self._last = now

    def seconds_left(self) -> float | None:
        """Seconds to the end of the last step; None before there is an interval to judge from.

        The first interval begins at the end of the first step, which compiles.
        """
        if not self._recent:
            return None if self._left else 0.0
        limit = _USUAL * median_low(self._recent)
        usual = sum(min(interval, limit) for interval in self._recent) / len(self._recent)
        interrupted = self._interrupted + sum(
            max(0.0, interval - limit) for interval in self._recent
        )
        # After few steps, a single interruption says little about how often there will be one.
        share = interrupted / max(self._count, min(_RECENT, self.total // 10))
        return self._left * (usual + share)
