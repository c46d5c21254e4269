"""SIGTERM, SIGUSR1 and Ctrl-C, to the launcher or to one rank: all ranks save after the same step
and end with 75.
"""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests.runs import arguments, losses, read_metrics, train
from torchtitan.checkpoint.commit import committed_steps
from torchtitan.train.rank_main import _resume_hint
from torchtitan.utils.signals import AGAIN_SECONDS, StopRequest, stop_signals

ROOT = Path(__file__).parents[2]
STOPPING = "Asked to stop: finishing what is under way"
ENV = os.environ | {
    "PYTHONPATH": str(ROOT),
    "TORCHTITAN_PYTHON": sys.executable,
    "OMP_NUM_THREADS": "1",
}


# ---- real processes


def launch(*command, **env):
    """Start a process group, as a shell at a terminal does."""
    return subprocess.Popen(
        [str(c) for c in command],
        env=ENV | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=heed_ctrl_c,
    )


def heed_ctrl_c():
    """Undo what a shell does to commands in the background, in which these tests may run."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ctrl_c(launcher):
    """What a terminal does: a signal to every process of the group."""
    os.killpg(launcher.pid, signal.SIGINT)


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
    return arguments(
        folder, "--checkpoint.enable", "--lr_scheduler.total_steps=100000", *extra, steps=100000
    )


@pytest.mark.slow
@pytest.mark.e2e
def test_a_signal_to_one_rank_ends_the_launcher_with_75_and_its_command_goes_on(ranks, tmp_path):
    """Restarts are allowed, but not asked for here. Data comes from worker processes, which signals
    must not end.
    """
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
    assert command.strip().startswith(
        f"NGPU=2 MAX_RESTARTS=2 {ROOT}/run_train.sh --job.dump_folder="
    )
    more = subprocess.run(
        f"{command} --training.steps={step + 2}",
        shell=True,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert more.returncode == 0, more.stderr
    extra += ["--lr_scheduler.total_steps=100000", f"--job.dump_folder={tmp_path / 'whole'}"]
    whole = ranks(2, train, arguments(tmp_path, *extra, steps=step + 2))[0]
    assert losses({"metrics": read_metrics(tmp_path / "out")}) == pytest.approx(
        losses(whole), rel=1e-5
    )


@pytest.mark.e2e
@pytest.mark.parametrize("ranks_", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_signals_to_the_launcher(tmp_path, ranks_):
    module = [sys.executable, "-m", "torchtitan", "train", "--nproc-per-node", ranks_, "--"]
    launcher = launch(*module, *slow(tmp_path))
    wait_for_step(launcher, tmp_path, 2)
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGUSR1)
    _, err, status = finish(launcher)
    assert status == os.EX_TEMPFAIL, err
    (step,) = committed_steps(tmp_path / "out/checkpoint")
    assert err.splitlines()[0] == STOPPING
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_before_training_a_blocked_rank_leaves_at_once(number):
    """As in a rendezvous that waits for another node: the main thread never runs a Python
    handler.
    """
    process = launch(sys.executable, "-c", BLOCKED)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=120) == os.EX_TEMPFAIL


@pytest.mark.e2e
def test_a_signal_while_ranks_start(tmp_path):
    launcher = launch(
        sys.executable, "-m", "torchtitan", "train", "--nproc-per-node=2", "--", *slow(tmp_path)
    )
    deadline = time.monotonic() + 60
    while len(psutil.Process(launcher.pid).children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    _, err, status = finish(launcher)
    assert status == os.EX_TEMPFAIL, err
    assert "Traceback" not in err


FAILS = """
import os
import time
from torchtitan.config.registry import callbacks

