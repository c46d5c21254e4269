"""Jobs on a real Slurm of two nodes, through everything that ends, moves or shrinks them.

The losses of a job are those of a run of one process that nothing happened to.
"""

import re
import sys
from itertools import pairwise

import psutil
import pytest

from tests.faults.slurm_cluster import ROOT, Cluster, what_is_missing
from tests.slow_run import SlowRun
from torchtitan.checkpoint.commit import committed_steps

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1200)]
TORCHTITAN = [sys.executable, "-m", "torchtitan"]
BUSY = 400
"""Seconds in which a job has started, on a machine that does much else."""
ELASTIC = ["--fault_tolerance.elastic", "--checkpoint.interval=5"]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    if missing := what_is_missing():
        pytest.skip(missing)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(machines):
    """Without jobs, and with both nodes."""
    yield machines
    machines.ask("scancel", "--user=root")
    machines.wait("idle nodes", lambda: machines.node_states() == ["idle", "idle"])


class Job(SlowRun):
    """A slow run that was submitted to a cluster."""

    def __init__(self, cluster, folder, *flags, options=(), nodes="2", **more):
        super().__init__(folder, "--validation.enable=false", *flags, **more)
        self.cluster = cluster
        submit = ["submit", "debug_model", "--gpus-per-node=1", f"--nodes={nodes}", *options]
        self.number = submitted(cluster, folder, *submit, "--submit", "--", *self.argv)

    def about(self, key):
        """What `scontrol` says of the job."""
        text = self.cluster.ask("scontrol", "show", "job", self.number)
        return re.search(rf"\b{key}=(.+?)(?:\s+\S+=|$)", text, re.M)[1]

    def wait_for_state(self, state):
        self.wait(state, lambda: self.about("JobState") == state, BUSY)

    def wait_for_steps(self, starts=1, steps=3, world=2):
        self.wait_for_ranks(world, starts, steps, BUSY)

    def cancel(self):
        """The ranks save; the job doesn't come back."""
        self.cluster.ask("scancel", self.number)
        self.wait_for_state("CANCELLED")

    def check_continued(self, ranks):
        """It was stopped and came back, nothing was lost or done twice, and no loss differs."""
        self.cancel()
        starts = self.starts()
        assert {start["end"] for start in starts} == {"preempted"}
        for before, after in pairwise(starts):
            assert after["resumed_step"] == before["step"]
        assert starts[-1]["resumed_step"] > 0
        assert committed_steps(self.dump / "checkpoint")[-1] == starts[-1]["step"]
        assert "Traceback" not in self.log()
        assert "frame #" not in self.log()
        self.check(ranks)


def submitted(cluster, folder, *command):
    """The number of the job that a command submits."""
    done = cluster.run(*TORCHTITAN, *command, folder=folder, PYTHONPATH=f"{ROOT}:{folder}")
    assert done.returncode == 0, done.stderr
    return re.search(r"Submitted batch job (\d+)", done.stdout)[1]


def accounted(cluster, number, state):
    """State, exit code and nodes of a job's tasks, once the accounting has a state."""
    rows = []
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={number}"]

    def has_state():
        answer = cluster.ask(*command, "--format=JobID,State,ExitCode,NodeList")
        rows[:] = sorted(line.split("|") for line in answer.splitlines())
        return any(row[1].startswith(state) for row in rows)

    cluster.wait(f"{state} in sacct", has_state)
    return rows


# ---- jobs that end


def test_two_nodes_train_as_one_process(cluster, ranks, tmp_path):
    job = Job(cluster, tmp_path, steps=6, seconds=0)
    job.wait_for_state("COMPLETED")
    job.check(ranks)
    (start,) = job.starts()
    assert start["hosts"] == {"n0": 1, "n1": 1}
    runs = cluster.ask(*TORCHTITAN, "runs", str(job.dump))
    assert re.search(r"^out +completed +6/6 ", runs, re.M)


def test_runs_train_as_an_array(cluster, tmp_path):
    """One of the runs fails."""
    run = SlowRun(tmp_path, steps=4, seconds=0)
    module = tmp_path / "slow_steps.py"
    slow = module.read_text()
    broken = slow.replace("time.sleep(0)", "1 / 0").replace('"slow"', '"broken"')
    module.write_text(slow + broken)
    (tmp_path / "runs.txt").write_text("--training.callbacks=slow\n--training.callbacks=broken\n")
    submit = ["submit", "debug_model", "--gpus-per-node=1", "--nodes=1", "--runs=runs.txt"]
    flags = ["--validation.enable=false", *run.argv]
    number = submitted(cluster, tmp_path, *submit, "--submit", "--", *flags)
    run.wait("the end", lambda: not cluster.ask("squeue", "--noheader"), BUSY)
    first, second = accounted(cluster, number, "FAILED")
    assert first[:3] == [f"{number}_0", "COMPLETED", "0:0"]
    assert second[:3] == [f"{number}_1", "FAILED", "1:0"]
    assert {first[3], second[3]} == {"n0", "n1"}
    logs = [(run.dump / f"debug_model-{number}_{task}.log").read_text() for task in (0, 1)]
    assert "Done: step 4" in logs[0]
    assert "ZeroDivisionError" in logs[1]
    runs = cluster.ask(*TORCHTITAN, "runs", str(run.dump))
    assert re.search("^0 +completed +4/4 ", runs, re.M)


