"""Watching over a run: what is a spike, what is done about it, and which ranks are slow.

Decisions only, from numbers that are the same on every rank; the trainer carries them out.
"""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any, Literal

from torchtitan.config import schema

_SIGMA = 1.4826
"""Standard deviation of normally distributed values, in units of their median absolute deviation."""
_NARROWEST = 0.01
"""Least standard deviation, as a share of the median: a loss that hardly moves must not make noise a spike."""


@dataclass(frozen=True)
class Spike:
    """A step that is not as the others."""

    step: int
    reason: str
    action: Literal["warn", "skip", "rewind", "stop"]


def deviation(value: float, window: Sequence[float]) -> float:
    """By how many standard deviations `value` lies above the median of `window`.

    The modified z-score (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993): spikes in the window itself
    move neither the median nor the median absolute deviation.
    """
    center = median(window)
    sigma = _SIGMA * median(abs(x - center) for x in window)
    return (value - center) / max(sigma, _NARROWEST * abs(center), 1e-12)


class Guard:
    """Finds spikes, and keeps account of the rows that had no part in the weights because of them."""

    def __init__(self, config: schema.Guard, rows_per_step: int):
        self.config, self.rows_per_step = config, rows_per_step
        self.thresholds = {"loss": config.loss_threshold, "grad_norm": config.grad_norm_threshold}
        self.windows = {name: deque[float](maxlen=config.window) for name in self.thresholds}
        self.streak = self.calm = 0
        self.rows = 0
        """Rows of the global order that were read so far."""
        self.skipped: list[list[int]] = []
        """Ranges [first, after) of rows that the weights have not seen."""

    @property
    def acts(self) -> bool:
        """Whether a spike changes what the step does: then all ranks must judge the very same numbers."""
        return self.config.policy in ("skip", "rewind")

    def judge(self, step: int, loss: float, grad_norm: float) -> Spike | None:
        """Take note of a step's outcome; what is wrong with it, if anything."""
        config, values = self.config, {"loss": loss, "grad_norm": grad_norm}
        self.rows += self.rows_per_step
        if config.policy == "off":
            return None
        reasons = [reason for name, value in values.items() if (reason := self._reason(name, value))]
        # Where nothing is done about spikes they count too, or a lasting change would be reported forever.
        if step > config.warmup_steps and (not reasons or not self.acts) and all(map(math.isfinite, values.values())):
            for name, value in values.items():
                self.windows[name].append(value)
        if not reasons:
            self.calm += 1
            if self.calm >= (config.window if config.policy == "rewind" else 1):
                self.streak = 0
            return None
        self.calm = 0
        self.streak += self.acts
        action = "stop" if self.streak > config.limit else config.policy
        return Spike(step, " and ".join(reasons), action)

    def _reason(self, name: str, value: float) -> str | None:
        text = name.replace("_", " ")
        if not math.isfinite(value):
            return f"{text} {value}" if self.acts else None  # else training.on_nonfinite decides
        window, threshold = self.windows[name], self.thresholds[name]
        if not threshold or len(window) < self.config.window:
            return None
        above = deviation(value, window)
        if above <= threshold:
            return None
        return f"{text} {value:.4g}, {above:.1f} standard deviations above {median(window):.4g}"

    def leave_out(self, first: int) -> list[int]:
        """Note that the weights have not seen the rows from `first` to where the data is now; those rows."""
        merged = [r for r in self.skipped if r[1] < first]
        for r in self.skipped[len(merged) :]:
            first = min(first, r[0])
        self.skipped = [*merged, [first, self.rows]]
        return self.skipped[-1]

    def state_dict(self) -> dict[str, Any]:
        return {
            "windows": {name: list(values) for name, values in self.windows.items()},
            "streak": self.streak,
            "calm": self.calm,
            "rows": self.rows,
            "skipped": [list(r) for r in self.skipped],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, of which at least `rows` must be there."""
        for name, values in state.get("windows", {}).items():
            self.windows[name] = deque(values, maxlen=self.config.window)
        self.streak, self.calm, self.rows = state.get("streak", 0), state.get("calm", 0), state["rows"]
        self.skipped = [list(r) for r in state.get("skipped", ())]


def append_event(path: Path, event: dict[str, Any]) -> None:
    """Add a line to the journal of what the guard did."""
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")


class Stragglers:
    """Names ranks that are slower than the median rank, one logged step after another."""

    def __init__(self, config: schema.Guard):
        self.factor, self.records = config.straggler_factor, config.straggler_records
        self.slow: dict[int, int] = {}

    def observe(self, compute: Sequence[float], data: Sequence[float], step_time: float) -> dict[int, str]:
        """The ranks to be named, and in what they are slow.

        Args:
            compute: seconds in which each rank computes the same thing.
            data: seconds per step for which each rank waits for data.
            step_time: seconds per step, in which all ranks wait for the slowest.
        """
        # Of two ranks the faster one is usual.
        usual_compute, usual_data = median_low(compute), median_low(data)
        found = {}
        for rank, (own_compute, own_data) in enumerate(zip(compute, data, strict=True)):
            # Without this rank's additional wait a step would be so much shorter.
            without = max(step_time - max(own_data - usual_data, 0.0), 1e-9)
            in_compute, in_data = own_compute / max(usual_compute, 1e-9), step_time / without
            slow = max(in_compute, in_data) > self.factor
            self.slow[rank] = self.slow.get(rank, 0) + 1 if slow else 0
            if slow and self.slow[rank] % self.records == 0:
                if in_compute >= in_data:
                    found[rank] = f"computes {in_compute:.1f} times as long as the median rank"
                else:
                    found[rank] = f"waits {own_data:.2f} s per step for data, the median rank {usual_data:.2f} s"
        return found
