"""Compares runs: whether loss, scores and speed differ by more than noise."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median
from typing import Any

from torchtitan.tools.reports.folder import Folder
from torchtitan.tools.reports.noise import Gap, gap_in_ranges, mean_gap, median_gap
from torchtitan.tools.reports.scores import Curve
from torchtitan.tools.reports.series import Curves
from torchtitan.utils.wording import (
    cut,
    plural,
    show_loss,
    show_rate,
    show_tokens,
    validation_title,
)

SHARE = 0.25
"""Losses are compared over this last share of the common tokens."""
_SCORES = 20
"""Maximum number of benchmark scores that are compared."""
_NORMAL = 1.96
"""Standard errors in half of a 95 % confidence interval."""
_SPEED = ("tokens/s per device slower", "tokens/s per device faster")
_Comparison = tuple[str, Gap, str]
"""A metric, by how much it differs, and that in words."""


@dataclass
class LoadedRun:
    """A run to compare."""

    name: str
    folder: Folder
    curves: Curves
    scores: dict[str, Curve]
    """Scores of its checkpoints by `torchtitan eval`."""
    samples: list[dict[str, Any]]
    """Generated texts, see `read_samples`."""

    @property
    def evals(self) -> dict[str, Curve]:
        """The scores of each benchmark, during training and of checkpoints."""
        return self.curves.evals() | self.scores


def compare(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
    """Differences between each run and the first one."""
    return [difference for run in runs[1:] for difference in _against(run, runs[0])]


def _against(run: LoadedRun, base: LoadedRun) -> Iterator[dict[str, Any]]:
    comparisons = chain(
        _loss(run, base),
        _validation(run, base),
        islice(_evals(run, base), _SCORES),
        _speed(run, base),
    )
    for metric, difference, text in comparisons:
        yield {
            "metric": metric,
            "run": run.name,
            "base": base.name,
            "difference": difference.value,
            "noise": difference.noise,
            "significant": difference.significant,
            "text": text,
        }


# ---- loss


def _loss(run: LoadedRun, base: LoadedRun) -> Iterator[_Comparison]:
    """The difference in loss over the last tokens that both runs have trained on."""
    tokens = min(run.curves.last_tokens, base.curves.last_tokens)
    losses = _losses(run, tokens)
    base_losses = _losses(base, tokens)
    if not losses or not base_losses:
        return
    common = sorted(losses.keys() & base_losses.keys())
    if len(common) >= min(len(losses), len(base_losses)) / 2:
        difference = mean_gap([losses[at] - base_losses[at] for at in common])
        records = plural(len(common), "record")
    else:
        difference = gap_in_ranges(losses, base_losses)
        records = f"{len(losses):,} and {plural(len(base_losses), 'record')}"
    if math.isnan(difference.value):
        return
    share = 1 - max(min(losses), min(base_losses)) / tokens
    percent = f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
    where = f"over the last {percent} of {show_tokens(tokens)} tokens, {records}"
    yield "loss", difference, f"loss {_verdict(difference)}, {where}"


def _losses(run: LoadedRun, tokens: float) -> dict[float, float]:
    """Loss by tokens, for the run's records in the last `SHARE` of `tokens`."""
    begin = (1 - SHARE) * tokens
    columns = run.curves.columns
    records = columns.between(run.curves.step_at(begin), run.curves.step_at(tokens))
    losses = zip(columns.values["tokens"][records], columns.values["loss"][records], strict=True)
    return {at: loss for at, loss in losses if begin < at <= tokens and not math.isnan(loss)}


# ---- validation and benchmarks


