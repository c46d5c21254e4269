"""Trackers: what they are given, and that no failure of one reaches the run or another."""

import threading
import time

import pytest

from tests.tracker_runs import Start
from torchtitan.config import resolve
from torchtitan.config.registry import TRACKER_PACKAGES, metric_sinks
from torchtitan.config.rules import Facts, problems
from torchtitan.config.sections.metrics import Metrics as Config
from torchtitan.config.sections.schema import Config as WholeConfig
from torchtitan.telemetry.trackers import background
from torchtitan.telemetry.trackers.base import scalars
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_rank", "working_folder")

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
    broken.join(time.monotonic() + 60)
    assert seen == [1, 2, 3, "closed"]
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning.startswith(
        "metrics.sinks: broken: ConnectionError: service is down. The run continues"
    )


def test_a_tracker_that_hangs_delays_nothing_and_keeps_the_newest(monkeypatch, caplog):
    """While its service does not answer, as many calls wait as may; the end does not wait for it
    forever.
    """
    monkeypatch.setattr(background, "MAX_CALLS", 5)
    gate = threading.Event()
    seen = []

    class Hangs:
        def log(self, record):
            gate.wait()
            seen.append(record["step"])

        def close(self): ...

    hangs = background.Background("hangs", Hangs)
    for step in range(1, 101):  # nothing here waits for the gate
        hangs.call("log", {"step": step})
    hangs.join(time.monotonic() + 0.1)
    gate.set()
    hangs.close("completed")
    hangs.join(time.monotonic() + 60)
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
    late.join(time.monotonic() + 60)
    assert (seen, len(caplog.records)) == ([1, 2], 1)


def test_a_tracker_of_the_user_that_cannot_be_made_stops_the_run_at_its_start(tmp_path):
    def make(folder, start_step):
        raise ValueError("mistake")

    metric_sinks.add("own", make)
    with pytest.raises(ValueError, match="mistake"):
        Start(tmp_path, "own")


def test_missing_packages_are_named_with_their_extra():
    metrics = Config(sinks=["tensorboard", "own"], enable_wandb=True)
    config = WholeConfig(metrics=metrics)
    assert problems(config, Facts(packages=())) == [
        'metrics.sinks: "tensorboard" needs the package tensorboard: pip install '
        "'titan-pretrain[tensorboard]', or remove it",
        "metrics.enable_wandb needs the package wandb: pip install "
        "'titan-pretrain[wandb]', or set it to false",
    ]


def test_a_missing_package_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKER_PACKAGES, "wandb", "no_such_package")
    config = resolve([f"--job.dump_folder={tmp_path / 'out'}", "--metrics.sinks=wandb"], 1).config
    with pytest.raises(
        ConfigError, match="needs the package no_such_package: pip install 'titan-pretrain"
    ):
        preflight(config)
    assert not (tmp_path / "out").exists()