@callbacks.register("fails")
def fails():
    if os.environ["RANK"] == "1":
        raise ValueError("a fault of rank 1")
    time.sleep(4)
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_a_failure_while_another_rank_still_builds_is_no_stop(tmp_path):
    """torchrun then asks the other rank to stop, as a user does."""
    (tmp_path / "fails.py").write_text(FAILS)
    flags = ["--experimental.custom_import=fails", "--training.callbacks=['fails']"]
    module = [sys.executable, "-m", "torchtitan", "train", "--nproc-per-node=2", "--"]
    launcher = launch(*module, *slow(tmp_path, *flags), PYTHONPATH=f"{ROOT}:{tmp_path}")
    _, err, status = finish(launcher)
    assert status == 1, err
    assert "ValueError: a fault of rank 1" in err
    assert "as asked" not in err
    assert err.splitlines()[-1] == "error: rank 1 ended with exit code 1"


def handles_sigterm(process):
    """Whether SIGTERM no longer simply ends the process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    masks = [
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith(("SigBlk:", "SigCgt:"))
    ]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


@pytest.mark.e2e
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("seconds", [0, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_a_signal_in_the_first_moments(tmp_path, seconds):
    """While the shell script runs, hands over to Python, and Python imports the launcher."""
    launcher = launch(ROOT / "run_train.sh", *slow(tmp_path), NGPU="1")
    deadline = time.monotonic() + 120
    while not handles_sigterm(launcher):
        assert time.monotonic() < deadline
    time.sleep(seconds)
    launcher.send_signal(signal.SIGTERM)
    _, err, status = finish(launcher)
    assert status == os.EX_TEMPFAIL, err
    assert "Traceback" not in err
    assert not (tmp_path / "out/checkpoint").exists()


# ---- Ctrl-C


@pytest.mark.e2e
@pytest.mark.parametrize(
    "ranks_", [pytest.param(1, marks=pytest.mark.proof), pytest.param(2, marks=pytest.mark.slow)]
)
def test_ctrl_c_saves_and_the_same_command_resumes(tmp_path, ranks_):
    """One rank by the shell script; two, each in a session of its own, by the launcher, which must
    wait for them.
    """
    command = [ROOT / "run_train.sh"]
    if ranks_ == 2:
        command = [sys.executable, "-m", "torchtitan", "train", "--nproc-per-node=2", "--"]
    argv = slow(tmp_path, "--training.dataloader.num_workers=1", "--validation.enable=false")
    launcher = launch(*command, *argv, NGPU="1")
    wait_for_step(launcher, tmp_path, 2)
    ctrl_c(launcher)
    out, err, status = finish(launcher)
    assert status == os.EX_TEMPFAIL, err
    (step,) = committed_steps(tmp_path / "out/checkpoint")
    assert f"Stopped after step {step}, as asked. To resume:" in err
    assert STOPPING in err
    assert f"Saved {tmp_path}/out/checkpoint/step-{step}\n" in out
    assert "Traceback" not in out + err
    run = json.loads((tmp_path / "out/run.json").read_text())
    assert run["starts"][0]["end"] == "preempted"
    again = launch(*command, *argv, f"--training.steps={step + 1}", NGPU="1")
    out, err, status = finish(again)
    assert status == 0, err
    assert f"Resumed from {tmp_path}/out/checkpoint/step-{step}" in out


STUCK = """
import os
import time
from pathlib import Path
from torchtitan.config.registry import schedules

def factor(step):
    if step == 7:
        Path(os.environ["STUCK"]).touch()
        time.sleep(3600)
    return 1.0

@schedules.register("stuck")
def stuck(lr_scheduler):
    return factor
