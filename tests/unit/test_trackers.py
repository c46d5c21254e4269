"""Trackers, read back by their own packages: one run over all starts, and no failure that reaches
training.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch.distributed as dist

from torchtitan.config import resolve
from torchtitan.config.features import TRACKER_PACKAGES
from torchtitan.config.registry import Custom, metric_sinks
from torchtitan.config.rules import Facts, problems
from torchtitan.config.sections.metrics import Metrics as Config
from torchtitan.config.sections.metrics import Prometheus
from torchtitan.config.sections.schema import Config as WholeConfig
from torchtitan.config.sections.schema import Job
from torchtitan.telemetry.run_record import RunRecord
from torchtitan.telemetry.trackers import background, build
from torchtitan.telemetry.trackers.base import scalars
from torchtitan.telemetry.trackers.build import Trackers
from torchtitan.telemetry.trackers.mlflow import artifact_location
from torchtitan.telemetry.trackers.tensorboard import TensorBoardSink
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

RECORD = {
    "step": 2,
    "loss": 2.5,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens": 700,
    "tokens_per_second": 1400.0,
    "mfu": None,
    "memory_gib": 1.5,
    "expert_load_max": 2.0,
    "dead_experts": 1,
    "auxiliary_loss": 0.1,
    "loss/books": 2.0,
    "tokens/books": 350,
    "time": 1700000000.0,
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for name in (
        "WANDB_PROJECT",
        "WANDB_TEAM",
        "WANDB_RUN_ID",
        "WANDB_NAME",
        "WANDB_RUN_NAME",
        "MLFLOW_TRACKING_URI",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metric_sinks, "_entries", {})


@pytest.fixture(autouse=True)
def working_folder(tmp_path_factory, monkeypatch):
    """Everything that a run writes belongs in its dump folder."""
    folder = tmp_path_factory.mktemp("working")
    monkeypatch.chdir(folder)
    yield
    assert [path.name for path in folder.iterdir()] == []


class Start:
    """One start of a run in `folder`."""

    def __init__(self, folder, *sinks, step=0, end="completed", **keys):
        self.ledger = RunRecord(
            folder, {}, step=step, resumable=True, writes=True, began=time.time()
        )
        config = Config(sinks=list(sinks), **keys)
        job = Job(dump_folder=str(folder))
        self.trackers = Trackers(
            config, job, {"a": {"b": 3}}, self.ledger, start_step=step, custom=Custom()
        )
        self.step = step
        self.reason = end

    def log(self, *steps):
        for step in steps:
            self.trackers.call(
                "log",
                {
                    "step": step,
                    "loss": 3.0 / step,
                    "tokens_per_second": 9.0,
                    "time": 100.0 + step + self.step,
                },
            )
        return self

    def close(self):
        error = RuntimeError("cause") if self.reason.startswith("failed") else None
        self.ledger.end(self.step, 10**6 if self.reason == "preempted" else 0, error)
        self.trackers.close(self.reason)
        self.ledger.save_trackers()


def recorded(folder):
    return json.loads((folder / "run.json").read_text())["trackers"]


def test_names_are_grouped():
    assert scalars(RECORD) == {
        "train/loss": 2.5,
        "train/grad_norm": 0.5,
        "train/lr": 1e-3,
        "train/tokens": 700,
        "perf/memory_gib": 1.5,
        "perf/tokens_per_second": 1400.0,
        "experts/load_max": 2.0,
        "experts/dead": 1,
        "experts/auxiliary_loss": 0.1,
        "sources/loss/books": 2.0,
        "sources/tokens/books": 350,
    }
    validation = {
        "step": 2,
        "validation_loss/web": 1.0,
        "validation_bits_per_byte/web": 0.5,
        "eval/arc/acc": 0.25,
    }
    assert list(scalars(validation)) == ["val/loss/web", "val/bits_per_byte/web", "eval/arc/acc"]


# ---- a tracker that fails


def test_a_tracker_that_fails_warns_once_and_others_go_on(tmp_path, caplog, monkeypatch):
    seen = []

    class Broken:
        def log(self, record):
            seen.append(record["step"])
            raise ConnectionError("service is down")

        def close(self):
            seen.append("closed")

    broken = background.Background("broken", Broken)
    for step in (1, 2, 3):
        broken.call("log", {"step": step})
        broken.call("log_samples", step, [])  # has no such method
    broken.close("completed")
    broken.join(time.monotonic() + 5)
    assert seen == [1, 2, 3, "closed"]
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning.startswith(
        "metrics.sinks: broken: ConnectionError: service is down. The run continues"
    )


@pytest.mark.clock
def test_a_tracker_that_hangs_delays_nothing_and_keeps_the_newest(monkeypatch, caplog):
    """While its service does not answer, as many calls wait as may; the end does not wait for it
    forever.
    """
    monkeypatch.setattr(background, "QUEUED", 5)
    gate = threading.Event()
    seen = []

    class Hangs:
        def log(self, record):
            gate.wait()
            seen.append(record["step"])

        def close(self): ...

    hangs = background.Background("hangs", Hangs)
    began = time.monotonic()
    for step in range(1, 101):
        hangs.call("log", {"step": step})
    hangs.join(time.monotonic() + 0.1)
    assert time.monotonic() - began < 1
    gate.set()
    hangs.close("completed")
    hangs.join(time.monotonic() + 5)
    assert seen[-3:] == [98, 99, 100]
    assert len(seen) <= 6
    assert [
        ("oldest are dropped" in r.getMessage(), "in time" in r.getMessage())
        for r in caplog.records
    ] == [(True, False), (False, True)]


def test_what_is_recorded_while_a_service_is_down_follows(monkeypatch, caplog):
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.05)
    made = []
    seen = []

    class Works:
        def log(self, record):
            seen.append(record["step"])

        def close(self): ...

    def make():
        made.append(1)
        if len(made) < 3:
            raise ConnectionError("down")
        return Works()

    late = background.Background("late", make)
    late.call("log", {"step": 1})
    while len(made) < 3:
        time.sleep(0.01)
    late.call("log", {"step": 2})
    late.close("completed")
    late.join(time.monotonic() + 5)
    assert (seen, len(caplog.records)) == ([1, 2], 1)


def test_a_tracker_of_the_user_that_cannot_be_made_stops_the_run_at_its_start(tmp_path):
    def make(folder, start_step):
        raise ValueError("mistake")

    metric_sinks.add("own", make)
    with pytest.raises(ValueError, match="mistake"):
        Start(tmp_path, "own")


def test_missing_packages_are_named_with_their_extra():
    metrics = Config(sinks=["mlflow", "prometheus", "own"], enable_wandb=True)
    config = WholeConfig(metrics=metrics)
    assert problems(config, Facts(packages=())) == [
        'metrics.sinks: "mlflow" needs the package mlflow: pip install '
        "'titan-pretrain[mlflow]', or remove it",
        'metrics.sinks: "prometheus" needs the package prometheus_client: pip install '
        "'titan-pretrain[prometheus]', or remove it",
        "metrics.enable_wandb needs the package wandb: pip install "
        "'titan-pretrain[wandb]', or set it to false",
    ]


def test_a_missing_package_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKER_PACKAGES, "mlflow", "no_such_package")
    config = resolve([f"--job.dump_folder={tmp_path / 'out'}", "--metrics.sinks=mlflow"], 1).config
    with pytest.raises(
        ConfigError, match="needs the package no_such_package: pip install 'titan-pretrain"
    ):
        preflight(config)
    assert not (tmp_path / "out").exists()


# ---- Weights & Biases


def wandb_records(folder):
    """What the files of W&B hold, oldest first: a log in LevelDB's format, of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/*run-*/*.wandb")):
        data = path.read_bytes()
        at = 7
        parts = b""
        found = []
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            parts += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last of several
                found.append(Record.FromString(parts))
                parts = b""
        yield found


