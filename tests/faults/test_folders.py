"""A run's folder that is deleted, or that another run wants too."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch.distributed as dist

from tests.runs import SAVE, SCHEDULE, arguments, first, losses, read_metrics, train
from torchtitan.config import resolve
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.lock import NAME, current_holder


@pytest.fixture
def other_run():
    """The lock of a living process."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(process.pid).create_time()
    changes = {"run": "other", "pid": process.pid, "started": started}
    yield current_holder().model_copy(update=changes).model_dump_json()
    process.kill()
    process.wait()


def train_with(argv, step, action):
    """Train, with `action()` after `step` on rank 0; what the run raised, if it did."""
    config = resolve(argv, dist.get_world_size()).config

    def act(_):
        if trainer.progress.step == step and dist.get_rank() == 0:
            action()

    trainer = Trainer(config, preflight(config), arrange=first(act))
    try:
        trainer.train()
    except UserError as error:
        return str(error)
    finally:
        trainer.close()
    return None


def test_a_run_whose_folder_is_deleted_keeps_what_it_has_in_memory(ranks, tmp_path, uninterrupted):
    argv = arguments(tmp_path, *SAVE, SCHEDULE, "--metrics.enable_tensorboard", steps=6)
    out = tmp_path / "out"
    assert ranks(2, train_with, argv, 4, partial(shutil.rmtree, out)) == [None, None]
    assert [record["step"] for record in read_metrics(out)] == [4, 5, 6]
    assert {"config.toml", "run.json", "tb"} <= {path.name for path in out.iterdir()}
    old, new = left_behind(out, "run.json", 2), left_behind(out, "page.html", 0)
    run = ranks(2, train, arguments(tmp_path, *SAVE, SCHEDULE, steps=8))[0]
    assert losses(run) == pytest.approx(losses(uninterrupted)[3:], rel=1e-5)
    assert not old.exists(), "a killed process has left it"
    assert new.exists(), "another command may be writing it"


def left_behind(folder, name, hours):
    """The temporary file of a `write_whole` that was killed."""
    with pytest.MonkeyPatch.context() as killed, suppress(KeyboardInterrupt):
        killed.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
        killed.setattr(Path, "unlink", Mock())
        write_whole(folder / name, b"{")
    (left,) = folder.glob(f".{name}.*")
    os.utime(left, (0, time.time() - 3600 * hours))
    return left


@pytest.mark.parametrize("key", ["job.dump_folder", "checkpoint.folder"])
def test_a_second_run_in_a_folder_is_refused_and_touches_nothing(ranks, tmp_path, other_run, key):
    folder = tmp_path / "out" if key == "job.dump_folder" else tmp_path / "shared"
    unfinished = folder / ".step-3.tmp" / "half"
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()
    left = left_behind(folder, "run.json", 2)
    (folder / NAME).write_text(other_run)
    argv = arguments(tmp_path, *SAVE, f"--checkpoint.folder={tmp_path / 'shared'}")
    with pytest.raises(
        AssertionError,
        match=rf"ConfigError: {key}: {folder} is in use by another run: process \d+ on",
    ):
        ranks(2, train, argv)
    assert unfinished.exists()
    assert left.exists()
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_a_run_that_has_lost_its_folder_commits_nothing(ranks, tmp_path, uninterrupted, other_run):
    folder = tmp_path / "shared"
    argv = [f"--checkpoint.folder={folder}", *SAVE, SCHEDULE]
    take = partial(Path.write_text, folder / NAME, other_run)
    logs_late = "--metrics.log_freq=100"  # so that the save is first to notice
    lost = ranks(1, train_with, arguments(tmp_path, *argv, logs_late, steps=8), 4, take)
    assert "can't save" in lost[0]
    assert "this run has lost its folder" in lost[0]
    assert [path.name for path in Path(folder).glob("*step-*")] == ["step-3"]
    (folder / NAME).unlink()
    run = ranks(1, train, arguments(tmp_path, *argv, steps=8))[0]
    assert losses(run)[-5:] == pytest.approx(losses(uninterrupted)[3:], rel=1e-5)
