"""Copies of checkpoints in object storage: resumable, never in the way of training, and good enough
to resume from.
"""

import errno
import shutil
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.checkpoints import (
    change,
    flip,
    manifest,
    outcome,
    replace,
    save_steps,
    small_checkpointer,
    train_state,
)
from torchtitan.checkpoint import upload, writer
from torchtitan.checkpoint.commit import committed_steps, leftovers
from torchtitan.checkpoint.format import index
from torchtitan.checkpoint.format.index import render_index
from torchtitan.checkpoint.upload import GoneError, Uploader, send
from torchtitan.commands import ckpt
from torchtitan.utils import storage
from torchtitan.utils.errors import ConfigError, DamageError, UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.storage import storage_path

pytest.importorskip("upath")


@pytest.fixture(scope="module")
def original(ranks, tmp_path_factory):
    """A folder with a checkpoint of step 1, of two ranks."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    ranks(2, save_steps, folder, 1)
    return folder


@pytest.fixture
def folders(original, tmp_path, monkeypatch):
    """The same folder, of this test's own, and an empty URL."""
    url = storage_path(f"memory://{tmp_path.name}")
    monkeypatch.setattr(storage, "_PAUSE", 0.001)
    monkeypatch.setattr(upload, "_POLL_SECONDS", 0.01)
    shutil.copytree(original, tmp_path / "checkpoint")
    yield tmp_path / "checkpoint", url
    storage.delete_tree(url)


def more(folder, *steps):
    """Checkpoints of other steps, alike but for their manifests."""
    for step in steps:
        shutil.copytree(folder / "step-1", folder / f"step-{step}")
        change(folder / f"step-{step}", step=step, train_state=train_state(step))


def sizes(step):
    """Bytes of all files but the manifest."""
    return sum(path.stat().st_size for path in step.iterdir() if path.name != "manifest.json")


def same(step, copy):
    assert {p.name for p in step.iterdir()} == {p.name for p in copy.iterdir()}
    return all(path.read_bytes() == (copy / path.name).read_bytes() for path in step.iterdir())


def failing(*names):
    """Let the storage refuse files of these names."""
    real = upload._send_file

    def refuse(source, target, name, *rest, **options):
        if name in names:
            raise ConnectionError("the server has gone")
        real(source, target, name, *rest, **options)

    return mock.patch.object(upload, "_send_file", refuse)


def test_nothing_is_sent_twice(folders):
    folder, url = folders
    step = folder / "step-1"
    copy = url / "step-1"
    with failing("__1.json"), pytest.raises(ConnectionError):
        send(step, copy)
    assert committed_steps(url) == []
    assert leftovers(url) == [copy]
    there = {path.name: path.stat().st_size for path in copy.iterdir()}
    assert ".metadata" in there
    (copy / "__0_0.distcp").write_bytes(b"half of it")
    left = sum((step / name).stat().st_size for name in ("__1.json", "__0_0.distcp"))
    assert send(step, copy) == left
    assert same(step, copy)
    assert send(step, copy) == 0
    assert ckpt.main(["verify", str(url)]) == 0


def test_rank_0_reads_what_others_wrote_at_once(folders):
    """A save at a URL: one file after another would take longer than ranks wait."""
    folder, url = folders
    send(folder / "step-1", url / "step-1")
    read = writer._read
    both = threading.Barrier(2)

    def read_late(*args):
        both.wait(10)
        return read(*args)

    with mock.patch.object(writer, "_read", read_late):
        tensors, *_ = writer.read_written(url / "step-1", manifest(folder / "step-1")["save"], 2)
    assert render_index(tensors) == (folder / "step-1/tensors.json").read_bytes()


def save_again(step, position):
    """The same step with other tensors, in files of the same names and sizes."""
    shard = step / "__0_0.distcp"
    flip(shard, position)
    change(step, saved=f"again {position}")
    replace(step, shard.name, shard.read_bytes())


def test_a_step_that_was_saved_again_replaces_its_copy(folders):
    """As after a rewind, whether the copy of the first was complete or not."""
    folder, url = folders
    step = folder / "step-1"
    copy = url / "step-1"
    send(step, copy)
    save_again(step, 700)
    with failing("tensors.json"), pytest.raises(ConnectionError):
        send(step, copy)
    assert committed_steps(url) == []
    save_again(step, 701)
    assert send(step, copy) == sizes(step)
    assert same(step, copy)


def test_a_damaged_checkpoint_is_not_uploaded(folders, capsys):
    folder, url = folders
    unreadable = mock.patch.object(index, "read_regular", side_effect=OSError(errno.EIO, "faulty"))
    with unreadable, pytest.raises(OSError, match="faulty"):
        send(folder / "step-1", url / "step-1")
    assert not (url / "step-1/.damaged").exists(), "another attempt may succeed"
    flip(folder / "step-1/__0_0.distcp", 500)
    with pytest.raises(DamageError, match=r"__0_0\.distcp has a wrong checksum"):
        send(folder / "step-1", url / "step-1")
    assert committed_steps(url) == []
    assert not (url / "step-1/__0_0.distcp").exists()
    assert ckpt.main(["upload", str(folder), str(url)]) == 1
    assert "not uploaded: " in capsys.readouterr().out


def test_foreign_files_are_left_alone(folders):
    folder, url = folders
    (url / "step-1/model.bin").write_bytes(b"precious")
    with pytest.raises(DamageError, match="no checkpoint of this project"):
        send(folder / "step-1", url / "step-1")
    assert (url / "step-1/model.bin").read_bytes() == b"precious"
    shutil.rmtree(folder / "step-1")
    with pytest.raises(GoneError):
        send(folder / "step-1", url / "step-1")


