"""Curves of a run, from its `metrics.jsonl`: metrics over steps, tokens, hours and FLOPs."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchtitan.tools.reports.folder import METRICS
from torchtitan.tools.reports.lines import JsonLines, PlacedRecord, Record, number

POINTS = 2000
"""Points of a curve, about."""
_CHECKS = 500
"""Validations and benchmarks shown, at most."""
_AXES = ("step", "tokens", "time")
_VALIDATION = "validation_loss"
_EVAL = "eval/"
_SOURCE = "loss/"
_EXPERTS = {"load_max": "expert_load_max", "entropy": "expert_entropy"}


class Curves:
    """What a run recorded: training records, evenly thinned, and those of validations and
    benchmarks.
    """

    def __init__(
        self,
        training: Sequence[PlacedRecord] = (),
        others: Iterable[PlacedRecord] = (),
        sampled: int = 1,
        began: float | None = None,
    ):
        """
        Args:
            sampled: every so many records are in `training`.
            began: seconds since the epoch from which hours count.
        """
        self.training = _in_order(training)
        self.others = sorted({p.begin: p for p in others}.values(), key=lambda p: (p.step, p.begin))
        self.sampled = sampled
        self._steps = [p.step for p in self.training]
        self._tokens = _filled(p.record.get("tokens") for p in self.training)
        times = (p.record.get("time") for p in self.training)
        self.began = (
            began if began is not None else next((time for time in times if time is not None), 0.0)
        )

    def axes(self) -> dict[str, list[Any] | None]:
        """A value of each axis for every training record."""
        per_token = self.flops_per_token()
        return {
            "step": self._steps,
            "tokens": self._tokens,
            "hours": _filled(self._hours(p) for p in self.training),
            "flops": None
            if per_token is None
            else _filled(number(per_token * n) for n in self._tokens),
        }

    def metrics(self) -> dict[str, list[float | None]]:
        """The values of each metric, None where a record lacks it."""
        names = {name: None for p in self.training for name in p.record}
        shown = [name for name in names if name not in _AXES and "/" not in name]
        return {name: [p.record.get(name) for p in self.training] for name in shown}

    def flops_per_token(self) -> float | None:
        """What the run's TFLOP/s count for each token."""
        for place in reversed(self.training):
            rate = place.record.get("tokens_per_second")
            tflops = place.record.get("tflops")
            if rate and tflops:
                return tflops * 1e12 / rate
        return None

    def validation(self) -> dict[str, dict[str, list[Any]]]:
        """The losses of each validation set; '' is the name of the only one."""
        found: dict[str, list[tuple[PlacedRecord, float]]] = {}
        for place in self.others:
            for key, value in place.record.items():
                name = key.removeprefix(_VALIDATION)
                if value is not None and name != key and (not name or name[0] == "/"):
                    found.setdefault(name[1:], []).append((place, value))
        return {
            name: {
                "step": [p.step for p, _ in points],
                "loss": [loss for _, loss in points],
                "tokens": [self._tokens_at(p.step) for p, _ in points],
                "hours": [self._hours(p) for p, _ in points],
            }
            for name, points in found.items()
        }

    def evals(self) -> dict[str, dict[str, list[Any]]]:
        """The scores of each benchmark."""
        found: dict[str, dict[str, list[Any]]] = {}
        for place in self.others:
            for key, value in place.record.items():
                if value is not None and key.startswith(_EVAL):
                    curve = found.setdefault(key.removeprefix(_EVAL), {"step": [], "value": []})
                    curve["step"].append(place.step)
                    curve["value"].append(value)
        return found

    def sources(self) -> dict[str, dict[str, list[Any]]]:
        """The losses of each data source."""
        names = {key: None for p in self.training for key in p.record if key.startswith(_SOURCE)}
        return {key.removeprefix(_SOURCE): _curve(self.training, {"loss": key}) for key in names}

    def experts(self) -> dict[str, list[Any]] | None:
        """How evenly experts are loaded; None for a dense model."""
        curve = _curve(self.training, _EXPERTS)
        return curve if curve["step"] else None

    def latest(self) -> dict[str, float | None]:
        """The last training record."""
        return dict(self.training[-1].record) if self.training else {}

    @property
    def last_step(self) -> int:
        """The step of the last record; 0 if there is none."""
        return self._steps[-1] if self._steps else 0

    @property
    def last_tokens(self) -> float:
        """Tokens trained on up to the last record."""
        return self._tokens[-1] if self._tokens else 0.0

    @property
    def steps_per_record(self) -> float:
        """Mean number of steps from one record in the file to the next."""
        return (
            (self._steps[-1] - self._steps[0]) / (len(self._steps) * self.sampled)
            if self._steps
            else 0.0
        )

    def step_at(self, tokens: float) -> int:
        """The step after which so many tokens were trained on."""
        return math.floor(_interpolated(tokens, self._tokens, self._steps)) if self._steps else 0

    def seconds_per_step(self, since: float) -> float | None:
        """The mean since the first record after `since`; None with fewer than two records."""
        times = [(p.step, p.record.get("time")) for p in self.training]
        known = [(step, time) for step, time in times if time is not None and time >= since]
        if len(known) < 2 or known[-1][1] <= known[0][1]:
            return None
        return (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])

    def _hours(self, place: PlacedRecord) -> float | None:
        time = place.record.get("time")
        return None if time is None else (time - self.began) / 3600

    def _tokens_at(self, step: int) -> float | None:
        """Tokens trained on up to `step`, between records in proportion to the steps."""
        return round(_interpolated(step, self._steps, self._tokens)) if self._steps else None


