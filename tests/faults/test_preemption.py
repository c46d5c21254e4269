"""SIGTERM and SIGUSR1, to the launcher or to one rank: all ranks save after the same step and end with 75."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.runs import arguments, losses, read_metrics, train, weights
from torchtitan.checkpoint.commit import committed_steps
from torchtitan.config import resolve
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.signals import StopRequest

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "TORCHTITAN_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


# ---- agreement, on ranks of the pool


class AskedAt(StopRequest):
    """A rank that is asked to stop while it computes a certain step; -1: before it is ready to train."""

    def __init__(self, step: int):
        super().__init__()
        self.looks, self.step = 0, step

    @property
    def requested(self) -> bool:
        self.looks += 1  # once before training, then as each step begins
        return self.looks > self.step + 1

    @requested.setter
    def requested(self, _: bool) -> None: ...


def train_until_asked(argv, rank, step):
    config = resolve(argv, dist.get_world_size()).config
    stop = AskedAt(step if dist.get_rank() == rank else 10**6)
    trainer = Trainer(config, preflight(config), stop)
    try:
        progress = trainer.train()
    finally:
        trainer.close()
    return trainer.stopped, progress.step, weights(trainer.parts.models)


LAYOUTS = {
    "tensor": (4, ["--parallelism.tensor_parallel_degree=2"]),
    "pipeline": (4, ["--parallelism.pipeline_parallel_degree=2"]),
    "async save in flight": (2, ["--checkpoint.interval=3", "--checkpoint.async_mode=async_with_pinned_mem"]),
    "validation is due": (2, ["--validation.enable", "--validation.freq=4", "--validation.dataset=demo_validation"]),
}


SLOW = ("tensor", "validation is due")


@pytest.mark.parametrize("layout", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in LAYOUTS])
def test_the_last_rank_is_asked_and_all_save_the_same_step(ranks, tmp_path, layout):
    """In step 3, so that the others learn of it in step 4. Then the run goes on as if nothing had been."""
    world, extra = LAYOUTS[layout]
    argv = arguments(tmp_path, *extra, "--checkpoint.enable", steps=6)
    whole = ranks(world, train, [*argv, f"--job.dump_folder={tmp_path / 'whole'}"])[0]
    outcomes = ranks(world, train_until_asked, argv, world - 1, 3)
    assert [outcome[:2] for outcome in outcomes] == [(True, 4)] * world
    assert committed_steps(tmp_path / "out/checkpoint")[-1] == 4
    assert not list((tmp_path / "out/checkpoint").glob(".*"))
    rest = ranks(world, train, argv)[0]
    assert losses(rest) == pytest.approx(losses(whole), rel=1e-5)


def test_asked_during_the_last_step_the_run_just_ends(ranks, tmp_path):
    argv = arguments(tmp_path, "--checkpoint.enable")
    assert [o[:2] for o in ranks(2, train_until_asked, argv, 1, 3)] == [(False, 4)] * 2


def test_asked_while_building_no_step_is_made(ranks, tmp_path):
    argv = arguments(tmp_path, "--checkpoint.enable")
    assert [o[:2] for o in ranks(2, train_until_asked, argv, 1, -1)] == [(True, 0)] * 2
    assert committed_steps(tmp_path / "out/checkpoint") == []


def asked_without_checkpoints(argv):
    import logging

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torchtitan").addHandler(handler)
    outcome = train_until_asked(argv, 1, 1)[:2]
    logging.getLogger("torchtitan").removeHandler(handler)
    return outcome, lines


def test_without_checkpoints_the_loss_is_said(ranks, tmp_path):
    outcome, lines = ranks(2, asked_without_checkpoints, arguments(tmp_path))[0]
    assert outcome == (True, 2)
    assert any("step 2 is lost, as checkpoint.enable = false" in line for line in lines)


# ---- real processes


def launch(*command, **env):
    return subprocess.Popen(
        [str(c) for c in command], env=ENV | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(process, folder, step, timeout=120):
    path = folder / "out/metrics.jsonl"
    deadline = time.monotonic() + timeout
    while not path.exists() or len(path.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def finish(process):
    out, err = process.communicate(timeout=120)
    return out, err, process.returncode


def slow(folder, *extra):
    """Enough steps to be interrupted, which then don't decide the learning rate."""
    return arguments(folder, "--checkpoint.enable", "--lr_scheduler.total_steps=20", *extra, steps=100000)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_signal_to_one_rank_ends_the_launcher_with_75_and_its_command_goes_on(ranks, tmp_path):
    """Restarts are allowed, but not asked for here. Data comes from worker processes, which signals must not end."""
    extra = [f"--config={ROOT}/train_configs/debug_model.toml", "--validation.enable=false"]
    argv = slow(tmp_path, "--training.dataloader.num_workers=1", "--validation.enable=false")
    launcher = launch(ROOT / "run_train.sh", *argv, NGPU="2", MAX_RESTARTS="2")
    wait_for_step(launcher, tmp_path, 3)
    rank = psutil.Process(launcher.pid).children()[1]
    os.killpg(rank.pid, signal.SIGUSR1)
    _, err, status = finish(launcher)
    assert status == os.EX_TEMPFAIL, err
    (step,) = committed_steps(tmp_path / "out/checkpoint")
    assert f"Stopped after step {step}, as asked. To resume:" in err
    assert "Traceback" not in err
    assert "torch/distributed" not in err, "torchrun's warnings"
    (command,) = [line for line in err.splitlines() if "run_train.sh" in line]
    assert command.strip().startswith(f"NGPU=2 MAX_RESTARTS=2 {ROOT}/run_train.sh --job.dump_folder=")
    more = subprocess.run(
        f"{command} --training.steps={step + 2}", shell=True, env=ENV, capture_output=True, text=True, timeout=200
    )
    assert more.returncode == 0, more.stderr
    extra += ["--lr_scheduler.total_steps=20", f"--job.dump_folder={tmp_path / 'whole'}"]
    whole = ranks(2, train, arguments(tmp_path, *extra, steps=step + 2))[0]
    assert losses({"metrics": read_metrics(tmp_path / "out")}) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.e2e
