"""Jobs listed by `torchtitan jobs`, with stand-ins for Slurm's commands."""

import os

import pytest

from torchtitan.commands.jobs import main as jobs
from torchtitan.tools.launch.slurm_jobs import RECORD, JobRecord, read_record
from torchtitan.utils.errors import UserError

SQUEUE = """\
90_1|RUNNING|12:00|1:00:00|node1|None|grid
90_3|PENDING|0:00|1:00:00||Priority|grid
91|RUNNING|1-02:00:00|UNLIMITED|node[2-3]|None|odd | name
"""
SACCT = """\
90_0|COMPLETED|00:50:00|01:00:00|node1|0:0|grid
90_1|RUNNING|00:12:00|01:00:00|node1|0:0|grid
90_[3-4%2]|PENDING|00:00:00|01:00:00|None assigned|0:0|grid
90_2|CANCELLED by 1000|00:01:00|01:00:00|node1|0:15|grid
"""


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Stand-ins that print what is set; returns the folder of a submitted grid."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"squeue": SQUEUE, "sacct": SACCT, "scontrol": ""}.items():
        (tmp_path / name).write_text(text)
        (folder / name).write_text(
            f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\ncat {tmp_path}/{name}\n'
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    grid = tmp_path / "grid"
    grid.mkdir()
    (grid / RECORD).write_bytes(
        JobRecord("grid", f"{grid}/%x-%A_%a.log", ["a", "b", "c", "d"], [90]).encode()
    )
    return grid


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_the_state_of_every_run(scheduler, tmp_path, capsys):
    assert jobs([str(scheduler)]) == 0
    out = rows(capsys.readouterr().out)
    assert out[1:5] == [
        ["90_0", "a", "completed", "00:50:00", "01:00:00", "node1"],
        ["90_1", "b", "running", "12:00", "1:00:00", "node1"],
        ["90_2", "c", "cancelled", "by", "1000", "00:01:00", "01:00:00", "node1", "0:15"],
        ["90_3", "d", "pending", "0:00", "1:00:00", "Priority"],
    ]
    assert " ".join(out[5]) == "4 jobs: 1 completed, 1 running, 1 cancelled, 1 pending"
    assert " ".join(out[6]) == f"Results: torchtitan runs {scheduler}"
    asked = (tmp_path / "asked").read_text()
    assert "--jobs=90 " in asked


def test_one_task_and_all_jobs(scheduler, capsys):
    jobs(["90_2"])
    assert [row[0] for row in rows(capsys.readouterr().out)[1:-1]] == ["90_2"]
    jobs([])
    out = capsys.readouterr().out
    assert [row[0] for row in rows(out)[1:-1]] == ["90_1", "90_3", "91"]
    assert "odd | name" in out


def test_odd_bytes_and_numbers(scheduler, tmp_path, capsys):
    (tmp_path / "squeue").write_bytes(b"91|RUNNING|1:00|2:00|node1|None|caf\xe9 \x1b[31m\n")
    jobs([])
    assert "caf\ufffd ?[31m" in capsys.readouterr().out
    (tmp_path / "squeue").write_text("")
    jobs(["123_" + "9" * 10])
    for target in ("9" * 5000, "\u0661"):
        with pytest.raises(UserError, match="give the number of a job"):
            jobs([target])


def test_a_job_that_was_submitted_by_hand(scheduler, tmp_path, capsys):
    """It is known by its log or, while it waits, by its name."""
    record = read_record(scheduler)
    (scheduler / RECORD).write_bytes(JobRecord(record.name, record.log, record.runs).encode())
    jobs([str(scheduler)])
    assert "4 jobs: " in capsys.readouterr().out
    (tmp_path / "squeue").write_text("")
    jobs([str(scheduler)])
    assert "knows no job" in capsys.readouterr().out
    (scheduler / "grid-90_0.log").write_text("x")
    assert read_record(scheduler).known() == [90]
    jobs([str(scheduler)])
    assert "90_0" in capsys.readouterr().out


def test_without_accounting_only_what_runs_is_shown(scheduler, tmp_path, capsys):
    (tmp_path / "bin/sacct").write_text(
        "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n"
    )
    jobs([str(scheduler)])
    out = capsys.readouterr().out
    assert [row[0] for row in rows(out)[1:3]] == ["90_1", "90_3"]
    assert "note: jobs that have ended are not shown" in out
    assert "accounting storage is disabled" in out


def test_what_slurm_holds_since_a_node_failed_is_explained(scheduler, tmp_path, capsys):
    (tmp_path / "squeue").write_text(
        "90_1|PENDING|0:00|1:00:00||launch failed requeued held|grid\n"
        "90_3|PENDING|0:00|1:00:00||JobHeldUser|grid\n"
    )
    jobs([str(scheduler)])
    out = capsys.readouterr().out
    assert "note: a node failed to start" in out
    assert "scontrol release 90_1\n" in out


@pytest.mark.parametrize("text", ["{}", "[]", "x", '{"name": 1, "log": "", "runs": []}'])
def test_a_damaged_record(scheduler, text):
    (scheduler / RECORD).write_text(text)
    with pytest.raises(UserError, match="give the number of a job"):
        jobs([str(scheduler)])


def test_logs(scheduler, tmp_path, capfd):
    with pytest.raises(UserError, match="job 90 has no log yet"):
        jobs([str(scheduler), "--logs"])
    for task in (0, 2):
        (scheduler / f"grid-90_{task}.log").write_text(f"first\nlast of {task}\n")
    assert jobs([str(scheduler), "--logs", "--lines=1"]) == 0
    out = capfd.readouterr().out
    assert "last of 0" in out
    assert "last of 2" in out
    assert "first" not in out
    (tmp_path / "scontrol").write_text(
        f"JobId=91\n   StdErr=/x\n   StdOut={scheduler}/grid-90_2.log\n   Power=\n"
    )
    jobs(["91", "--logs"])
    assert "last of 2" in capfd.readouterr().out
