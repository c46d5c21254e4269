"""Benchmark scores over steps, recorded during training or by `torchtitan eval`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.telemetry.scores import FILE
from torchtitan.tools.reports.records import number, tail_objects, whole
from torchtitan.utils.limits import SAMPLES_READ_BYTES

Curve = dict[str, list[Any]]
"""Columns of equal length, by name."""
_ERROR = "_stderr"
_SETTINGS = {
    "ema": "average of the weights",
    "num_fewshot": "{}-shot",
    "limit": "limit {}",
    "max_length": "at most {} tokens",
    "chat": "chat template",
}


def add_point(curve: Curve, **values: Any) -> None:
    """Append a value to each column of a curve."""
    for name, value in values.items():
        curve.setdefault(name, []).append(value)


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
            error = scores.get(errors.get(name, ""))
            add_point(curves.setdefault(name, {}), step=step, value=value, error=error)
    return curves


def read_scores(run: Path) -> dict[str, Curve]:
    """Scores of a run's checkpoints. Their names include the settings of the evaluation."""
    by_label: dict[str, dict[int, dict[str, float | None]]] = defaultdict(dict)
    for content in tail_objects(run / FILE, SAMPLES_READ_BYTES):
        step = whole(content.get("step"))
        if step is None:
            continue
        with suppress(TypeError, LookupError, AttributeError):
            scores = {name: number(score) for name, score in content["scores"].items()}
            by_label[_label(content["settings"])][step] = scores
    return {
        f"{name} ({label})": curve
        for label, by_step in sorted(by_label.items())
        for name, curve in score_curves(sorted(by_step.items())).items()
    }


def _label(settings: Mapping[str, Any]) -> str:
    settings_text = (
        text.format(settings[name])
        for name, text in _SETTINGS.items()
        if type(settings.get(name)) in (bool, int)
    )
    return ", ".join(["torchtitan eval", *settings_text])
