"""Trackers on every rank of a real run."""

import json

import pytest

from tests.runs import arguments, train
from tests.tracker_runs import history, wandb_records

pytestmark = pytest.mark.slow


def test_every_rank_has_a_run_of_its_own(ranks, tmp_path, monkeypatch):
    """With `metrics.save_for_all_ranks`, and the same one after a restart."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("wandb")
    flags = [
        "--metrics.save_for_all_ranks",
        "--metrics.sinks=wandb,tensorboard",
        "--checkpoint.enable",
    ]
    flags += ["--checkpoint.interval=2", "--lr_scheduler.total_steps=8"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (2, 4):
        ranks(2, train, arguments(tmp_path, *flags, steps=steps))
    out = tmp_path / "out"
    run = json.loads((out / "run.json").read_text())
    shown = {}
    for records in wandb_records(out):
        about = next(record.run for record in records if record.HasField("run"))
        shown.setdefault(about.run_id, []).extend(row["train/step"] for row in history(records))
        assert about.run_group == run["id"]
    assert shown == {f"{run['id']}-rank_{rank}": [1, 2, 3, 4] for rank in (0, 1)}
    for rank in (0, 1):
        events = (
            accumulator.EventAccumulator(str(out / f"tb/rank_{rank}"))
            .Reload()
            .Scalars("train/loss")
        )
        assert [event.step for event in events] == [1, 2, 3, 4]