def test_ranks_send_their_share_in_any_order(folders):
    folder, url = folders
    step = folder / "step-1"
    copy = url / "step-1"
    assert send(step, copy, 1, 2) is None, "rank 0 begins"
    assert send(step, copy, 0, 2) is None, "and waits for the others"
    assert committed_steps(url) == []
    own = send(step, copy, 1, 2)
    assert 0 < own < sizes(step)
    assert send(step, copy, 0, 2) == 0
    assert same(step, copy)

    flip(folder / "step-1/tensors.json", 5)
    change(folder / "step-1", saved="again")
    assert send(step, copy, 0, 2) is None
    shares = list(manifest(step)["files"])
    rank = shares.index("tensors.json") % 2
    for number in (rank, 0):
        with pytest.raises(DamageError, match=r"tensors\.json has a wrong checksum"):
            send(step, copy, number, 2)


def listened(monkeypatch):
    lines = []
    monkeypatch.setattr(logger, "handle", lambda record: lines.append(record))
    monkeypatch.setattr(logger, "level", 20)
    logger.manager._clear_cache()
    return lines


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_uploads_survive_whatever_the_storage_does(folders, monkeypatch):
    folder, url = folders
    lines = listened(monkeypatch)
    with failing("__0_0.distcp"):
        uploader = Uploader(folder, url, 0, 1)
        until(lambda: any("Can't upload" in line.getMessage() for line in lines))
        more(folder, 2, 3)
    uploader.wake()
    uploader.finish()
    assert committed_steps(url) == [1, 2, 3]
    text = [line.getMessage() for line in lines]
    assert (
        f"Can't upload to {url}: the server has gone; trying again at the next save, or "
        "in 1 min 00 s" in text
    )
    assert (
        "Uploads are behind: 3 checkpoints (step-1, step-2, step-3) wait; the newest is sent first"
        in text
    )
    order = [line.split()[1] for line in text if line.startswith("Uploaded ")]
    assert order == [f"{url}/step-{step}" for step in (3, 2, 1)]


def test_copies_are_deleted_as_checkpoints_are(folders, monkeypatch):
    folder, url = folders
    more(folder, 2, 3, 4)
    (url / "step-9/.incomplete").write_bytes(b"of a checkpoint that is gone")
    (url / "step-9/__0_0.distcp").write_bytes(b"half")
    for step in (1, 2, 3):
        send(folder / f"step-{step}", url / f"step-{step}")
    lines = listened(monkeypatch)
    Uploader(folder, url, 0, 1, keep_latest=2, keep_every=2).finish()
    assert committed_steps(url) == [2, 3, 4]
    assert not (url / "step-9").exists()
    deleted = [line for line in lines if getattr(line, "event", {}).get("kind") == "deleted"]
    assert [line.event["steps"] for line in deleted] == [[1]]
    assert deleted[0].getMessage() == (
        f"Deleted step-1 from {url}: older than the newest 2, and not multiples of 2"
    )


def test_another_run_at_the_url_ends_the_uploads(folders, monkeypatch):
    folder, url = folders
    lines = listened(monkeypatch)

    def confirm():
        raise UserError("this run has lost its folder")

    uploader = Uploader(folder, url, 0, 1, confirm=confirm)
    until(lambda: not uploader._thread.is_alive())
    uploader.wake()
    uploader.finish()
    assert committed_steps(url) == []
    assert any("has lost its folder" in line.getMessage() for line in lines)


def test_a_stop_leaves_the_rest_to_the_next_start(folders, monkeypatch):
    folder, url = folders
    lines = listened(monkeypatch)
    real = upload._send_file

    def slow(source, target, name, about, proceed):
        until(lambda: uploader._stopped.is_set())
        real(source, target, name, about, proceed)

    with mock.patch.object(upload, "_send_file", slow):
        uploader = Uploader(folder, url, 0, 1)
        uploader.stop()
    assert committed_steps(url) == []
    assert any(
        x.getMessage() == "Not uploaded yet: 1 checkpoint (step-1); the next start continues"
        for x in lines
    )
    Uploader(folder, url, 0, 1).finish()
    assert committed_steps(url) == [1]


def saving(folder, mode):
    """Save with copies, lose the folder, resume from the copies, and save again. Called by one
    rank.
    """
    url = f"memory://resumed-{mode}"
    settings = {"upload_folder": url, "async_mode": mode}
    checkpointer = small_checkpointer(folder, **settings)
    for param in checkpointer.trained.models[0].parameters():
        param.grad = param.detach().clone().fill_(1)
    checkpointer.trained.optimizer.step()
    for step in (1, 2):
        for param in checkpointer.trained.models[0].parameters():
            param.data.fill_(step)
        checkpointer.save(step, train_state(step))
    checkpointer.close()
    checkpointer.end_uploads(wait=True)
    first = committed_steps(storage_path(url))
    shutil.rmtree(folder)
    found = outcome(folder, upload_folder=url)
    save_steps(folder, 5)
    return first, found, outcome(folder, upload_folder=url)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_resumes_from_the_copies(ranks, tmp_path, mode):
    first, copy, own = ranks(1, saving, tmp_path / "checkpoint", mode)[0]
    assert first == [1, 2]
    assert copy == 2
    assert own == 5, "the folder comes first, if it has a checkpoint"


def test_only_urls(folders):
    with pytest.raises(ConfigError, match="is a folder of this machine"):
        ckpt.main(["upload", str(folders[0]), str(Path("/tmp/elsewhere"))])
