"""A run with every tracker and notifications: preempted, resumed with a rank that is killed,
resumed to its end.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.runs import arguments
from tests.tracker_runs import history, wandb_records
from tests.webhook import Server

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
ROOT = Path(__file__).parents[2]


def steps(folder):
    try:
        return [
            json.loads(line)["step"]
            for line in (folder / "out/metrics.jsonl").read_text().splitlines()
        ]
    except (OSError, ValueError):
        return []


def start(folder, environment, *options, total):
    flags = arguments(folder, "--checkpoint.enable", "--checkpoint.interval=5", steps=total)
    flags += ["--metrics.sinks=wandb,tensorboard,prometheus", "--metrics.prometheus.port=0"]
    flags += [
        f"--metrics.prometheus.textfile={folder}/run.prom",
        "--notifications.webhook_env=HOOK",
    ]
    flags += ["--notifications.interval_seconds=1", "--lr_scheduler.total_steps=100000"]
    command = [sys.executable, "-m", "torchtitan", "train", *flags, *options]
    log = (folder / "log").open("a")
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def until(folder, process, step):
    deadline = time.monotonic() + 240
    while not steps(folder) or steps(folder)[-1] < step:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)


def test_one_run_from_preemption_over_a_killed_rank_to_the_end(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    pytest.importorskip("wandb")
    with Server() as server:
        environment = os.environ | {
            "HOOK": server.url,
            "WANDB_MODE": "offline",
            "OMP_NUM_THREADS": "1",
        }
        first = start(tmp_path, environment, total=100_000)
        until(tmp_path, first, 3)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == os.EX_TEMPFAIL, (tmp_path / "log").read_text()
        saved = steps(tmp_path)[-1]
        second = start(tmp_path, environment, "--nproc-per-node=2", total=100_000)
        until(tmp_path, second, saved + 7)
        ranks = [
            p for p in psutil.Process(second.pid).children() if "torchtitan.train" in p.cmdline()
        ]
        ranks[1].kill()
        assert second.wait(120) == 1, (tmp_path / "log").read_text()
        reached = steps(tmp_path)[-1]
        third = start(tmp_path, environment, total=reached + 3)
        assert third.wait(240) == 0, (tmp_path / "log").read_text()
    texts = [body["text"] for *_, body in server.got]
    assert [body["event"]["kind"] for *_, body in server.got] == [
        "preempted", "resumed", "failed", "resumed", "finished"
    ], texts  # fmt: skip
    assert "killed by SIGKILL" in texts[2], texts
    assert (
        server.url
        not in (tmp_path / "log").read_text() + (tmp_path / "out/config.toml").read_text()
    )
    assert (tmp_path / "out/notifications.jsonl").read_text().count('"sent": true') == 5
    known = json.loads((tmp_path / "out/run.json").read_text())["trackers"]["wandb"]
    parts = list(wandb_records(tmp_path / "out"))
    assert {r.run.run_id for part in parts for r in part if r.HasField("run")} == {known["id"]}
    shown = [[row["train/step"] for row in history(part)] for part in parts]
    assert shown[0] == list(range(1, saved + 1))
    assert shown[1][0] == saved + 1
    assert shown[2][-1] == reached + 3
    assert "metrics.sinks: " not in (tmp_path / "log").read_text()
    events = (
        event_accumulator.EventAccumulator(str(tmp_path / "out/tb")).Reload().Scalars("train/loss")
    )
    assert [event.step for event in events] == list(range(1, reached + 4))
    assert 'torchtitan_restarts_total{run="out"} 2.0' in (tmp_path / "run.prom").read_text()
