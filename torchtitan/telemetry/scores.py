"""Scores of a run's checkpoints, which `torchtitan eval` adds to `<dump_folder>/evals.jsonl`.

One JSON object per evaluation: `step`, `time`, `scores` by task and metric, and the `settings` they
depend on. Several commands may write at the same time.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.telemetry.history import ABANDONED
from torchtitan.utils.files import append_line

FILE = "evals.jsonl"


def run_of(checkpoint: Path) -> Path | None:
    """The run's folder above a checkpoint; None if the checkpoint is elsewhere."""
    above = list(checkpoint.resolve().parents)[:2]
    return next((folder for folder in above if (folder / "run.json").is_file()), None)


def record_scores(
    run: Path,
    step: int,
    scores: Mapping[str, float],
    settings: Mapping[str, Any],
    *,
    branch: str | None = None,
    abandoned: bool = False,
) -> Path:
    """Append the scores of a checkpoint to a run's file.

    Args:
        settings: options of the evaluation, without defaults.
        branch: the checkpoint's branch of the run's history.
        abandoned: the run has abandoned the checkpoint.

    Raises:
        OSError: the file can't be written.
    """
    file = run / (f"{ABANDONED}{FILE}" if abandoned else FILE)
    entry = {"step": step, "time": time.time(), "settings": settings, "scores": scores}
    entry["branch"] = branch
    append_line(file, json.dumps(entry).encode() + b"\n")
    return file
