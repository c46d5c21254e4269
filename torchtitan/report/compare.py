"""Whether runs differ in loss and speed by more than noise."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torchtitan.report.folder import Folder
from torchtitan.report.noise import Difference, at_points, paired, unpaired
from torchtitan.report.series import Curves, read_window
from torchtitan.utils.text import plural, show_loss, show_rate, show_tokens

SHARE = 0.25
"""Part of the common tokens over which losses are compared: the last ones."""
_MOST = 4096
"""Records of a run that are compared, at most."""
_LOSS, _SPEED = ("lower", "higher"), ("slower", "faster")


@dataclass(frozen=True)
class Candidate:
    """A run to compare."""

    name: str
    folder: Folder
    curves: Curves


def compare(runs: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Differences of each run to the first one."""
    return [one for run in runs[1:] for one in _against(run, runs[0])]


def _against(run: Candidate, base: Candidate) -> Iterator[dict[str, Any]]:
    pair = {"run": run.name, "base": base.name}
    for found in (_loss(run, base), *_validation(run, base), _speed(run, base)):
        if found:
            metric, difference, text = found
            noise, significant = difference.noise, difference.significant
            yield {"metric": metric, **pair, "difference": difference.value, "noise": noise} | {
                "significant": significant,
                "text": text,
            }


# ---- loss


def _loss(run: Candidate, base: Candidate) -> tuple[str, Difference, str] | None:
    """The difference over the last tokens that both have trained on."""
    tokens = min(run.curves.last_tokens, base.curves.last_tokens)
    series = [_losses(one, tokens) for one in (run, base)]
    if not all(series) or not tokens:
        return None
    common = sorted(series[0].keys() & series[1].keys())
    if len(common) >= min(len(series[0]), len(series[1])) / 2:
        difference = paired([series[0][at] - series[1][at] for at in common])
        records = plural(len(common), "record")
    else:
        difference = at_points(*series)
        records = f"{len(series[0]):,} and {plural(len(series[1]), 'record')}"
    if math.isnan(difference.value):
        return None
    where = f"over the last {SHARE:.0%} of {show_tokens(tokens)} tokens, {records}"
    return "loss", difference, f"loss {_verdict(difference, show_loss, _LOSS)}, {where}"


def _losses(run: Candidate, tokens: float) -> dict[float, float]:
    """Tokens to loss of the run's records in the last `SHARE` of `tokens`."""
    first, last = run.curves.step_at((1 - SHARE) * tokens) + 1, run.curves.step_at(tokens)
    first = max(first, last - round(_MOST * run.curves.steps_per_record))
    window = read_window(run.folder.path, first, last, 2 * _MOST, began=None)
    found = ((place.record.get("tokens"), place.record.get("loss")) for place in window.training)
    return {at: loss for at, loss in found if at is not None and loss is not None}


# ---- validation


def _validation(run: Candidate, base: Candidate) -> Iterator[tuple[str, Difference, str]]:
    """The difference of each validation set at the last step at which both have validated."""
    other = base.curves.validation()
    for name, curve in run.curves.validation().items():
        losses, base_losses = (_by_step(one) for one in (curve, other.get(name)))
        common = sorted(losses.keys() & base_losses.keys())
        if common:
            step, metric = common[-1], f"validation_loss/{name}".rstrip("/")
            difference = Difference(losses[step] - base_losses[step], None)
            text = f"validation loss{f' of {name}' if name else ''} {_verdict(difference, show_loss, _LOSS)}"
            yield metric, difference, f"{text}, at step {step:,}, one validation of each"


def _by_step(curve: dict[str, list[Any]] | None) -> dict[int, float]:
    return dict(zip(curve["step"], curve["loss"], strict=True)) if curve else {}


# ---- speed


def _speed(run: Candidate, base: Candidate) -> tuple[str, Difference, str] | None:
    """The difference of the medians of tokens per second and device, over the last `SHARE` of each run's own steps."""
    rates, base_rates = _rates(run), _rates(base)
    difference = unpaired(rates, base_rates)
    if not rates or not base_rates:
        return None
    text = _verdict(difference, show_rate, _SPEED, " tokens/s per device")
    relative = difference.value / (median(base_rates) or 1)
    records = f"{len(rates):,} and {plural(len(base_rates), 'record')}"
    return (
        "tokens_per_second",
        difference,
        f"speed {text} ({relative:+.1%}), over the last {SHARE:.0%} of each, {records}",
    )


def _rates(run: Candidate) -> list[float]:
    """The rates of the last records, without the first of each start, which compiles."""
    last = run.curves.last_step
    first = max(round((1 - SHARE) * last), last - round(_MOST * run.curves.steps_per_record))
    window = read_window(run.folder.path, first + 1, last, 2 * _MOST, began=None).training
    begun = {start.resumed_step + 1 for start in run.folder.starts} | {1}
    found = (place.record.get("tokens_per_second") for place in window if place.step not in begun)
    return [rate for rate in found if rate is not None]


# ---- words


def _verdict(difference: Difference, show: Callable[[float], str], words: tuple[str, str], unit: str = "") -> str:
    """
    Args:
        words: for a negative and a positive difference.
    """
    size = show(abs(difference.value))
    if difference.noise is not None:
        size += f" ± {show(difference.noise)}"
    text = f"{size}{unit} {words[difference.value > 0]}"
    if difference.noise is None:
        return f"{text} (noise unknown)"
    return text if difference.significant else f"within noise: {text}"
