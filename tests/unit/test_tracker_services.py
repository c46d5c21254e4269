"""Trackers of services, read back by their own packages: one run over all starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tracker_runs import Start, history, recorded, wandb_records
from torchtitan.telemetry import tracker_set
from torchtitan.telemetry.trackers.mlflow import artifact_location
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


def test_tensorboard_shows_histograms_and_texts(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.log_histograms(2, {"expert_load/layer 1": [2.0, 0.0, 1.0, 1.0]})
    sink.log_samples(2, [{"prompt": "Once", "text": " upon"}])
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    (histogram,) = events.Histograms("expert_load/layer 1")
    assert (histogram.histogram_value.max, sum(histogram.histogram_value.bucket)) == (2.0, 4)
    (text,) = events.Tensors("samples/1")
    assert text.tensor_proto.string_val == [b"    Once upon"]


# ---- MLflow


def mlflow_values(client, run, name):
    return sorted((m.step, m.value) for m in client.get_metric_history(run, name))


@pytest.mark.slow
def test_mlflow_continues_the_same_run(tmp_path, monkeypatch):
    """In a folder. Values of steps that are trained again are kept twice."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    folder = tmp_path / "run"
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path}/store")
    first = Start(folder, "mlflow", end="preempted").log(1, 2, 3)
    first.close()
    known = recorded(folder)["mlflow"]
    assert client.get_run(known["id"]).info.status == "KILLED"
    second = Start(folder, "mlflow", step=2, end="failed: cause").log(3, 4)
    second.trackers.call("log_samples", 4, [{"prompt": "Once", "text": " upon"}])
    second.close()
    assert recorded(folder)["mlflow"] == known
    run = client.get_run(known["id"])
    assert (run.info.status, run.info.run_name, run.data.params["a.b"]) == ("FAILED", "run", "3")
    assert mlflow_values(client, known["id"], "train/loss") == [
        (1, 3.0),
        (2, 1.5),
        (3, 1.0),
        (3, 1.0),
        (4, 0.75),
    ]
    # Killed before the record was written: the run is found by its tag.
    lost = Start(folder, "mlflow", step=4)
    lost.trackers.close("completed")
    lost.ledger.trackers = {}
    lost.ledger.end(4, 10**6)
    assert recorded(folder) == {}
    Start(folder, "mlflow", step=4).log(5).close()
    assert recorded(folder)["mlflow"]["id"] == known["id"]
    assert client.get_run(known["id"]).info.status == "FINISHED"
    Start(folder, "mlflow").close()
    assert recorded(folder)["mlflow"]["id"] != known["id"]


@pytest.mark.parametrize(
    ("uri", "location"),
    [
        ("sqlite:////runs/a b/mlflow.db", "file:///runs/a%20b/mlruns"),
        ("sqlite+pysqlite:////runs/mlflow.db?timeout=9", "file:///runs/mlruns"),
        ("http://127.0.0.1:5000", None),
        ("file:///store", None),
        ("postgresql://host/db", None),
    ],
)
def test_files_of_mlflow_lie_beside_its_database(uri, location):
    assert artifact_location(uri) == location


@pytest.mark.slow
def test_mlflow_in_its_default_file(tmp_path, monkeypatch):
    """Without `MLFLOW_TRACKING_URI`, an SQLite file in the run's folder."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setattr(tracker_set, "CLOSE_SECONDS", 200.0)  # making the database takes a while
    start = Start(tmp_path / "local", "mlflow").log(1, 2)
    start.trackers.call("log_samples", 2, [{"prompt": "Once", "text": " upon"}])
    start.close()
    known = recorded(tmp_path / "local")["mlflow"]
    assert known["uri"] == f"sqlite:///{tmp_path}/local/mlflow.db"
    local = mlflow.MlflowClient(tracking_uri=known["uri"])
    assert mlflow_values(local, known["id"], "train/loss") == [(1, 3.0), (2, 1.5)]
    (sample,) = (tmp_path / "local").rglob("step-2.txt")
    assert sample.read_text() == "Once upon"


# ---- Trackio


@pytest.mark.slow
def test_trackio_continues_the_same_run(tmp_path):
    """In a local store."""
    pytest.importorskip("trackio")
    done = separate(
        TRACKIO, tmp_path / "run", TRACKIO_DIR=str(tmp_path / "store"), TRACKIO_PROJECT="mine"
    )
    found = json.loads(done.stdout.splitlines()[-1])
    known = recorded(tmp_path / "run")["trackio"]
    assert known == {
        "name": f"run-{json.loads((tmp_path / 'run/run.json').read_text())['id']}",
        "project": "mine",
    }
    assert found == {known["name"]: [[1, 3.0], [2, 1.5], [3, 1.0], [3, 1.0], [4, 0.75]]}


TRACKIO = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from tests.tracker_runs import Start
dist.get_rank, dist.get_world_size = lambda: 0, lambda: 1
folder = Path(sys.argv[1])
Start(folder, "trackio", end="preempted").log(1, 2, 3).close()
Start(folder, "trackio", step=2).log(3, 4).close()
from trackio.sqlite_storage import SQLiteStorage
rows = {name: SQLiteStorage.get_logs("mine", name) for name in SQLiteStorage.get_runs("mine")}
print(json.dumps({name: sorted([row["step"], row["train/loss"]] for row in logs) for name, logs in rows.items()}))
"""  # noqa: E501