def history(records):
    """What was logged, as dictionaries."""
    kept = [record.history for record in records if record.HasField("history")]
    return [
        {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in one.item}
        for one in kept
    ]


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    """Offline, after a preemption and a rewind; from scratch in the same folder it is a new one."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
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
@pytest.mark.clock
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
    began = time.monotonic()
    done = separate(OUT_OF_REACH, tmp_path, **settings)
    assert time.monotonic() - began < 40
    assert done.stdout.count("metrics.sinks: wandb: ") == 1, done.stdout
    assert "The run continues" in done.stdout
    assert float(done.stdout.split("returned after ")[1].split()[0]) < 0.5


OUT_OF_REACH = """
import logging, sys, time
from pathlib import Path
import torch.distributed as dist
from tests.unit.test_trackers import Start
from torchtitan.telemetry.trackers import build
dist.get_rank, dist.get_world_size = lambda: 0, lambda: 1
logging.basicConfig(stream=sys.stdout)
build.CLOSE_SECONDS = 10.0
began = time.monotonic()
start = Start(Path(sys.argv[1]), "wandb").log(1, 2)
print("returned after", time.monotonic() - began)
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
    sink = TensorBoardSink(tmp_path, 0)
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
def test_mlflow_in_its_default_file_and_on_a_server(tmp_path, monkeypatch):
    """A real server, over HTTP. Without `MLFLOW_TRACKING_URI`, an SQLite file in the run's
    folder.
    """
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setattr(build, "CLOSE_SECONDS", 200.0)  # making the database takes a while
    start = Start(tmp_path / "local", "mlflow").log(1, 2)
    start.trackers.call("log_samples", 2, [{"prompt": "Once", "text": " upon"}])
    start.close()
    known = recorded(tmp_path / "local")["mlflow"]
    assert known["uri"] == f"sqlite:///{tmp_path}/local/mlflow.db"
    local = mlflow.MlflowClient(tracking_uri=known["uri"])
    assert mlflow_values(local, known["id"], "train/loss") == [(1, 3.0), (2, 1.5)]
    (sample,) = (tmp_path / "local").rglob("step-2.txt")
    assert sample.read_text() == "Once upon"
    port = free_port()
    store = [
        "--backend-store-uri",
        known["uri"],
        "--artifacts-destination",
        str(tmp_path / "artifacts"),
    ]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        *store,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 200
        while not listens(port):
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        for step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
            start = Start(tmp_path / "remote", "mlflow", step=step, end="preempted").log(*steps)
            start.trackers.call("log_samples", step, [{"prompt": "Once", "text": " upon"}])
            start.close()
        known = recorded(tmp_path / "remote")["mlflow"]
        client = mlflow.MlflowClient()
        assert client.get_run(known["id"]).info.status == "KILLED"
        assert mlflow_values(client, known["id"], "train/loss") == [
            (1, 3.0),
            (2, 1.5),
            (3, 1.0),
            (3, 1.0),
            (4, 0.75),
        ]
        assert [file.path for file in client.list_artifacts(known["id"], "samples")] == [
            "samples/step-0.txt",
            "samples/step-2.txt",
        ]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


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
from tests.unit.test_trackers import Start
dist.get_rank, dist.get_world_size = lambda: 0, lambda: 1
folder = Path(sys.argv[1])
Start(folder, "trackio", end="preempted").log(1, 2, 3).close()
Start(folder, "trackio", step=2).log(3, 4).close()
from trackio.sqlite_storage import SQLiteStorage
rows = {name: SQLiteStorage.get_logs("mine", name) for name in SQLiteStorage.get_runs("mine")}
print(json.dumps({name: sorted([row["step"], row["train/loss"]] for row in logs) for name, logs in rows.items()}))
"""  # noqa: E501


# ---- Prometheus


def scraped(text):
    from prometheus_client.parser import text_string_to_metric_families

    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {
        (s.name, *(f"{k}={v}" for k, v in s.labels.items() if k != "run")): s.value for s in samples
    }


def fetch(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return scraped(answer.read().decode())


def eventually(check):
    deadline = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prometheus_scrapes_the_newest_values(tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    file = tmp_path / "node/run.prom"
    start = Start(
        tmp_path / "mine", "prometheus", prometheus=Prometheus(port=port, textfile=str(file))
    )
    start.log(1, 2)
    for kind in ("saved", "saved", "spike"):
        start.trackers.call("event", {"kind": kind, "step": 2})
    validation = {
        "step": 2,
        "validation_loss/web": 1.25,
        "eval/arc/acc": 0.5,
        "loss/books": 2.0,
        "time": 101.0,
    }
    start.trackers.call("log", validation)
    eventually(
        lambda: file.exists() and ("torchtitan_val_loss", "set=web") in scraped(file.read_text())
    )
    values = fetch(port)
    expected = {
        ("torchtitan_train_step",): 2,
        ("torchtitan_train_loss",): 1.5,
        ("torchtitan_perf_tokens_per_second",): 9.0,
        ("torchtitan_val_loss", "set=web"): 1.25,
        ("torchtitan_eval", "metric=arc/acc"): 0.5,
        ("torchtitan_sources_loss", "source=books"): 2.0,
        ("torchtitan_running",): 1.0,
        ("torchtitan_restarts_total",): 0.0,
        ("torchtitan_events_total", "kind=saved"): 2.0,
        ("torchtitan_events_total", "kind=spike"): 1.0,
        ("torchtitan_last_record_timestamp_seconds",): 101.0,
        ("torchtitan_goodput_percent",): 0.0,
    }
    assert values == expected
    assert 'run="mine"' in file.read_text()
    start.close()
    assert scraped(file.read_text()) == expected | {("torchtitan_running",): 0.0}
    with pytest.raises(OSError, match="refused"):
        fetch(port)


def test_a_port_that_is_taken_is_a_warning_and_served_once_it_is_free(tmp_path, caplog):
    pytest.importorskip("prometheus_client")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        start = Start(tmp_path, "prometheus", prometheus=Prometheus(port=port)).log(1, 2)
        eventually(lambda: caplog.records)
    start.log(3)
    eventually(lambda: ("torchtitan_train_loss",) in reached(port))
    start.close()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning == f"metrics.prometheus.port: {port} on 127.0.0.1 is in use; set another port"


def reached(port):
    try:
        return fetch(port)
    except OSError:
        return {}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
