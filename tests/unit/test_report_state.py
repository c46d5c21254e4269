"""What a report says of a run: how it ended or how long it will take, its events, and how it
differs from others.
"""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.short_runs import BEGAN, collected, record, write, write_run
from torchtitan.tools.reports import collect as report
from torchtitan.tools.reports.folder import read_folder
from torchtitan.utils.lock import EXPIRY_SECONDS, current_holder


def lock(folder, pid, **changes):
    holder = current_holder().model_copy(update={"pid": pid} | changes)
    (folder / ".lock").write_text(holder.model_dump_json())


def test_how_a_run_ended(tmp_path):
    def state(end, **more):
        one = {"time": BEGAN, "last_seen": BEGAN + 1, "step": 1, "end": end}
        folder = read_folder(write_run(tmp_path / "a", [record(1)], [one | more]))
        return folder.state, folder.message

    assert state("completed") == ("completed", "")
    assert state("preempted") == ("preempted", "")
    assert state("failed: out of: memory") == ("failed", "out of: memory")
    assert state("vanished") == ("unknown", "vanished")
    assert state(None)[0] == "killed"
    assert state(None, last_seen=time.time())[0] == "running"

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    lock(tmp_path / "a", dead.pid)
    assert state(None, last_seen=time.time())[0] == "killed"
    parent = psutil.Process(os.getppid())
    lock(tmp_path / "a", parent.pid, started=parent.create_time())
    assert state("preempted")[0] == "running"  # it has started again
    lock(tmp_path / "a", 1, place="another machine")
    assert state(None)[0] == "running"
    os.utime(tmp_path / "a" / ".lock", (time.time() - 2 * EXPIRY_SECONDS,) * 2)
    assert state(None)[0] == "killed"


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ("[training]\nsteps = 7\n[training.dataloader]\nsteps = 8\n", 7),
        ("[job]\n\n[training] # by hand\nsteps = 7\n", 7),
        ("training = {steps = 7}\n", 7),
        ("[checkpoint]\nsteps = 7\n", None),
        ("[training]\nsteps = '7'\n", None),
        ("[training]\nsteps = \n", None),
    ],
)
def test_the_last_step_of_the_configuration(tmp_path, config, steps):
    assert read_folder(write_run(tmp_path / "a", [], config=config)).total_steps == steps


def test_how_long_a_running_run_will_take(tmp_path):
    starts = [
        {"time": BEGAN, "last_seen": BEGAN + 50, "step": 20, "end": "killed"},
        {
            "time": BEGAN + 1000,
            "last_seen": time.time(),
            "resumed_step": 20,
            "step": 30,
            "end": None,
        },
    ]
    records = [record(s, time=BEGAN + s) for s in range(1, 21)]
    records += [record(s, time=BEGAN + 1000 + 3 * s) for s in range(21, 31)]
    assert collected(write_run(tmp_path / "a", records, starts))["eta_s"] == pytest.approx(70 * 3)


def test_events(tmp_path):
    folder = write_run(tmp_path / "a", [record(1)])
    write(
        folder / "events.jsonl",
        [
            {
                "time": BEGAN + 72,
                "kind": "saved",
                "step": 5,
                "message": "Saved step-5",
                "folder": "/x",
            },
            {"time": BEGAN + 36, "kind": "started", "step": None, "message": "Started"},
            {"time": "soon", "kind": "saved"},
        ],
    )
    assert collected(folder)["events"] == [
        {"hours": 0.01, "kind": "started", "step": None, "message": "Started"},
        {"hours": 0.02, "kind": "saved", "step": 5, "message": "Saved step-5"},
    ]


def test_differences(tmp_path):
    a = write_run(
        tmp_path / "x" / "a",
        [],
        config='[job]\ndump_folder = "a"\n[optimizer]\nlr = 0.1\n[training]\nsteps = 5\n',
    )
    start = {
        "time": BEGAN,
        "last_seen": BEGAN,
        "step": 1,
        "end": None,
        "ranks": 8,
        "layout": {"tp": 8},
    }
    b = write_run(
        tmp_path / "x" / "b",
        [],
        [start],
        config="[training]\nsteps = 5\nsources = [{name = 'web'}]\n",
    )
    data = report.collect([a, b])
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["differences"] == [
        {"key": "optimizer.lr", "values": [0.1, None]},
        {"key": "ranks", "values": [None, 8]},
        {"key": "layout", "values": [None, "tp 8"]},
        {"key": "training.sources", "values": [None, '[{"name": "web"}]']},
    ]
