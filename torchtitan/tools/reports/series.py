"""Curves of a run, from its `metrics.jsonl`: metrics over steps, tokens, hours and FLOPs."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchtitan.tools.reports.folder import METRICS
from torchtitan.tools.reports.records import MetricsRecord, number, read_records
from torchtitan.tools.reports.scores import Curve, add_point, score_curves

POINTS = 2000
"""Minimum number of points of a longer curve; at most twice as many."""
_MAX_RECORDS = 4096
"""Maximum number of a run's records that are compared."""
_AXES = ("step", "tokens", "time")
_VALIDATION = "validation_loss"
_EVAL = "eval/"
_SOURCE = "loss/"


class ThinnedRecords:
    """Records in the order of their steps: every n-th, and the last one.

    n doubles when there are more than `2 * points` records. A record of an earlier step replaces
    that step's record and all later ones: a rewind or a resume has trained them again.
    """

    def __init__(self, points: int):
        self.every = 1
        self._points = points
        self._records: list[MetricsRecord] = []
        self._last: MetricsRecord | None = None
        self._count = 0

    def add(self, record: MetricsRecord) -> None:
        """Add the next record of the file. Records of one step, one after another, are merged."""
        last_step = self._last.step if self._last else -1
        if self._last and record.step == last_step:
            self._last.values.update(record.values)
            return
        if record.step < last_step:
            while self._records and self._records[-1].step >= record.step:
                self._records.pop()
            self._count = len(self._records) * self.every
        self._last = record
        if self._count % self.every == 0:
            self._records.append(record)
        self._count += 1
        if len(self._records) > 2 * self._points:
            self._records = self._records[::2]
            self.every *= 2

    def records(self) -> list[MetricsRecord]:
        """The remaining records, in the order of their steps."""
        if self._last is None or self._last is self._records[-1]:
            return self._records
        return [*self._records, self._last]


class TrainingColumns:
    """Step, tokens, loss and tokens per second of all training records, for comparing runs."""

    def __init__(self) -> None:
        self.step = array("q")
        self.values = {key: array("d") for key in ("tokens", "loss", "tokens_per_second")}
        """NaN where a record lacks the value."""

    def add(self, record: MetricsRecord) -> None:
        """Add the next record; it replaces records of its step and of later steps."""
        if self.step and record.step <= self.step[-1]:
            first = bisect_left(self.step, record.step)
            del self.step[first:]
            for column in self.values.values():
                del column[first:]
        self.step.append(record.step)
        for key, column in self.values.items():
            value = record.values.get(key)
            column.append(math.nan if value is None else value)

    def between(self, after: int, last: int) -> slice:
        """The records of the steps after `after`, up to `last`; the last `_MAX_RECORDS` if more."""
        end = bisect_right(self.step, last)
        return slice(max(bisect_right(self.step, after), end - _MAX_RECORDS), end)