def test_a_cancelled_job_saves_and_does_not_come_back(cluster, tmp_path):
    job = Job(cluster, tmp_path)
    job.wait_for_steps()
    job.cancel()
    (start,) = job.starts()
    assert start["end"] == "preempted"
    assert committed_steps(job.dump / "checkpoint") == [start["step"]]
    assert job.about("Restarts") == "0"
    assert "Requeueing" not in job.log()


# ---- jobs that come back


def test_before_the_time_limit_the_job_is_requeued(cluster, ranks, tmp_path):
    job = Job(cluster, tmp_path, options=["--time=2", "--sbatch=--signal=B:USR1@45"])
    job.wait("a resume", lambda: any(start["resumed_step"] for start in job.starts()), BUSY)
    assert f"Saved. Requeueing job {job.number}" in job.log()
    assert job.about("Restarts") != "0"
    job.check_continued(ranks)


def test_a_partition_of_higher_priority_preempts_the_job(cluster, ranks, tmp_path):
    job = Job(cluster, tmp_path)
    job.wait_for_steps()
    urgent = ["--partition=urgent", "--nodes=2", "--gpus-per-node=1", "--wrap=sleep 5"]
    number = cluster.ask("sbatch", "--parsable", *urgent, folder=tmp_path)
    job.wait_for_steps(starts=2)
    accounted(cluster, number, "COMPLETED")
    assert job.about("Restarts") == "1"
    job.check_continued(ranks)


def test_requeued_by_hand(cluster, ranks, tmp_path):
    job = Job(cluster, tmp_path)
    job.wait_for_steps()
    cluster.ask("scontrol", "requeue", job.number)
    job.wait_for_steps(starts=2)
    assert job.about("Restarts") == "1"
    job.check_continued(ranks)


def test_a_failed_prolog_holds_the_job(cluster, ranks, tmp_path):
    (cluster.folder / "broken-n1").touch()
    job = Job(cluster, tmp_path)
    job.wait("a drained node", lambda: any("drain" in state for state in cluster.node_states()))
    reason = ["squeue", "--noheader", "--format=%r", f"--jobs={job.number}"]
    job.wait("held", lambda: cluster.ask(*reason).strip() == "launch failed requeued held")
    assert "n1" in cluster.ask("sinfo", "-R")
    (cluster.folder / "broken-n1").unlink()
    cluster.ask("scontrol", "update", "NodeName=n1", "State=RESUME")
    cluster.ask("scontrol", "release", job.number)
    job.wait_for_steps()
    job.cancel()
    job.check(ranks)


# ---- jobs that lose a node


def test_a_node_fails_and_slurm_requeues_the_job(cluster, ranks, tmp_path):
    job = Job(cluster, tmp_path, "--checkpoint.interval=5")
    job.wait_for_steps(steps=12)
    cluster.switch_off(1)
    job.wait("requeue", lambda: job.about("Restarts") == "1", BUSY)
    cluster.switch_on(1)
    job.wait_for_steps(2)
    job.cancel()
    first, second = job.starts()
    assert first["step"] - 7 <= second["resumed_step"] <= first["step"]
    job.check(ranks)


def test_a_node_fails_and_the_job_gets_it_back_when_it_is_requeued(cluster, ranks, tmp_path):
    job = Job(cluster, tmp_path, *ELASTIC, nodes="1:2")
    job.wait_for_steps(steps=12)
    cluster.switch_off(1)
    job.wait_for_steps(2, world=1)
    cluster.wait("n1 is down", lambda: job.about("NodeList") == "n0")
    cluster.switch_on(1)
    cluster.wait("n1 is back", lambda: "idle" in cluster.node_states())
    cluster.ask("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_for_steps(3)
    job.cancel()
    first, second, third = job.starts()
    assert first["step"] - 7 <= second["resumed_step"] <= first["step"]
    assert third["resumed_step"] == second["step"]
    assert [start["ranks"] for start in (first, second, third)] == [2, 1, 2]
    job.check(ranks)


def test_the_first_node_fails_and_another_one_requeues_the_job(cluster, ranks, tmp_path):
    """It runs the job's script, which nobody else can do."""
    job = Job(cluster, tmp_path, *ELASTIC, nodes="1:2")
    job.wait_for_steps(steps=12)
    cluster.switch_off(0)
    cluster.wait("n0 is down", lambda: job.about("NodeList") == "n1")
    cluster.switch_on(0)
    job.wait("requeue", lambda: job.about("Restarts") == "1", BUSY)
    job.wait("two ranks", lambda: job.starts()[-1]["ranks"] == 2 and len(job.starts()) > 1, BUSY)
    job.wait_for_steps(len(job.starts()))
    job.cancel()
    job.check(ranks)


def test_a_job_without_its_first_launcher_is_still_requeued(cluster, ranks, tmp_path):
    """The other launcher takes over the rendezvous; the killed one hides that it saves, later."""
    job = Job(cluster, tmp_path, *ELASTIC, nodes="1:2")
    job.wait_for_steps(steps=12)
    launcher_of(job.number, "n0").kill()
    job.wait_for_steps(2, world=1)
    assert "The rendezvous at n0:" in job.log()
    cluster.ask("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_for_steps(3)
    job.cancel()
    _, second, third = job.starts()
    assert third["resumed_step"] == second["step"]
    job.check(ranks)


def launcher_of(number, node):
    """The launcher of a job's node."""
    for process in psutil.process_iter():
        try:
            words, env = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        mine = env.get("SLURM_JOB_ID") == number and env.get("SLURMD_NODENAME") == node
        if mine and "torchtitan" in words and "train" in words:
            return process
    raise AssertionError(f"no launcher on {node}")
