"""Ranks go and come; the data and the loss curve are those of the run that nothing happened to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.runs import arguments, free_ports, losses, train
from tests.slow_run import SlowRun
from torchtitan.checkpoint.commit import committed_steps

ROOT = Path(__file__).parents[2]
SECRET = {"RDZV_SECRET": "known to both launchers"}
ELASTIC = ["--fault_tolerance.elastic", "--checkpoint.enable", "--lr_scheduler.total_steps=1000"]


@pytest.mark.parametrize("batch", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_any_number_of_ranks_continues_the_same_run(ranks, tmp_path, batch):
    """3 ranks divide neither batch, 2 ranks one of them: some get rows without labels. HSDP is
    given up on the way.
    """
    argv = arguments(
        tmp_path, *ELASTIC, "--parallelism.data_parallel_replicate_degree=2", global_batch=batch
    )
    whole = ranks(
        1, train, [*argv, "--training.steps=8", f"--job.dump_folder={tmp_path / 'whole'}"]
    )[0]
    for world, steps in ((4, 2), (3, 4), (1, 6), (2, 8)):
        run = ranks(world, train, [*argv, f"--training.steps={steps}"])[0]
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert [r["tokens"] for r in run["metrics"]] == [r["tokens"] for r in whole["metrics"]]


@pytest.mark.slow
def test_padding_under_a_pipeline_and_workers(ranks, tmp_path):
    """A pipeline has microbatches of one size; and a rank's rows are shared among its worker
    processes.
    """
    argv = arguments(tmp_path, *ELASTIC, "--training.dataloader.num_workers=2", global_batch=3)
    whole = ranks(1, train, [*argv, f"--job.dump_folder={tmp_path / 'whole'}"])[0]
    run = ranks(
        4,
        train,
        [*argv, "--parallelism.pipeline_parallel_degree=2", f"--job.dump_folder={tmp_path / 'pp'}"],
    )
    assert losses(run[0]) == pytest.approx(losses(whole), rel=1e-5)


# ---- real processes


def start(log, module, argv, folder):
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"} | SECRET
    return subprocess.Popen(
        [sys.executable, "-m", *module, *argv], env=env, stdout=log, stderr=subprocess.STDOUT
    )


class Run(SlowRun):
    """A slow run of launchers on this machine."""

    def __init__(self, folder):
        super().__init__(
            folder, "--fault_tolerance.elastic", "--checkpoint.interval=4", global_batch=3
        )
        self.output = (folder / "log").open("w+")
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def start(self, *module):
        self.processes.append(start(self.output, module, self.argv, self.folder))
        return self.processes[-1]


def rank_processes(launcher):
    return [p for p in psutil.Process(launcher.pid).children() if "torchtitan.train" in p.cmdline()]


LAUNCHERS = {
    "own": ["torchtitan", "train", "--nproc-per-node=2", "--max-restarts=1", "--"],
    "torchrun": [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "-m",
        "torchtitan.train",
    ],
}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_a_killed_rank_is_started_anew_from_the_last_checkpoint(ranks, tmp_path, launcher):
    with Run(tmp_path) as run:
        process = run.start(*LAUNCHERS[launcher])
        run.wait_for_ranks(2, starts=1, steps=6)
        rank_processes(process)[1].kill()
        run.wait_for_ranks(2, starts=2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == (os.EX_TEMPFAIL if launcher == "own" else 1)
        assert run.starts()[1]["resumed_step"] >= 4
        run.check(ranks)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_node_is_killed_comes_back_and_leaves(ranks, tmp_path):
    """Two launchers stand for two nodes, the first of which holds the rendezvous. Two ranks don't
    divide the batch.
    """
    (port,) = free_ports(1)
    node = [
        "torchtitan",
        "train",
        "--nnodes=1:2",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1",
        "--",
    ]
    with Run(tmp_path) as run:
        first = run.start(*node)
        run.wait_for_ranks(1, starts=1)
        second = run.start(*node)
        run.wait_for_ranks(2, starts=2)
        (orphan,) = rank_processes(second)
        second.kill()
        run.wait_for_ranks(1, starts=3)
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        second = run.start(*node)
        run.wait_for_ranks(2, starts=4)
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=100) == os.EX_TEMPFAIL
        run.wait_for_ranks(1, starts=5)
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=100) == os.EX_TEMPFAIL
        log = run.log()
        assert not any(text in log for text in ("frame #", "C++", "Traceback")), log
        starts = run.starts()
        assert [s["ranks"] for s in starts] == [1, 2, 1, 2, 1]
        assert [s["end"] for s in starts[::2]] == ["preempted"] * 3
        for before, after in ((0, 1), (2, 3), (3, 4)):
            assert starts[after]["resumed_step"] == starts[before]["step"], "nothing was done twice"
        run.check(ranks)
        assert committed_steps(run.dump / "checkpoint")[-1] == starts[-1]["step"]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_node_that_holds_the_rendezvous_is_killed_twice(ranks, tmp_path):
    """The second launcher takes over; the first comes back, joins it there, and takes over from it
    in turn.
    """
    endpoints = ",".join(f"127.0.0.{2 + node}:{port}" for node, port in enumerate(free_ports(3)))
    node = ["torchtitan", "train", "--nnodes=1:2", f"--rdzv-endpoint={endpoints}"]
    with Run(tmp_path) as run:
        first = run.start(*node, "--local-addr=127.0.0.2", "--")
        run.wait_for_ranks(1, starts=1)
        second = run.start(*node, "--local-addr=127.0.0.3", "--")
        run.wait_for_ranks(2, starts=2, steps=5)
        first.kill()
        run.wait_for_ranks(1, starts=3)
        first = run.start(*node, "--local-addr=127.0.0.2", "--")
        run.wait_for_ranks(2, starts=4, steps=5)
        second.kill()
        run.wait_for_ranks(1, starts=5)
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=100) == os.EX_TEMPFAIL
        log = run.log()
        assert (
            log.count("The rendezvous at 127.0.0.2:")
            == log.count("The rendezvous at 127.0.0.3:")
            == 1
        )
        assert "Traceback" not in log, log
        assert [s["ranks"] for s in run.starts()] == [1, 2, 1, 2, 1]
        run.check(ranks)


@pytest.mark.parametrize(
    ("nodes", "extra", "text"),
    [
        (
            "1:2",
            ["--training.global_batch_size=4"],
            "1:2 nodes need fault_tolerance.elastic = true",
        ),
        (
            "1:4",
            [*ELASTIC, "--parallelism.pipeline_parallel_degree=2"],
            "with 1 of 4 nodes: parallelism.pipeline_par",
        ),
        ("3:1", [], "'3:1' is neither a number of nodes nor MIN:MAX"),
        ("x", [], "'x' is neither a number of nodes nor MIN:MAX"),
    ],
)
def test_node_counts_that_cannot_work_are_refused(tmp_path, nodes, extra, text):
    argv = [
        f"--nnodes={nodes}",
        "--rdzv-endpoint=localhost:1",
        "--",
        *arguments(tmp_path, *extra, global_batch=6),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan", "train", *argv],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | SECRET,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
