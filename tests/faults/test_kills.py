"""SIGKILL at any moment: saved checkpoints survive, none looks complete but isn't, and the loss
curve continues.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.runs import SAVE, SCHEDULE, arguments, assert_continues, train
from torchtitan.checkpoint import writer
from torchtitan.checkpoint.commit import committed_steps, damage
from torchtitan.checkpoint.format.manifest import MANIFEST, read_manifest
from torchtitan.checkpoint.writer import CommittingWriter
from torchtitan.config import resolve
from torchtitan.train import step
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_forward(trainer):
    if dist.get_rank() == 1:
        hook = lambda *_: die() if trainer.progress.step == 4 else None  # noqa: E731
        trainer.engine.models[0].layers["1"].register_forward_pre_hook(hook)


def in_a_collective(trainer):
    real = step.all_reduce

    def broken(value, group, *rest):
        if trainer.progress.step == 4 and dist.get_rank() == 1:
            dist.all_reduce(torch.ones(10_000_000), group=group, async_op=True)
            die()
        return real(value, group, *rest)

    step.all_reduce = broken


def between_shard_and_metadata(trainer):
    real = CommittingWriter.write_data

    def broken(self, plan, planner):
        written = real(self, plan, planner)
        if dist.get_rank() == 1 and trainer.progress.step == 6:
            die()
        return written

    CommittingWriter.write_data = broken


def in_the_manifest(trainer):
    real = writer.write_file

    def broken(path, value):
        if path.name == MANIFEST and trainer.progress.step == 6:
            path.write_text('{"step": 6, "mod')
            die()
        real(path, value)

    writer.write_file = broken


def between_the_renames(trainer):
    """After the old checkpoint of the same step was renamed, before the new one is."""
    real = Path.rename

    def broken(self, target):
        if trainer.progress.step == 6 and self.name == ".step-6.tmp":
            die()
        return real(self, target)

    Path.rename = broken


def in_a_deletion(trainer):
    real = shutil.rmtree

    def broken(path, *args, **kwargs):
        if Path(path).name == ".step-3.old" and Path(path).is_dir():
            next(Path(path).glob("*.distcp")).unlink()
            die()
        real(path, *args, **kwargs)

    shutil.rmtree = broken


def killed(argv, moment):
    """Train until `moment`, which kills the process and thereby undoes the patches."""
    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    globals()[moment](trainer)
    trainer.train()


@pytest.mark.parametrize(
    ("moment", "left"),
    [
        pytest.param("in_a_forward", [3], marks=pytest.mark.slow),
        ("in_a_collective", [3]),
        pytest.param("between_shard_and_metadata", [3], marks=pytest.mark.proof),
        pytest.param("in_the_manifest", [3], marks=pytest.mark.slow),
        ("between_the_renames", [3]),
        pytest.param("in_a_deletion", [6, 7], marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_loses_no_checkpoint(ranks, tmp_path, uninterrupted, moment, left):
    extra = [*SAVE, SCHEDULE]
    folder = tmp_path / "out/checkpoint"
    if moment == "between_the_renames":  # a checkpoint of the same step is replaced
        ranks(2, train, arguments(tmp_path, *extra, steps=6))
        extra.append("--checkpoint.load_step=3")
    if moment == "in_a_deletion":
        extra.append("--checkpoint.keep_latest_k=2")
    steps = 7 if moment == "in_a_deletion" else 8
    with pytest.raises(AssertionError, match="the process died"):
        ranks(2, killed, arguments(tmp_path, *extra, steps=steps), moment)
    assert committed_steps(folder) == left
    assert not [
        problem for path in folder.glob("step-*") for problem in damage(path, read_manifest(path))
    ]
    run = ranks(2, train, arguments(tmp_path, *SAVE, SCHEDULE, steps=8))[0]
    assert_continues(run, uninterrupted)
    assert not list(folder.glob(".step-*"))


@pytest.mark.e2e
@pytest.mark.parametrize("delay", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_kill_during_a_save_leaves_a_good_checkpoint(tmp_path, delay):
    """A real process, killed while it saves after every step."""
    argv = [*arguments(tmp_path, steps=500), "--checkpoint.enable", "--checkpoint.interval=1"]
    folder = tmp_path / "out/checkpoint"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan.train", *argv], stdout=log, stderr=log
        )
        wait_for(
            lambda: committed_steps(folder) and list(folder.glob(".step-*.tmp")), process, tmp_path
        )
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    steps = committed_steps(folder)
    assert steps
    assert all((folder / f"step-{step}/.metadata").is_file() for step in steps)
    more = [*arguments(tmp_path, steps=steps[-1] + 2), "--checkpoint.enable"]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan.train", *more],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"Resumed from {folder / f'step-{steps[-1]}'}" in done.stdout
    assert not list(folder.glob(".step-*"))


def wait_for(condition, process, folder: Path, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.001)


def processes_of(mark):
    """Ids and command lines of the living processes with a mark in their environment."""
    living = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == mark and process.status() != "zombie":
                living[process.pid] = " ".join(process.cmdline())
    return living


COMMANDS = {  # and the number of processes to wait for
    "train": (["train", "--nproc-per-node", "2", "--"], 9),
    "tokenize": (["tokenize", "--workers", "2", "--part", "100000", "--input"], 5),
    "rehearse": (["rehearse", "train_configs/debug_model.toml", "--world", "4"], 4),
}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_outlives_a_killed_command(tmp_path, command):
    """Neither processes nor, except for caches, files in the temporary folder."""
    words, count = COMMANDS[command]
    flags = ["--training.dataloader.num_workers=1"]
    argv = arguments(tmp_path, *flags, steps=10**6)
    if command == "tokenize":
        large = tmp_path / "large.jsonl"
        large.write_text('{"text": "lorem ipsum dolor sit amet"}\n' * 2_000_000)
        argv = [str(large), "--output", str(tmp_path / "tokens")]
        argv += ["--tokenizer", "tests/assets/tokenizer"]
    elif command == "rehearse":
        argv += ["--parallelism.tensor_parallel_degree=2", "--model.overrides.n_layers=24"]
    folder = tmp_path / "t"  # the path of a socket has at most 107 characters
    folder.mkdir()
    mark = str(tmp_path)
    env = os.environ | {"TMPDIR": str(folder), "MARK": mark, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([sys.executable, "-m", "torchtitan", *words, *argv], env=env)
    deadline = time.monotonic() + 120
    while len(processes_of(mark)) < count:
        assert process.poll() is None
        assert time.monotonic() < deadline, processes_of(mark)
        time.sleep(0.05)
    process.kill()
    process.wait()
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(mark)
    assert {path.name for path in folder.iterdir()} <= {"torchinductor_root"}
