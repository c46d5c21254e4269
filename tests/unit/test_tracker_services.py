"""Trackers of services, read back by their own packages: one run over all starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tracker_runs import Start, history, recorded, wandb_records
from torchtitan.telemetry import tracker_set
from torchtitan.telemetry.trackers.tensorboard import TensorBoardSink

pytestmark = pytest.mark.usefixtures("one_rank", "working_folder")


# ---- Weights & Biases


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    """Offline, after a preemption and a rewind; from scratch in the same folder it is a new one."""
    pytest.importorskip("wandb")
    monkeypatch.setattr(tracker_set, "CLOSE_SECONDS", 240.0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "200")
    monkeypatch.setenv("WANDB_NAME", "mine")
    first = Start(tmp_path, "wandb", end="preempted").log(1, 2, 3)
    first.trackers.call("rewind", 1)
    first.log(2, 3)
    first.close()
    known = recorded(tmp_path)["wandb"]
    assert known == {"id": first.ledger.id, "project": "torchtitan", "name": "mine"}
    monkeypatch.delenv("WANDB_NAME")
    Start(tmp_path, step=2, enable_wandb=True).log(3, 4).close()
    assert recorded(tmp_path)["wandb"] == known
    one, two = wandb_records(tmp_path)
    runs = [
        next(record.run for record in records if record.HasField("run")) for records in (one, two)
    ]
    assert [(run.run_id, run.project, run.display_name) for run in runs] == 2 * [
        (known["id"], "torchtitan", "mine")
    ]
    for records, steps in ((one, [1, 2, 3, 2, 3]), (two, [3, 4])):
        logged = history(records)
        assert [row["train/step"] for row in logged] == steps
        assert [row["train/loss"] for row in logged] == [3.0 / step for step in steps]
        assert all(row["perf/tokens_per_second"] == 9.0 for row in logged)
        defined = {
            r.metric.name or r.metric.glob_name: r.metric.step_metric
            for r in records
            if r.HasField("metric")
        }
        assert defined["*"] == "train/step"
    assert [record.exit.exit_code for record in one if record.HasField("exit")] == [1]
    assert any(record.HasField("preempting") for record in one)
    assert [record.exit.exit_code for record in two if record.HasField("exit")] == [0]
    new = Start(tmp_path, "wandb")  # the last start was completed
    assert (new.ledger.trackers, new.ledger.id != known["id"]) == ({}, True)
    new.close()
    assert recorded(tmp_path)["wandb"]["id"] == new.ledger.id


@pytest.mark.slow
def test_wandb_out_of_reach_neither_stops_nor_delays(tmp_path):
    """Nothing listens on this port. W&B's own code at the exit of a process would wait for it,
    too.
    """
    pytest.importorskip("wandb")
    settings = {
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_MODE": "online",
    }
    done = separate(OUT_OF_REACH, tmp_path, **settings)
    assert done.stdout.count("metrics.sinks: wandb: ") == 1, done.stdout
    assert "The run continues" in done.stdout
    assert done.stdout.index("returned") < done.stdout.index("metrics.sinks: wandb: ")


OUT_OF_REACH = """
import logging, sys
from pathlib import Path
import torch.distributed as dist
from tests.tracker_runs import Start
from torchtitan.telemetry import tracker_set
dist.get_rank, dist.get_world_size = lambda: 0, lambda: 1
logging.basicConfig(stream=sys.stdout)
tracker_set.CLOSE_SECONDS = 10.0
start = Start(Path(sys.argv[1]), "wandb").log(1, 2)
print("returned")
start.close()
"""


def separate(code, *arguments, **environment):
    """Run `code` in a process of its own, because some packages read the environment only once."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


# ---- TensorBoard


def test_tensorboard_hides_what_is_trained_again(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    before = Start(tmp_path, "tensorboard", end="preempted").log(1, 2, 3)
    before.trackers.call("rewind", 1)
    before.log(2, 3, 4).close()
    Start(tmp_path, step=3, enable_tensorboard=True).log(4, 5).close()

    def read():
        events = accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
        assert set(events.Tags()["scalars"]) == {"train/loss", "perf/tokens_per_second"}
        return [(e.step, round(e.value, 3)) for e in events.Scalars("train/loss")]

    assert read() == [(step, round(3.0 / step, 3)) for step in (1, 2, 3, 4, 5)]
    Start(tmp_path, "tensorboard").log(1, 2).close()  # another run, in the same folder
    assert read() == [(1, 3.0), (2, 1.5)]


def test_tensorboard_shows_texts(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.log_samples(2, [{"prompt": "Once", "text": " upon"}])
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    (text,) = events.Tensors("samples/1")
    assert text.tensor_proto.string_val == [b"    Once upon"]