@pytest.mark.parametrize("ranks_", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_signals_to_the_launcher(tmp_path, ranks_):
    module = [sys.executable, "-m", "torchtitan", "train", "--nproc-per-node", ranks_, "--"]
    launcher = launch(*module, *slow(tmp_path))
    wait_for_step(launcher, tmp_path, 2)
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGUSR1)
    _, err, status = finish(launcher)
    assert status == os.EX_TEMPFAIL, err
    (step,) = committed_steps(tmp_path / "out/checkpoint")
    assert err.splitlines()[-2] == f"Stopped after step {step}, as asked. To resume:"
    assert shlex.split(err.splitlines()[-1])[1:4] == ["-m", "torchtitan", "train"]


BLOCKED = """
import ctypes
from torchtitan.utils.signals import StopRequest
StopRequest().listen()
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
print("ready", flush=True)
libc.pthread_mutex_lock(lock), libc.pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_before_training_a_blocked_rank_leaves_at_once(number):
    """As in a rendezvous that waits for another node: the main thread never runs a Python handler."""
    process = launch(sys.executable, "-c", BLOCKED)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=20) == os.EX_TEMPFAIL


@pytest.mark.e2e
def test_a_signal_while_ranks_start(tmp_path):
    launcher = launch(sys.executable, "-m", "torchtitan", "train", "--nproc-per-node=2", "--", *slow(tmp_path))
    deadline = time.monotonic() + 60
    while len(psutil.Process(launcher.pid).children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    _, err, status = finish(launcher)
    assert status == os.EX_TEMPFAIL, err
    assert "Traceback" not in err


def handles_sigterm(process):
    """Whether SIGTERM no longer simply ends the process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigBlk:", "SigCgt:"))]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


@pytest.mark.e2e
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("seconds", [0, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_a_signal_in_the_first_moments(tmp_path, seconds):
    """While the shell script runs, hands over to Python, and Python imports the launcher."""
    launcher = launch(ROOT / "run_train.sh", *slow(tmp_path), NGPU="1")
    deadline = time.monotonic() + 20
    while not handles_sigterm(launcher):
        assert time.monotonic() < deadline
    time.sleep(seconds)
    launcher.send_signal(signal.SIGTERM)
    _, err, status = finish(launcher)
    assert status == os.EX_TEMPFAIL, err
    assert "Traceback" not in err
    assert not (tmp_path / "out/checkpoint").exists()
