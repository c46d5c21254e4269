"""The start of a process: closed standard streams, and tasks without a rank."""

import os
import signal
import subprocess
import sys
from functools import partial
from unittest import mock

import psutil
import pytest

from torchtitan.commands import _dispatch, generate
from torchtitan.commands import eval as eval_command
from torchtitan.commands import train as launcher
from torchtitan.train import rank_main, trainer
from torchtitan.utils.errors import CheckpointError, ConfigError
from torchtitan.utils.process import rank_and_world, reporting_rank, run_main
from torchtitan.utils.signals import Stopped

WRITES = """
import os, subprocess, sys
from torchtitan.utils.process import run_main

def main(argv):
    with open(argv[0], "w") as file:
        file.write("mine")
        print("a result", sys.stdout.isatty(), sys.stdin.isatty(), flush=True)
        print("a warning", file=sys.stderr, flush=True)
        os.write(1, b"of C++")
        os.write(2, b"of C++")
        subprocess.run(["sh", "-c", "echo of a child; echo of a child >&2"], check=True)

sys.exit(run_main(main))
"""


HAS_WORKER = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from torchtitan.utils.signals import end_with_starter

forkserver.ensure_running()
context = multiprocessing.get_context("forkserver")
pool = ProcessPoolExecutor(1, context, initializer=end_with_starter)
print(pool.submit(os.getpid).result(), flush=True)
time.sleep(1000)
"""


def test_workers_end_with_the_process_that_is_killed(tmp_path):
    """So do their fork server and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HAS_WORKER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    worker = psutil.Process(int(process.stdout.readline()))
    server = worker.parent()
    process.kill()
    process.wait()
    assert not psutil.wait_procs([worker, server], timeout=20)[1]
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_whose_path_no_socket_can_have(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    code = "from torchtitan.utils.signals import start_fork_server; start_fork_server()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert "UserError: can't start worker processes in /" in run.stderr
    assert run.stderr.endswith("too long; set TMPDIR to a folder with a short path\n")


CLOSED = RuntimeError("Connection closed by peer [127.0.0.1]:4711")


@pytest.mark.parametrize(
    ("error", "ranks", "status"),
    [
        (CheckpointError("step-3 is damaged"), 2, None),
        (MemoryError("70 TB"), 1, None),
        (CLOSED, 1, os.EX_TEMPFAIL),  # torchrun ends this rank, because the other has failed
        (CLOSED, 2, os.EX_TEMPFAIL),  # the other has stopped first; the launcher waits for this one
        (Stopped(), 1, os.EX_TEMPFAIL),
        (Stopped(), 2, os.EX_TEMPFAIL),
    ],
)
def test_a_failure_before_training_counts_as_a_stop_only_if_a_stop_caused_it(
    monkeypatch, capsys, error, ranks, status
):
    """The launcher, asked to stop by a rank, would end with 75 whatever another one's status."""
    monkeypatch.setattr(trainer, "Trainer", mock.Mock(side_effect=error))
    monkeypatch.setenv(rank_main.LAUNCHER_ENV, "4711")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    stop = mock.Mock(requested=True)
    launcher = mock.Mock(**{"children.return_value": [None] * ranks})
    monkeypatch.setattr(rank_main.psutil, "Process", {4711: launcher}.get)
    asked = []
    monkeypatch.setattr(os, "kill", lambda *signaled: asked.append(signaled))
    if status is None:
        with pytest.raises(type(error)):
            rank_main._run(mock.Mock(), mock.Mock(), stop, 0)
    else:
        assert rank_main._run(mock.Mock(), mock.Mock(), stop, 0) == status
    stops = status is not None and ranks == 2
    assert asked == [(4711, signal.SIGTERM)] * stops
    assert ("Stopped before the first step, as asked" in capsys.readouterr().err) == stops


def test_a_rank_of_a_range_of_nodes_is_restarted(capsys, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_REPORTER", str(os.getppid()))
    rank_main._report_stop(0, "after step 24")
    assert capsys.readouterr().err == (
        "Stopped after step 24, to restart on the nodes that join or remain\n"
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_the_null_device(tmp_path, closed):
    """What is printed must not end in the file that is opened next, with the number of a stream."""
    file = tmp_path / "file"
    command = [sys.executable, "-c", WRITES, str(file)]
    done = subprocess.run(["bash", "-c", f'"$@" {closed}', "x", *command], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert file.read_text() == "mine"
    assert (b"a result" in done.stdout) == (" >&-" not in f" {closed}")
    assert (b"a warning" in done.stderr) == ("2>&-" not in closed)


@pytest.mark.e2e
@pytest.mark.parametrize("closed", [pytest.param(">&-", marks=pytest.mark.slow), ">&- 2>&-"])
def test_commands_run_with_closed_streams(tmp_path, closed):
    sizes = {"seq_len": 32, "local_batch_size": 2, "steps": 1}
    flags = [f"--training.{key}={value}" for key, value in sizes.items()]
    flags += ["--model.overrides.dim=32", "--model.overrides.n_layers=1", "--validation.no-enable"]
    flags += ["--checkpoint.no-enable", f"--job.dump_folder={tmp_path / 'run'}"]
    commands = [["config", "debug_model"], ["train", "debug_model", *flags], ["runs", tmp_path]]
    for command in commands:
        argv = [sys.executable, "-m", "torchtitan", *map(str, command)]
        done = subprocess.run(["bash", "-c", f'"$@" {closed}', "x", *argv], capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    assert '"end": "completed"' in (tmp_path / "run/run.json").read_text()


@pytest.mark.parametrize(
    ("variables", "starter"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "3"}, "srun"),
        ({"SLURM_STEP_NUM_TASKS": "2", "ENVIRONMENT": "BATCH"}, "srun"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "srun"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_PTY_PORT": "40001"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "4"}, "mpirun"),
        ({"PMI_SIZE": "2"}, "mpirun"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "mpirun"),
        ({"FLUX_JOB_SIZE": "2"}, "flux"),
        ({"JSM_NAMESPACE_SIZE": "2"}, "jsrun"),
        ({"PET_NNODES": "1:2"}, "an operator of pods"),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "4"}, "torchrun or .* pods"),
    ],
)
def test_several_tasks_are_refused(monkeypatch, variables, starter):
    """Ranks are refused by the launcher and by commands that run once."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    commands = [launcher.main, partial(_dispatch, ["tokenize"]), partial(_dispatch, ["init"])]
    mains = [rank_main.main, generate.main, eval_command.main]
    for main in [*commands, *([] if "RANK" in variables else mains)]:
        with pytest.raises(ConfigError, match=f"{starter} has started [1248:]+ tasks"):
            main(*([] if isinstance(main, partial) else [["--training.stpes=1"]]))


def test_a_pod_is_named_its_command(monkeypatch, capsys):
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "run-0", "MASTER_PORT": "23456"}
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--nnodes 2 --rdzv-endpoint run-0:23456`"):
        launcher.main(["--nproc-per-node=8"])
    assert (reporting_rank(), rank_and_world()) == (1, (1, 2))
    assert run_main(launcher.main, ["--nproc-per-node=8"], rank=1) == 2
    assert "--rdzv-endpoint run-0:23456`" in capsys.readouterr().err
    monkeypatch.setenv("RDZV_SECRET", "0" * 32)
    with pytest.raises(ConfigError, match="did you mean"):
        launcher.main(
            [
                "--nproc-per-node=8",
                "--nnodes=2",
                "--rdzv-endpoint=run-0:23456",
                "--training.stpes=1",
            ]
        )


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8"},  # a shell of salloc, or a notebook
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # a job's script
        {
            "SLURM_STEP_NUM_TASKS": "8",
            "SLURM_NTASKS": "8",
            "SLURM_PROCID": "0",
            "SLURM_PTY_PORT": "40001",
            "PMI_SIZE": "8",
        },  # srun --ntasks-per-node=8 --pty bash
        {"OMPI_COMM_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_a_single_task_is_not_refused(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for main in (launcher.main, rank_main.main):
        with pytest.raises(ConfigError, match="did you mean"):
            main(["--training.stpes=1"])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
    ],
)
def test_a_rank_has_segments_that_grow_unless_the_user_decides(monkeypatch, variables, expected):
    """However it was started: the setting is made before anything else, so before torch loads."""
    monkeypatch.setattr(rank_main, "rank_and_world", mock.Mock(side_effect=Stopped))
    with mock.patch.dict(os.environ):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            os.environ.pop(name, None)
        os.environ.update(variables)
        with pytest.raises(Stopped):
            rank_main.main([])
        assert os.environ["PYTORCH_ALLOC_CONF"] == expected
