"""Benchmark scores over steps, recorded during training or by `torchtitan eval`."""

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
"""Columns of equal length, by name."""
_ERROR = "_stderr"
_SETTINGS = {
    "ema": "average of the weights",
    "num_fewshot": "{}-shot",
    "limit": "limit {}",
    "max_length": "at most {} tokens",
}


def score_curves(
    scores_by_step: Iterable[tuple[int, Mapping[str, float | None]]],
) -> dict[str, Curve]:
    """The curve of each score: `step`, `value` and `error`, its standard error or None.

    Args:
        scores_by_step: steps, each with scores and their errors by lm-eval's names.
    """
    curves: dict[str, Curve] = {}
    for step, scores in scores_by_step:
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
    """Scores of a run's checkpoints. Their names include the settings of the evaluation."""
    scores_by_label: dict[tuple[str, int], Mapping[str, Any]] = {}
    with suppress(OSError, ValueError):
        for line in read_regular(run / FILE, SAMPLES_READ_BYTES, links=True).splitlines():
            with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
                content = json.loads(line)
                step = step_of(content)
                if step is not None:
                    scores_by_label[_label(content["settings"]), step] = {**content["scores"]}
    curves: dict[str, Curve] = {}
    for label in sorted({label for label, _ in scores_by_label}):
        label_scores = sorted(
            (step, scores) for (other, step), scores in scores_by_label.items() if other == label
        )
        finite = (
            (step, {k: number(v) for k, v in scores.items()}) for step, scores in label_scores
        )
        curves |= {f"{name} ({label})": curve for name, curve in score_curves(finite).items()}
    return curves


def _label(settings: Mapping[str, Any]) -> str:
    known = (
        text.format(settings[name])
        for name, text in _SETTINGS.items()
        if type(settings.get(name)) in (bool, int)
    )
    return ", ".join(["torchtitan eval", *known])
