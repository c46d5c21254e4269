"""Storage that is full, read-only, or corrupts files."""

import ctypes
import errno
import os
import shutil
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.checkpoints import ABOUT, small_checkpointer, train_state
from tests.runs import SAVE, SCHEDULE, arguments, assert_continues, first, train
from torchtitan.checkpoint import writer
from torchtitan.checkpoint.commit import begin, temporary_folder
from torchtitan.checkpoint.format.manifest import CheckpointInfo
from torchtitan.checkpoint.format.sums import SummedFile
from torchtitan.checkpoint.save import write_streamed
from torchtitan.config import resolve
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.errors import CheckpointError, ConfigError
from torchtitan.utils.logging import logger


def flip_a_bit(shard):
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def truncate(shard):
    os.truncate(shard, shard.stat().st_size // 2)


def told(argv):
    """Train; also returns the log."""
    lines = []
    level = logger.level
    with mock.patch.object(logger, "handle", lambda record: lines.append(record.getMessage())):
        logger.setLevel("INFO")
        run = train(argv)
    logger.setLevel(level)
    return run | {"log": "\n".join(lines)}


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        pytest.param(flip_a_bit, "has a wrong checksum", marks=pytest.mark.slow),
        pytest.param(truncate, "bytes instead of", marks=pytest.mark.proof),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_loaded(
    ranks, tmp_path, uninterrupted, harm, what
):
    ranks(2, train, arguments(tmp_path, *SAVE, SCHEDULE, steps=6))
    folder = tmp_path / "out/checkpoint"
    shard = max((folder / "step-6").glob("*.distcp"), key=lambda p: p.stat().st_size)
    harm(shard)
    damaged = shutil.copytree(folder / "step-6", tmp_path / "damaged")
    run = ranks(2, told, arguments(tmp_path, *SAVE, SCHEDULE, steps=8))[0]
    assert_continues(run, uninterrupted)
    assert f"Can't resume: {folder / 'step-6'} is damaged: {shard.name} " in run["log"]
    assert what in run["log"]
    assert f"Resumed from {folder / 'step-3'}" in run["log"]
    for step in (3, 6, 8):
        shutil.rmtree(folder / f"step-{step}")
    damaged.rename(folder / "step-6")
    with pytest.raises(AssertionError, match="no checkpoint can be resumed"):
        ranks(2, train, arguments(tmp_path, *SAVE, SCHEDULE, steps=8))


def train_with_a_slow_start_of_saves(argv):
    seen = []

    def slow(final):
        time.sleep(0.5)
        seen.append(temporary_folder(final).exists())
        begin(final)

    with mock.patch.object(writer, "begin", slow):
        train(argv)
    return seen


def test_no_rank_makes_a_folder_that_rank_0_may_be_about_to_delete(ranks, tmp_path):
    argv = arguments(tmp_path, *SAVE, SCHEDULE, steps=3)
    assert ranks(2, train_with_a_slow_start_of_saves, argv) == [[False], []]


def full_disk(argv):
    """Train with a limit of 100 kB per file, which fails like a full disk, with an error of the
    operating system.
    """
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        trainer.train()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        trainer.close()
    return None


@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.slow), "async"])
def test_full_disk_leaves_earlier_checkpoints_intact(ranks, tmp_path, mode):
    extra = [*SAVE, f"--checkpoint.async_mode={mode}"]
    ranks(2, train, arguments(tmp_path, *extra, steps=3))
    for kind, message in ranks(2, full_disk, arguments(tmp_path, *extra, steps=6)):
        assert kind == "CheckpointError"
        assert "can't save" in message
        assert "File too large" in message
        assert "checkpoint.folder" in message
        assert "step-3" in message
    folder = tmp_path / "out/checkpoint"
    assert sorted(p.name for p in folder.iterdir()) == ["step-3"]
    assert ranks(2, train, arguments(tmp_path, *extra, steps=6))[0]["progress"]["step"] == 6


def save_what_no_manifest_holds(folder):
    checkpointer = small_checkpointer(folder)
    try:
        checkpointer.save(2, train_state(2) | {"guard": {"more": 1}})
        checkpointer.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        checkpointer.close()


def test_a_state_that_fits_no_manifest_is_called_a_bug(ranks, tmp_path):
    """The user is not told to fix the cause."""
    for message in ranks(2, save_what_no_manifest_holds, tmp_path):
        assert f"can't save {tmp_path / 'step-2'}: rank 0: " in message
        assert "train_state.guard.windows: Field required" in message
        assert "bug in torchtitan, please report it" in message
        assert "Fix the cause" not in message
    assert list(tmp_path.iterdir()) == []


def set_file_user(uid):
    """Drop root's right to write everywhere, which tests in a container often have, or restore
    it.
    """
    if os.geteuid() == 0:
        ctypes.CDLL(None).setfsuid(uid)


def locked_while_training(argv):
    """Train; after step 4 the folder is read-only."""
    config = resolve(argv, dist.get_world_size()).config
    folder = Path(config.job.dump_folder, "checkpoint")

    def lock(_):
        if trainer.progress.step == 4:
            folder.chmod(0o555)
            dist.barrier()
            set_file_user(65534)

    trainer = Trainer(config, preflight(config), arrange=first(lock))
    try:
        trainer.train()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        set_file_user(0)
        folder.chmod(0o777)
        trainer.close()
    return None


@pytest.fixture
def public():
    """A folder writable by every user."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def test_a_folder_that_becomes_read_only_is_reported_with_the_last_good_checkpoint(ranks, public):
    ranks(2, train, arguments(public, *SAVE, steps=3))
    for path in [public, *public.rglob("*")]:
        path.chmod(0o777)
    for kind, message in ranks(2, locked_while_training, arguments(public, *SAVE, steps=6)):
        assert kind == "CheckpointError"
        assert "Permission denied" in message
        assert "step-3" in message
    assert ranks(2, train, arguments(public, *SAVE, steps=6))[0]["progress"]["step"] == 6


def test_a_read_only_folder_is_refused_before_anything_starts(public):
    config = resolve(arguments(public, f"--job.dump_folder={public / 'locked/out'}"), 1).config
    (public / "locked").mkdir()
    (public / "locked").chmod(0o555)
    set_file_user(65534)
    try:
        with pytest.raises(
            ConfigError, match=r"job.dump_folder: can't write to .*Permission denied"
        ):
            preflight(config)
    finally:
        set_file_user(0)


class FullAfter:
    """A file on a disk that is full after some bytes."""

    def __init__(self, file, room):
        self.file = file
        self.room = room

    def write(self, data):
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 100, 700, 1000, 1500])
def test_converting_onto_a_full_disk_says_so_wherever_it_fills(tmp_path, room):
    """torch's writer of zip files fails with an error of its own then."""
    real = SummedFile.__init__

    def limited(self, file):
        real(self, FullAfter(file, room))

    info = CheckpointInfo(step=0, model_only=True, train_state=None, **ABOUT)
    state = {"model": {"weight": torch.empty(4, 3, device="meta")}}
    with (
        mock.patch.object(SummedFile, "__init__", limited),
        pytest.raises(OSError, match="No space left on device"),
    ):
        write_streamed(tmp_path / "step-0", info, state, lambda key, box: torch.ones(4, 3)[box])
    assert not list(tmp_path.iterdir())
