"""The files in which a run records itself: none of them stops it."""

import errno
import json
import os
from unittest import mock

import pytest

from tests.runs import SAVE, SCHEDULE, arguments, read_metrics
from torchtitan.telemetry.history import History
from torchtitan.telemetry.run_record import RunRecord
from torchtitan.telemetry.scores import record_scores
from torchtitan.telemetry.trackers.jsonl import JsonlSink
from torchtitan.train import rank_main
from torchtitan.utils import files
from torchtitan.utils.files import append_line
from torchtitan.utils.run_files import RunFile


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)


def full(*names):
    """Let the disk be full for files of these names, after half of what is written."""
    real = os.write

    def write(handle, data):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        return real(handle, data[: len(data) // 2] if name in names else data)

    def sync(handle):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        if any(name.startswith(f".{other}.") for other in names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return mock.patch.multiple(files.os, write=write, fsync=sync)


def test_a_line_that_does_not_fit_leaves_nothing(tmp_path, caplog):
    sink = JsonlSink(tmp_path / "metrics.jsonl", History())
    sink.log({"step": 1})
    with full("metrics.jsonl"):
        sink.log({"step": 2})
        sink.log({"step": 3})
    sink.log({"step": 4})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 4]
    assert caplog.text.count("No space left on device") == 1, "said once"


def test_a_line_after_a_torn_one_is_not_lost_with_it(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "sav')
    append_line(path, b"{}\n")
    assert path.read_text() == '{"kind": "sav\n{}\n'


def odd(path, kind):
    if kind == "folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "nested":
        path.write_text("[" * 100_000 + "\n")
    elif kind == "nested in starts":
        path.write_text('{"starts": ' + "[" * 100_000)
    elif kind == "of another kind":
        path.write_text("[1, 2]\n")
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00\n")


KINDS = ["folder", "pipe", "device", "nested", "nested in starts", "of another kind", "binary"]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_stands_where_a_file_should_be(tmp_path, kind, caplog):
    """A start that resumes, one from scratch, a rewind, and a line."""
    for step in (0, 5):
        odd(tmp_path / "metrics.jsonl", kind)
        sink = JsonlSink(tmp_path / "metrics.jsonl", History(), new_run=step == 0)
        sink.follow(step)
        sink.log({"step": 6})
        sink.follow(7)
        sink.log({"step": 7})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [6, 7]
        for path in tmp_path.glob("metrics*"):
            path.rename(tmp_path / f"earlier-{step}-{path.name}")

    odd(tmp_path / "run.json", kind)
    record = RunRecord(tmp_path, {}, step=5, resumable=True, writes=True, began=0.0)
    assert len(json.loads((tmp_path / "run.json").read_text())["starts"]) == 1
    assert "run.json" in caplog.text
    (tmp_path / "run.json").unlink()
    odd(tmp_path / "run.json", kind)
    assert record.end(5, 5) == "completed"

    odd(tmp_path / "config.toml", kind)
    RunFile(tmp_path / "config.toml").replace("a = 1\n")
    assert (tmp_path / "config.toml").read_text() == "a = 1\n"

    odd(tmp_path / "evals.jsonl", kind)
    if kind in ("folder", "pipe", "device"):
        with pytest.raises(OSError, match=r"directory|regular"):
            record_scores(tmp_path, 1, {}, {})


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_appending_to_no_file_warns_once(tmp_path, kind, caplog):
    odd(tmp_path / "guard.jsonl", kind)
    file = RunFile(tmp_path / "guard.jsonl")
    file.append("{}")
    file.append("{}")
    assert caplog.text.count("can't write") == 1


def test_a_run_on_a_full_disk_ends_well(ranks, tmp_path):
    """Everything but the checkpoints, which are on another disk and at a `file://` URL."""
    folder = tmp_path / "else where"
    argv = [*SAVE, SCHEDULE, f"--checkpoint.folder=file://{folder}"]
    out = ranks(1, train_on_a_full_disk, arguments(tmp_path, *argv, steps=6))[0]
    assert out == 0
    assert (folder / "step-6/manifest.json").is_file()
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [1, 2, 3]


def train_on_a_full_disk(argv):
    """The disk is full once step 3 is recorded."""
    real = JsonlSink.log
    names = ("metrics.jsonl", "events.jsonl", "run.json", "config.toml")
    disk = full(*names)

    def log(sink, record):
        real(sink, record)
        if record["step"] == 3:
            disk.start()

    with mock.patch.object(JsonlSink, "log", log):
        try:
            return rank_main.main(argv)
        finally:
            disk.stop()
