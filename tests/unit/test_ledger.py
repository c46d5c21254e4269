"""The account of a run: every second has one kind, and the lineage survives restarts, crashes and
other ranks.
"""

import errno
import json
import logging
import shutil

import pytest

from torchtitan.telemetry.run_record import RunRecord, changed_settings, git_revision
from torchtitan.utils import activity as phases
from torchtitan.utils import run_files
from torchtitan.utils.activity import begin, phase
from torchtitan.utils.errors import UserError


class Clock:
    """Both the time of day and the clock of the phases."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now

    def tick(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(phases, "monotonic", clock)
    begin("start", "starting")
    yield clock
    monkeypatch.undo()
    begin("start", "starting")


def start(folder, clock, step=0, *, resumable=True, writes=True):
    return RunRecord(
        folder,
        {"ranks": 2},
        step=step,
        resumable=resumable,
        writes=writes,
        began=clock(),
        clock=clock,
    )


def train(ledger, clock, steps, *, data=0.25, compute=1.0):
    begin("other", "between two steps")
    for number in steps:
        with phase(ledger.kind_of(number), "training", number):
            with phase("data", "waiting for data"):
                clock.tick(data)
            clock.tick(compute)
            ledger.heartbeat(number)
        ledger.record_step(number)


def read(folder):
    return json.loads((folder / "run.json").read_text())


def seconds(folder):
    return {kind: s for kind, s in read(folder)["goodput"]["seconds"].items() if s}


def test_every_second_has_one_kind(tmp_path, clock):
    ledger = start(tmp_path, clock)
    clock.tick(5)
    train(ledger, clock, [1, 2, 3])
    clock.tick(0.5)
    with phase("steps", "training", 4), phase("saves", "saving"):
        clock.tick(2)
        with phase("validation", "validating"):
            clock.tick(3)
    ledger.end(4, 4)
    assert seconds(tmp_path) == {
        "start": 5,
        "first_step": 1,
        "steps": 2,
        "data": 0.75,
        "other": 0.5,
        "saves": 2,
        "validation": 3,
    }
    assert sum(seconds(tmp_path).values()) == clock() - 1000
    assert read(tmp_path)["goodput"]["percent"] == pytest.approx(100 * 2 / 14.25)
    (only,) = read(tmp_path)["starts"]
    assert (only["resumed_step"], only["step"], only["end"], only["ranks"]) == (
        0,
        4,
        "completed",
        2,
    )
    assert ledger.goodput().startswith(
        "Goodput 14.0%: steps 2.0 s, first step 1.0 s, start-up 5.0 s"
    )


def test_a_killed_start_costs_the_gap_and_the_steps_done_again(tmp_path, clock):
    train(
        start(tmp_path, clock), clock, range(1, 6)
    )  # killed after step 5; the last checkpoint is of step 3
    assert read(tmp_path)["starts"][0]["end"] is None
    clock.tick(60)
    begin("start", "starting")
    again = start(tmp_path, clock, step=3)
    clock.tick(4)
    train(again, clock, range(4, 9), data=0)
    again.end(8, 8)
    killed, completed = read(tmp_path)["starts"]
    assert (killed["end"], killed["step"]) == ("killed", 5)
    assert (completed["end"], completed["resumed_step"]) == ("completed", 3)
    # The new start's first step is step 4; of what it does again, step 5 is left.
    assert completed["seconds"] == pytest.approx(
        dict.fromkeys(completed["seconds"], 0)
        | {"restart": 64, "first_step": 1, "repeated": 1, "steps": 3}
    )
    assert sum(seconds(tmp_path).values()) == pytest.approx(clock() - 1000), (
        "no second is lost or counted twice"
    )


def test_steps_after_going_back_within_a_start_are_repeated(tmp_path, clock):
    ledger = start(tmp_path, clock)
    train(ledger, clock, [1, 2, 3, 4, 3, 4, 5], data=0)
    ledger.end(5, 5)
    assert seconds(tmp_path) == {"first_step": 1, "steps": 4, "repeated": 2}


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, "preempted"),
        (UserError("disk full\nat step 2"), "failed: disk full"),
        (KeyboardInterrupt(), "interrupted"),
        (ValueError(), "failed: ValueError"),
    ],
)
def test_how_a_start_ends(tmp_path, clock, error, end):
    ledger = start(tmp_path, clock)
    train(ledger, clock, [1, 2])
    ledger.end(2, 4, error)
    assert read(tmp_path)["starts"][0]["end"] == end
    clock.tick(100)
    train(start(tmp_path, clock, step=2), clock, [3])
    assert seconds(tmp_path).get("restart", 0) == 100


def test_a_run_from_scratch_has_a_file_of_its_own(tmp_path, clock):
    start(tmp_path, clock).end(4, 4)
    start(tmp_path, clock)  # the run before was completed
    assert len(read(tmp_path)["starts"]) == 1
    start(tmp_path, clock)  # the one before was killed, before its first checkpoint
    assert [s["end"] for s in read(tmp_path)["starts"]] == ["killed", None]
    start(tmp_path, clock, resumable=False)  # nothing is ever saved, so nothing goes on
    assert len(read(tmp_path)["starts"]) == 1
    assert len(list(tmp_path.glob("run-*.json"))) >= 1
    assert not list(tmp_path.glob(".*")), "nothing temporary stays"


def test_a_copied_folder_begins_new_runs_of_trackers(tmp_path, clock):
    """A folder that was moved, or has two names, goes on with them."""
    first = start(tmp_path / "run", clock)
    first.trackers = {"wandb": {"id": "x"}}
    train(first, clock, [1])
    (tmp_path / "alias").symlink_to("run")
    for name in ("run", "alias"):
        again = start(tmp_path / name, clock, 1)
        assert (again.id, again.trackers) == (first.id, first.trackers)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for _ in range(2):
        copy = start(tmp_path / "copy", clock, 1)
        assert (copy.id != first.id, copy.trackers) == (True, {})
        assert read(tmp_path / "copy")["id"] == copy.id
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert start(tmp_path / "moved", clock, 1).trackers == first.trackers


def test_a_damaged_file_is_set_aside(tmp_path, clock):
    (tmp_path / "run.json").write_text('{"starts": [')
    start(tmp_path, clock, step=3).end(4, 4)
    assert read(tmp_path)["starts"][0]["resumed_step"] == 3
    assert len(list(tmp_path.glob("run-*.json"))) == 1


def test_a_rank_that_says_nothing_is_still_known_to_be_another(tmp_path, clock):
    start(tmp_path, clock).end(1, 4, RuntimeError("... Connection closed by peer [127.0.0.1]"))
    assert read(tmp_path)["starts"][0]["end"] == "failed: another rank stopped"


@pytest.mark.parametrize("first", ["culprit", "rank 0"])
def test_the_rank_that_fails_tells_the_cause(tmp_path, clock, first):
    rank_0 = start(tmp_path, clock)
    culprit = start(tmp_path, clock, writes=False)
    train(rank_0, clock, [1])
    ends = {
        "culprit": lambda: culprit.end(1, 4, RuntimeError("bad row")),
        "rank 0": lambda: rank_0.end(
            1, 4, RuntimeError("... Connection closed by peer [127.0.0.1]")
        ),
    }
    for rank in sorted(ends, key=lambda rank: rank != first):
        ends[rank]()
    end = read(tmp_path)["starts"][0]["end"]
    assert end == "failed: bad row"


def test_a_full_disk_does_not_stop_the_run(tmp_path, clock, monkeypatch, caplog):
    ledger = start(tmp_path, clock)

    def no_space(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    with monkeypatch.context() as full, caplog.at_level("WARNING", "torchtitan"):
        full.setattr(run_files, "write_whole", no_space)
        train(ledger, clock, [1, 2])
    assert f"can't write {tmp_path / 'run.json'}: No space left on device" in caplog.text
    assert read(tmp_path)["starts"][0]["step"] == 0, "as it was"
    train(ledger, clock, [3])
    ledger.end(3, 3)
    assert read(tmp_path)["starts"][0]["step"] == 3
    assert sum(seconds(tmp_path).values()) == clock() - 1000, (
        "nothing is lost that was spent meanwhile"
    )


def test_a_folder_that_was_deleted_is_made_again(tmp_path, clock):
    ledger = start(tmp_path / "out", clock)
    shutil.rmtree(tmp_path / "out")
    train(ledger, clock, [1, 2])
    assert read(tmp_path / "out")["starts"][0]["step"] == 2


def test_changes_since_a_checkpoint_are_named():
    before = {
        "config": "[training]\nsteps = 4\nseq_len = 32\n",
        "versions": {"torch": "2.11.0"},
        "ranks": 1,
        "git": "a",
    }
    now = {
        "config": "[training]\nsteps = 8\nseq_len = 32\n[metrics]\nlog_freq = 5\n",
        "versions": {"torch": "2.13.0"},
        "ranks": 4,
        "git": "b-dirty",
    }
    assert changed_settings(before, before) == []
    assert changed_settings(before, now) == [
        "training.steps 4 -> 8",
        "metrics.log_freq unset -> 5",
        'torch "2.11.0" -> "2.13.0"',
        "ranks 1 -> 4",
        'git "a" -> "b-dirty"',
    ]
    older = {"config": before["config"]}  # a checkpoint whose manifest said less
    assert changed_settings(older, before) == [
        'torch unset -> "2.11.0"',
        "ranks unset -> 1",
        'git unset -> "a"',
    ]


def test_git_revision_is_a_commit():
    assert len(git_revision().removesuffix("-dirty")) == 40
