"""One run per folder: who is refused, and which holders count as dead."""

import json
import multiprocessing
import os
import re
import subprocess
import threading
from datetime import UTC, datetime

import psutil
import pytest

from torchtitan.train import folder_locks
from torchtitan.utils import lock
from torchtitan.utils.errors import UserError
from torchtitan.utils.lock import FolderLock, current_holder
from torchtitan.utils.storage import storage_path


@pytest.fixture
def sleeper():
    """A living process other than this one."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def short_expiry(monkeypatch):
    monkeypatch.setattr(lock, "EXPIRY_SECONDS", 0.3)


class Clock:
    """A clock that only `sleep` advances."""

    def __init__(self):
        self.now = 0.0
        self.due = []

    def at(self, time, action):
        self.due.append((time, action))

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for time, action in self.due:
            if time <= self.now:
                action()
        self.due = [(time, action) for time, action in self.due if time > self.now]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(lock, "time", clock)
    return clock


def hold(folder, **changes):
    """Write the lock of another run."""
    holder = current_holder().model_copy(update={"run": "other"} | changes)
    (folder / lock.NAME).write_text(holder.model_dump_json())


def of_process(pid):
    return {"pid": pid, "started": psutil.Process(pid).create_time()}


def test_a_living_run_on_this_machine_keeps_its_folder_until_it_dies(tmp_path, sleeper):
    hold(tmp_path, **of_process(sleeper.pid), since=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    who = rf"process {sleeper.pid} on \S+, since 2026-01-02 03:04:05 UTC"
    with pytest.raises(
        UserError,
        match=rf"{re.escape(str(tmp_path))} is in use by another run: {who}.*another folder",
    ):
        FolderLock(tmp_path)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, but a zombie
    FolderLock(tmp_path).release()
    assert not (tmp_path / lock.NAME).exists()


def test_a_run_on_another_machine_is_watched_for_a_sign_of_life(tmp_path, clock):
    other = {"place": "elsewhere", "host": "node7"}
    hold(tmp_path, **other)
    FolderLock(tmp_path).release()
    assert lock.EXPIRY_SECONDS <= clock.now < 1.1 * lock.EXPIRY_SECONDS, "it gave no sign"
    hold(tmp_path, **other)
    clock.at(clock.now + 0.9 * lock.EXPIRY_SECONDS, lambda: hold(tmp_path, **other, beat=1))
    with pytest.raises(UserError, match="on node7"):
        FolderLock(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"pid": -1}', "\x00\xff"])
def test_a_damaged_lock_counts_as_dead_if_nobody_renews_it(tmp_path, short_expiry, content):
    (tmp_path / lock.NAME).write_text(content)
    held = FolderLock(tmp_path)
    assert held.confirm()
    held.release()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_lock_that_is_no_file_is_replaced(tmp_path, short_expiry, make):
    make(tmp_path / lock.NAME)
    assert lock.local_conflict(tmp_path) is None
    held = FolderLock(tmp_path)
    assert held.confirm()
    held.release()


def test_the_holder_renews_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.02)
    held = FolderLock(tmp_path)
    for _ in range(500):
        if json.loads((tmp_path / lock.NAME).read_text())["beat"] >= 2:
            break
        threading.Event().wait(0.02)
    assert json.loads((tmp_path / lock.NAME).read_text())["beat"] >= 2
    held.release()


class OneRenewal:
    """Stands for the event that ends the renewals, and lets one more happen."""

    def __init__(self):
        self.waits = iter([False, True])

    def wait(self, seconds):
        return next(self.waits)

    def is_set(self):
        return False


def test_a_renewal_spares_the_lock_of_a_new_owner(tmp_path):
    """As after a long suspension: the folder was taken before the renewal that was due."""
    held = FolderLock(tmp_path)
    held.release()
    held._thread.join()
    hold(tmp_path, place="elsewhere", host="node7")
    taken = (tmp_path / lock.NAME).read_bytes()
    held._closing = OneRenewal()
    held._renew()
    assert (tmp_path / lock.NAME).read_bytes() == taken


def test_a_run_notices_that_its_folder_was_deleted_or_taken(tmp_path):
    folder = tmp_path / "run"
    held = FolderLock(folder)
    (folder / lock.NAME).unlink()
    folder.rmdir()
    assert not held.confirm()
    assert held.confirm()
    hold(folder)
    with pytest.raises(UserError, match=r"lost its folder: .* is in use by another run"):
        held.confirm()
    held.release()
    assert (folder / lock.NAME).exists()  # another run's


def test_object_storage_is_held_alike(monkeypatch, sleeper):
    pytest.importorskip("upath")
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.0)
    folder = storage_path("memory://lock-test/run")
    held = FolderLock(folder)
    assert held.confirm()
    held.release()
    hold(folder, **of_process(sleeper.pid))
    with pytest.raises(UserError, match="in use"):
        FolderLock(folder)


def _claim(folder, barrier, answers):
    barrier.wait()
    try:
        FolderLock(folder)
        answers.put("holds it")
    except UserError:
        answers.put("refused")
    barrier.wait()  # the holder stays alive until all have tried


@pytest.mark.e2e
def test_of_runs_that_start_together_one_wins(tmp_path):
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(3)
    answers = context.Queue()
    runs = [
        context.Process(target=_claim, args=(tmp_path, barrier, answers), daemon=True)
        for _ in range(3)
    ]
    for run in runs:
        run.start()
    assert sorted(answers.get() for _ in runs) == ["holds it", "refused", "refused"]
    for run in runs:
        run.join()


def test_all_folders_of_a_run_are_claimed_at_once(tmp_path, monkeypatch):
    """So that it waits once for the holders that may be dead."""
    together = threading.Barrier(3)

    def claim(folder):
        together.wait(10)
        return FolderLock(folder)

    monkeypatch.setattr(folder_locks, "FolderLock", claim)
    (tmp_path / "file").touch()
    folders = {name: tmp_path / name for name in ("out", "checkpoint", "file")}
    locks, problem = folder_locks._take(folders)
    assert [lock.folder for lock in locks] == [folders["out"], folders["checkpoint"]]
    assert problem.startswith("file: can't write to")
    for held in locks:
        held.release()