"""


@pytest.mark.e2e
@pytest.mark.parametrize("ranks_", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_ctrl_c_ends_at_once_and_says_what_is_lost(tmp_path, ranks_):
    """In a step that never ends, the eighth, after a save of the sixth."""
    (tmp_path / "stuck.py").write_text(STUCK)
    flags = [
        "--experimental.custom_import=stuck",
        "--lr_scheduler.name=stuck",
        "--checkpoint.interval=3",
    ]
    module = [sys.executable, "-m", "torchtitan", "train", "--nproc-per-node", ranks_, "--"]
    argv = slow(tmp_path, *flags)
    launcher = launch(*module, *argv, PYTHONPATH=f"{ROOT}:{tmp_path}", STUCK=f"{tmp_path}/stuck")
    wait_for_step(launcher, tmp_path, 7)
    deadline = time.monotonic() + 60
    while not (tmp_path / "stuck").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ctrl_c(launcher)
    assert launcher.stderr.readline() == f"{STOPPING}; Ctrl-C again ends at once\n"
    ctrl_c(launcher)  # too early to be another one
    time.sleep(AGAIN_SECONDS)
    ctrl_c(launcher)
    _, err, status = finish(launcher)
    assert status == 130, err
    lines = err.splitlines()
    assert lines[0] == "interrupted: step 7 is lost. To resume after step 6:"
    assert shlex.split(lines[1])[1:4] == ["-m", "torchtitan", "train"]
    assert len(lines) == 2, err
    start = json.loads((tmp_path / "out/run.json").read_text())["starts"][0]
    assert (start["step"], start["end"]) == (7, "interrupted")


@pytest.mark.parametrize(
    ("step", "saved", "text"),
    [
        (57, 40, "steps 41 to 57 are lost. To resume after step 40:"),
        (41, 40, "step 41 is lost. To resume after step 40:"),
        (40, 40, "no finished step is lost. To resume after step 40:"),
        (0, None, "no finished step is lost. To start again:"),
        (3, 0, "steps 1 to 3 are lost. To start again:"),
        (
            3,
            None,
            "steps 1 to 3 are lost, as checkpoint.enable = false or load_only = true. To "
            "start again:",
        ),
    ],
)
def test_what_a_second_ctrl_c_loses(step, saved, text):
    assert _resume_hint(step, saved) == text


def test_only_a_later_ctrl_c_is_a_second_one(capsys):
    """Wrappers such as srun pass on what the terminal has sent already."""
    times = iter([10.0, 10.0 + AGAIN_SECONDS / 2, 10.0 + AGAIN_SECONDS])
    stop = StopRequest(clock=lambda: next(times))
    ended = []
    stop.abandon = lambda: ended.append(True)
    stop.defer()
    stop.ask(signal.SIGTERM)
    stop.ask(signal.SIGUSR1)
    stop.ask(signal.SIGINT)
    assert stop.requested
    assert not ended
    stop.ask(signal.SIGINT)
    assert ended


def test_a_terminal_that_closes(monkeypatch):
    """Nothing is printed to it any more; what a file or pipe gets is. nohup's choice is kept."""
    replaced = []
    modes = {1: stat.S_IFCHR, 2: stat.S_IFIFO}
    stop = StopRequest()
    stop.defer()
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup2", lambda *streams: replaced.append(streams[1]))
        patch.setattr(os, "fstat", lambda stream: mock.Mock(st_mode=modes[stream]))
        stop.ask(signal.SIGTERM)
        assert replaced == []
        stop.ask(signal.SIGHUP)
    assert replaced == [1]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals()
    signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in stop_signals()


@pytest.mark.parametrize("killed", [True, False])
def test_a_rank_whose_launcher_was_killed_while_it_started_does_not_train(killed):
    """It has another parent when it first looks; the killed one isn't collected yet."""
    rank = f"sleep 0.5; exec {sys.executable} -m torchtitan.train --nonsense"
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess\n"
            "os.environ['TORCHTITAN_REPORTER'] = str(os.getpid())\n"
            f"rank = subprocess.Popen(['sh', '-c', {rank!r}])\n"
            "print(flush=True)\n"
            "rank.wait()",
        ],
        env=ENV | {"TORCHELASTIC_RUN_ID": "any"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    launcher.stdout.readline()
    if killed:
        launcher.kill()
    _, err = launcher.communicate(timeout=60)
    assert ("--nonsense" in err) == (not killed), err
