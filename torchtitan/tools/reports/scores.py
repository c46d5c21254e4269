"""Scores of benchmarks over steps: those of training, and those of `torchtitan eval`."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.telemetry.scores import FILE
from torchtitan.tools.reports.records import number, step_of
from torchtitan.utils.files import read_regular
from torchtitan.utils.limits import SAMPLES_READ_BYTES

Curve = dict[str, list[Any]]
"""Columns of one length, by name."""
_ERROR = "_stderr"
_SETTINGS = {
    "ema": "average of the weights",
    "num_fewshot": "{}-shot",
    "limit": "limit {}",
    "max_length": "at most {} tokens",
}


def score_curves(found: Iterable[tuple[int, Mapping[str, float | None]]]) -> dict[str, Curve]:
    """The curve of each score: `step`, `value` and `error`, its standard error or None.

    Args:
        found: steps, each with its scores and their errors by the names that lm-eval gives them.
    """
    curves: dict[str, Curve] = {}
    for step, scores in found:
        errors = {name.replace(_ERROR, ""): name for name in scores if _ERROR in name}
        for name, value in scores.items():
            if value is None or name in errors.values():
                continue
            curve = curves.setdefault(name, {"step": [], "value": [], "error": []})
            curve["step"].append(step)
            curve["value"].append(value)
            curve["error"].append(scores.get(errors.get(name, "")))
    return curves


def read_scores(run: Path) -> dict[str, Curve]:
    """The scores of a run's checkpoints. The name of each says what they depend on."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    with suppress(OSError, ValueError):
        for line in read_regular(run / FILE, SAMPLES_READ_BYTES, links=True).splitlines():
            with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
                content = json.loads(line)
                step = step_of(content)
                if step is not None:
                    found[_label(content["settings"]), step] = {**content["scores"]}
    curves: dict[str, Curve] = {}
    for label in sorted({label for label, _ in found}):
        of_label = sorted((step, scores) for (one, step), scores in found.items() if one == label)
        finite = ((step, {k: number(v) for k, v in scores.items()}) for step, scores in of_label)
        curves |= {f"{name} ({label})": curve for name, curve in score_curves(finite).items()}
    return curves


def _label(settings: Mapping[str, Any]) -> str:
    known = (
        text.format(settings[name])
        for name, text in _SETTINGS.items()
        if type(settings.get(name)) in (bool, int)
    )
    return ", ".join(["torchtitan eval", *known])