class Curves:
    """A run's records of training, validations and benchmarks, evenly thinned."""

    def __init__(self, *, points: int = POINTS, began: float | None = None):
        """
        Args:
            began: seconds since the epoch at hour 0; by default the time of the first record.
        """
        self._training = ThinnedRecords(points)
        self._validations = ThinnedRecords(points)
        self._evals = ThinnedRecords(points)
        self._began = began
        self.columns = TrainingColumns()

    def add(self, record: MetricsRecord) -> None:
        """Add the next record of the file."""
        if record.is_training:
            self._training.add(record)
            self.columns.add(record)
        elif any(key.startswith(_EVAL) for key in record.values):
            self._evals.add(record)
        else:
            self._validations.add(record)

    @cached_property
    def training(self) -> list[MetricsRecord]:
        """The training records, thinned."""
        return self._training.records()

    @property
    def records_per_point(self) -> int:
        """Number of training records in the file for each one in `training`."""
        return self._training.every

    @cached_property
    def began(self) -> float:
        """Seconds since the epoch at hour 0."""
        if self._began is not None:
            return self._began
        return next((time for time in self._column("time") if time is not None), 0.0)

    @cached_property
    def _steps(self) -> list[int]:
        return [record.step for record in self.training]

    @cached_property
    def _tokens(self) -> list[float]:
        return _fill(self._column("tokens"))

    @cached_property
    def _names(self) -> dict[str, None]:
        """The names of the training records' values, in their order."""
        return dict.fromkeys(name for record in self.training for name in record.values)

    def _column(self, key: str) -> list[float | None]:
        return [record.values.get(key) for record in self.training]

    def axes(self) -> dict[str, list[Any] | None]:
        """Values of each axis, one for every training record."""
        per_token = self.flops_per_token()
        flops = None
        if per_token is not None:
            flops = _fill(number(per_token * n) for n in self._tokens)
        return {
            "step": self._steps,
            "tokens": self._tokens,
            "hours": _fill(map(self.hours, self._column("time"))),
            "flops": flops,
        }

    def _curve(self, **keys: str) -> Curve:
        """The steps and values of the training records that have all of `keys`, by column."""
        curve: Curve = {"step": [], **{name: [] for name in keys}}
        for record in self.training:
            values = {name: record.values.get(key) for name, key in keys.items()}
            if None not in values.values():
                add_point(curve, step=record.step, **values)
        return curve

    def metrics(self) -> dict[str, list[float | None]]:
        """The values of each metric, None where a record lacks it."""
        return {
            name: self._column(name)
            for name in self._names
            if name not in _AXES and "/" not in name
        }

    def flops_per_token(self) -> float | None:
        """FLOPs per token, as the run's TFLOP/s count them."""
        for record in reversed(self.training):
            rate = record.values.get("tokens_per_second")
            tflops = record.values.get("tflops")
            if rate and tflops:
                return tflops * 1e12 / rate
        return None

    def validation(self) -> dict[str, Curve]:
        """The losses of each validation set; the name is '' if there is one set."""
        curves: dict[str, Curve] = {}
        for record in self._validations.records():
            tokens = self._tokens_at(record.step)
            hours = self.hours(record.values.get("time"))
            for key, loss in record.values.items():
                metric, _, name = key.partition("/")
                if metric == _VALIDATION and loss is not None:
                    curve = curves.setdefault(name, {})
                    add_point(curve, step=record.step, loss=loss, tokens=tokens, hours=hours)
        return curves

    def evals(self) -> dict[str, Curve]:
        """The scores of each benchmark, with their standard errors."""
        prefix = len(_EVAL)
        return score_curves(
            (
                record.step,
                {k[prefix:]: value for k, value in record.values.items() if k.startswith(_EVAL)},
            )
            for record in self._evals.records()
        )

    def sources(self) -> dict[str, Curve]:
        """The losses of each data source."""
        keys = [name for name in self._names if name.startswith(_SOURCE)]
        return {key.removeprefix(_SOURCE): self._curve(loss=key) for key in keys}

    def experts(self) -> Curve | None:
        """Balance of the load of experts; None for a dense model."""
        curve = self._curve(load_max="expert_load_max", entropy="expert_entropy")
        return curve if curve["step"] else None

    def latest(self) -> dict[str, float | None]:
        """The last training record."""
        return self.training[-1].values if self.training else {}

    @property
    def last_step(self) -> int:
        """The step of the last record; 0 if there is none."""
        return max(self._steps, default=0)

    @property
    def last_tokens(self) -> float:
        """Tokens trained on up to the last record."""
        return max(self._tokens, default=0.0)

    def step_at(self, tokens: float) -> int:
        """The step after which this number of tokens was trained on."""
        return math.floor(_interpolate(tokens, self._tokens, self._steps))

    def seconds_per_step(self, since: float) -> float | None:
        """Mean since the first record after `since`; None with fewer than two records."""
        times = zip(self._steps, self._column("time"), strict=True)
        points = [(step, time) for step, time in times if time is not None and time >= since]
        if len(points) < 2:
            return None
        (first_step, first_time), *_, (last_step, last_time) = points
        if last_time <= first_time:
            return None
        return (last_time - first_time) / (last_step - first_step)

    def hours(self, time: float | None) -> float | None:
        """Hours from the beginning to a time in seconds since the epoch; None if unknown."""
        return None if time is None else (time - self.began) / 3600

    def _tokens_at(self, step: int) -> float | None:
        """Tokens trained on up to `step`, between records in proportion to the steps."""
        if not self._steps:
            return None
        return round(_interpolate(step, self._steps, self._tokens))


def read_curves(path: Path, *, points: int = POINTS, began: float | None = None) -> Curves:
    """The curves of the run in a folder; empty if it has none."""
    curves = Curves(points=points, began=began)
    with suppress(OSError):
        for record in read_records(path / METRICS):
            curves.add(record)
    return curves


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear interpolation at `x` between points of ascending `xs`; from zero before the first."""
    at = bisect_left(xs, x)
    if at == len(xs):
        return ys[-1] if ys else 0.0
    x_0 = xs[at - 1] if at else 0.0
    y_0 = ys[at - 1] if at else 0.0
    if xs[at] <= x_0:
        return ys[at]
    return y_0 + (ys[at] - y_0) * (x - x_0) / (xs[at] - x_0)


def _fill(values: Iterable[float | None]) -> list[float]:
    """Values of an axis, made non-decreasing; a missing value repeats the one before it."""
    numbers = (0.0 if value is None else value for value in values)
    return list(accumulate(numbers, max))