def read_curves(
    path: Path,
    config: Mapping[str, Any],
    *,
    points: int = POINTS,
    began: float | None = None,
) -> Curves:
    """The curves of the run in a folder; empty if it has none.

    Args:
        config: of the run, by dotted key. It says at which steps to look for validations in a large
        file.
        began: from which hours count; by default the first record.
    """
    with suppress(OSError), JsonLines(path / METRICS) as lines:
        sample = lines.sample(points, is_training)
        others = (
            sample.others
            if sample.whole
            else [*sample.others, *_checks(lines, sample.found, config)]
        )
        return Curves(sample.found, others, sample.every, began)
    return Curves(began=began)


def read_window(
    path: Path,
    first_step: int,
    last_step: int,
    points: int,
    *,
    began: float | None,
) -> Curves:
    """The training records from `first_step` to `last_step`, thinned to about `points`."""
    with suppress(OSError), JsonLines(path / METRICS) as lines:
        begin = lines.find(first_step)
        sample = lines.sample(points, is_training, begin, max(begin, lines.find(last_step + 1)))
        return Curves(sample.found, [], sample.every, began)
    return Curves(began=began)


def is_training(record: Record) -> bool:
    """Whether this is what a step of training reports."""
    return "loss" in record


def _checks(
    lines: JsonLines, sample: Sequence[PlacedRecord], config: Mapping[str, Any]
) -> list[PlacedRecord]:
    """Records of validations and benchmarks, found by the steps at which the configuration asks for
    them.

    Args:
        sample: training records, whose places narrow the search.
    """
    last = sample[-1].step if sample else 0
    steps: set[int] = {last}
    for section in ("validation", "eval"):
        freq = config.get(f"{section}.freq")
        if config.get(f"{section}.enable") is True and type(freq) is int and freq > 0:
            every = freq * -(-last // (freq * _CHECKS))
            steps |= set(range(every, last + 1, every)) if every else set()
    known = [place.step for place in sample]
    found: list[PlacedRecord] = []
    for step in sorted(steps):
        at = bisect_left(known, step)
        beyond = bisect_right(known, step)
        below = sample[at - 1] if at else None
        above = sample[beyond] if beyond < len(sample) else None
        found += (
            place for place in lines.of_step(step, below, above) if not is_training(place.record)
        )
    return found


def _in_order(places: Iterable[PlacedRecord]) -> list[PlacedRecord]:
    """The places with ascending steps; of records for the same steps, what was written last."""
    kept: list[PlacedRecord] = []
    for place in places:
        while kept and kept[-1].step >= place.step:
            kept.pop()
        kept.append(place)
    return kept


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The line through points with ascending `xs`, at `x`; before the first one it comes from
    zero.
    """
    at = bisect_left(xs, x)
    if at == len(xs):
        return ys[-1]
    x_0, y_0 = (xs[at - 1], ys[at - 1]) if at else (0.0, 0.0)
    return y_0 + (ys[at] - y_0) * (x - x_0) / (xs[at] - x_0) if xs[at] > x_0 else ys[at]


def _filled(values: Iterable[float | None]) -> list[float]:
    """Values of an axis: never descending, and a missing one like that before it."""
    return list(accumulate((0.0 if v is None else v for v in values), max))


def _curve(places: Iterable[PlacedRecord], keys: Mapping[str, str]) -> dict[str, list[Any]]:
    """The steps and values of those records that have all of `keys`; name in the result to key."""
    rows = [(p.step, *(p.record.get(key) for key in keys.values())) for p in places]
    columns = list(zip(*(row for row in rows if None not in row), strict=True)) or [()] * (
        len(keys) + 1
    )
    return {name: list(column) for name, column in zip(("step", *keys), columns, strict=True)}