def _last_common(
    curves: Mapping[str, Curve], base_curves: Mapping[str, Curve]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The name of each curve, and its values and the base's at the last step of both."""
    for name, curve in curves.items():
        base = base_curves.get(name, {"step": []})
        if common := set(curve["step"]).intersection(base["step"]):
            yield name, _values_at(max(common), curve), _values_at(max(common), base)


def _values_at(step: int, curve: Curve) -> dict[str, Any]:
    at = curve["step"].index(step)
    return {key: column[at] for key, column in curve.items()}


def _validation(run: LoadedRun, base: LoadedRun) -> Iterator[_Comparison]:
    """The difference of each validation set at the last step at which both have validated."""
    for name, last, base_last in _last_common(run.curves.validation(), base.curves.validation()):
        difference = Gap(last["loss"] - base_last["loss"], None)
        text = f"{_verdict(difference)}, at step {last['step']:,}, one validation of each"
        yield f"validation_loss/{name}".rstrip("/"), difference, f"{validation_title(name)} {text}"


def _evals(run: LoadedRun, base: LoadedRun) -> Iterator[_Comparison]:
    """The difference of each score at the last step at which both have it.

    Errors are added as if the runs had answered different questions. The questions are the same,
    so the true error of the difference is smaller.
    """
    for name, last, base_last in _last_common(run.evals, base.evals):
        errors = (last["error"], base_last["error"])
        noise = None if None in errors else _NORMAL * math.hypot(*errors)
        difference = Gap(last["value"] - base_last["value"], noise)
        text = f"{name} {_verdict(difference)}, at step {last['step']:,}"
        yield f"eval/{name}", difference, text


# ---- speed


def _speed(run: LoadedRun, base: LoadedRun) -> Iterator[_Comparison]:
    """Difference of the median tokens per second and device, over each run's last `SHARE`."""
    rates = _rates(run)
    base_rates = _rates(base)
    if not rates or not base_rates:
        return
    difference = median_gap(rates, base_rates)
    verdict = _verdict(difference, show_rate, _SPEED)
    relative = difference.value / (median(base_rates) or 1)
    records = f"{len(rates):,} and {plural(len(base_rates), 'record')}"
    speed = f"speed {verdict} ({relative:+.1%})"
    yield "tokens_per_second", difference, f"{speed}, over the last {records}"


def _rates(run: LoadedRun) -> list[float]:
    """The rates of the last records, without the first of each start, which compiles."""
    last = run.curves.last_step
    first_steps = {start.resumed_step + 1 for start in run.folder.starts} | {1}
    columns = run.curves.columns
    records = columns.between(math.floor((1 - SHARE) * last), last)
    rates = zip(columns.step[records], columns.values["tokens_per_second"][records], strict=True)
    return [rate for step, rate in rates if step not in first_steps and not math.isnan(rate)]


# ---- words


def _verdict(
    difference: Gap,
    show: Callable[[float], str] = show_loss,
    words: tuple[str, str] = ("lower", "higher"),
) -> str:
    """A difference in words.

    Args:
        words: words for a negative and a positive difference.
    """
    if not difference.value:
        return "the same"
    size = show(abs(difference.value))
    word = words[difference.value > 0]
    if difference.noise is None:
        return f"{size} {word} (noise unknown)"
    text = f"{size} ± {show(difference.noise)} {word}"
    return text if difference.significant else f"within noise: {text}"


# ---- configurations

_RUN_SPECIFIC = ("job.dump_folder", "job.save_config_file")
"""Keys that differ between any two runs."""
_LONGEST = 500


def settings(folder: Folder) -> dict[str, Any]:
    """A run's configuration, ranks, layout, devices, commit and versions, by key."""
    values = {key: value for key, value in folder.config.items() if key not in _RUN_SPECIFIC}
    last = folder.last_start
    if last is None:
        return values
    layout = " x ".join(f"{axis} {degree}" for axis, degree in last.layout.items())
    devices = ", ".join(f"{count} {name}" for name, count in last.devices.items())
    hardware = {"ranks": last.ranks, "layout": layout or None, "devices": devices or None}
    return values | hardware | last.provenance


def differences(folders: Sequence[Folder]) -> list[dict[str, Any]]:
    """Keys whose values differ between runs: `key` and `values`, None where unset."""
    by_run = [settings(folder) for folder in folders]
    rows = []
    for key in dict.fromkeys(chain(*by_run)):
        values = [plain(run_settings.get(key)) for run_settings in by_run]
        if any(value != values[0] for value in values):
            rows.append({"key": cut(key, _LONGEST), "values": values})
    return rows


def setting_text(value: Any, *, unset: str, limit: int) -> str:
    """A value of `differences` for a terminal."""
    if value is None:
        return unset
    return cut(str(value).lower() if isinstance(value, bool) else str(value), limit)


def plain(value: Any) -> str | int | float | bool | None:
    """A value that JSON can hold; a list as its text."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return cut(text, _LONGEST)
