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
from torchtitan.tools.reports.scores import score_curves

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
    """A run's records: training, evenly thinned, and validations and benchmarks."""

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
        self._tokens = _filled(self._column("tokens"))
        if began is None:
            times = self._column("time")
            began = next((time for time in times if time is not None), 0.0)
        self.began = began

    def _column(self, key: str) -> list[float | None]:
        return [p.record.get(key) for p in self.training]

    def axes(self) -> dict[str, list[Any] | None]:
        """A value of each axis for every training record."""
        per_token = self.flops_per_token()
        flops = None
        if per_token is not None:
            flops = _filled(number(per_token * n) for n in self._tokens)
        return {
            "step": self._steps,
            "tokens": self._tokens,
            "hours": _filled(self._hours(p) for p in self.training),
            "flops": flops,
        }

    def metrics(self) -> dict[str, list[float | None]]:
        """The values of each metric, None where a record lacks it."""
        names = {name: None for p in self.training for name in p.record}
        shown = [name for name in names if name not in _AXES and "/" not in name]
        return {name: self._column(name) for name in shown}

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
        found: dict[str, dict[str, list[Any]]] = {}
        for place in self.others:
            for key, loss in place.record.items():
                name = key.removeprefix(_VALIDATION)
                if loss is None or name == key or name[:1] not in ("", "/"):
                    continue
                empty: dict[str, list[Any]] = {"step": [], "loss": [], "tokens": [], "hours": []}
                curve = found.setdefault(name[1:], empty)
                curve["step"].append(place.step)
                curve["loss"].append(loss)
                curve["tokens"].append(self._tokens_at(place.step))
                curve["hours"].append(self._hours(place))
        return found

    def evals(self) -> dict[str, dict[str, list[Any]]]:
        """The scores of each benchmark, with their standard errors."""
        found: list[tuple[int, Record]] = []
        for place in self.others:
            scores = {
                key.removeprefix(_EVAL): value
                for key, value in place.record.items()
                if key.startswith(_EVAL)
            }
            found.append((place.step, scores))
        return score_curves(found)

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
        if not self._steps:
            return 0.0
        return (self._steps[-1] - self._steps[0]) / (len(self._steps) * self.sampled)

    def step_at(self, tokens: float) -> int:
        """The step after which so many tokens were trained on."""
        if not self._steps:
            return 0
        return math.floor(_interpolated(tokens, self._tokens, self._steps))

    def seconds_per_step(self, since: float) -> float | None:
        """The mean since the first record after `since`; None with fewer than two records."""
        times = zip(self._steps, self._column("time"), strict=True)
        known = [(step, time) for step, time in times if time is not None and time >= since]
        if len(known) < 2:
            return None
        first_step, first_time = known[0]
        last_step, last_time = known[-1]
        if last_time <= first_time:
            return None
        return (last_time - first_time) / (last_step - first_step)

    def _hours(self, place: PlacedRecord) -> float | None:
        time = place.record.get("time")
        if time is None:
            return None
        return (time - self.began) / 3600

    def _tokens_at(self, step: int) -> float | None:
        """Tokens trained on up to `step`, between records in proportion to the steps."""
        if not self._steps:
            return None
        return round(_interpolated(step, self._steps, self._tokens))


def read_curves(
    path: Path, config: Mapping[str, Any], *, points: int = POINTS, began: float | None = None
) -> Curves:
    """The curves of the run in a folder; empty if it has none.

    Args:
        config: of the run, by dotted key. It says at which steps to look for validations in a large
        file.
        began: from which hours count; by default the first record.
    """
    with suppress(OSError), JsonLines(path / METRICS) as lines:
        sample = lines.sample(points, is_training)
        others = sample.others
        if not sample.whole:
            others = [*others, *_checks(lines, sample.found, config)]
        return Curves(sample.found, others, sample.every, began)
    return Curves(began=began)


def read_window(
    path: Path, first_step: int, last_step: int, points: int, *, began: float | None
) -> Curves:
    """The training records from `first_step` to `last_step`, thinned to about `points`."""
    with suppress(OSError), JsonLines(path / METRICS) as lines:
        begin = lines.find(first_step)
        after = max(begin, lines.find(last_step + 1))
        sample = lines.sample(points, is_training, begin, after)
        return Curves(sample.found, [], sample.every, began)
    return Curves(began=began)


def is_training(record: Record) -> bool:
    """Whether this is what a step of training reports."""
    return "loss" in record


def _checks(
    lines: JsonLines, sample: Sequence[PlacedRecord], config: Mapping[str, Any]
) -> list[PlacedRecord]:
    """Records of validations and benchmarks, found by the steps that the configuration implies.

    Args:
        sample: training records, whose places narrow the search.
    """
    last = sample[-1].step if sample else 0
    steps: set[int] = {last}
    for section in ("validation", "eval"):
        freq = config.get(f"{section}.freq")
        enabled = config.get(f"{section}.enable") is True
        if last and enabled and type(freq) is int and freq > 0:
            every = freq * math.ceil(last / (freq * _CHECKS))
            steps |= set(range(every, last + 1, every))
    known = [place.step for place in sample]
    found: list[PlacedRecord] = []
    for step in sorted(steps):
        at = bisect_left(known, step)
        beyond = bisect_right(known, step)
        below = sample[at - 1] if at else None
        above = sample[beyond] if beyond < len(sample) else None
        for place in lines.of_step(step, below, above):
            if not is_training(place.record):
                found.append(place)
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
    """Linear interpolation at `x` between points of ascending `xs`; from zero before the first."""
    at = bisect_left(xs, x)
    if at == len(xs):
        return ys[-1]
    x_0 = xs[at - 1] if at else 0.0
    y_0 = ys[at - 1] if at else 0.0
    if xs[at] <= x_0:
        return ys[at]
    return y_0 + (ys[at] - y_0) * (x - x_0) / (xs[at] - x_0)


def _filled(values: Iterable[float | None]) -> list[float]:
    """Values of an axis: never descending, and a missing one like that before it."""
    known = (0.0 if value is None else value for value in values)
    return list(accumulate(known, max))


def _curve(places: Iterable[PlacedRecord], keys: Mapping[str, str]) -> dict[str, list[Any]]:
    """The steps and values of those records that have all of `keys`; name in the result to key."""
    curve: dict[str, list[Any]] = {"step": [], **{name: [] for name in keys}}
    for place in places:
        values = {name: place.record.get(key) for name, key in keys.items()}
        if None in values.values():
            continue
        curve["step"].append(place.step)
        for name, value in values.items():
            curve[name].append(value)
    return curve
