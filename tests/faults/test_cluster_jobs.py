"""The commands of `examples/kubernetes` and `examples/sky`, run in two processes with what their
pods or machines would give them.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster_files import KUBERNETES, SKY, container_of, read
from tests.runs import arguments, free_ports, losses, read_metrics, train
from torchtitan.checkpoint.commit import committed_steps

ROOT = Path(__file__).parents[2]
STEPS = 150
HOSTS = "\n127.0.0.2 my-run-node-0-0.my-run\n127.0.0.3 my-run-node-0-1.my-run\n"
IN_NAMESPACE = ["unshare", "--mount", "sh", "-c"]
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]


def private_hosts() -> bool:
    """Whether a process can have an `/etc/hosts` of its own."""
    try:
        mount = "mount --bind /etc/hosts /etc/hosts"
        return subprocess.run([*IN_NAMESPACE, mount], capture_output=True).returncode == 0
    except OSError:
        return False


class Nodes:
    """Two nodes of a job on this machine."""

    def __init__(self, folder):
        self.folder = folder
        self.log = (folder / "log").open("w+")
        self.running = []
        (self.port,) = free_ports(1)
        self.flags = arguments(
            folder, "--checkpoint.enable", "--checkpoint.interval=50", steps=STEPS, global_batch=4
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
            process.wait()

    def start(self, node):
        """Start a node's process."""
        raise NotImplementedError

    def _popen(self, command, **env):
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
        env["RDZV_SECRET"] = "0123456789abcdef"
        process = subprocess.Popen(
            command, env=env, cwd=self.folder, stdout=self.log, stderr=subprocess.STDOUT
        )
        self.running.append(process)
        return process

    def steps(self):
        dump = self.folder / "out"
        metrics = read_metrics(dump) if (dump / "metrics.jsonl").exists() else []
        return [record["step"] for record in metrics if "loss" in record]

    def wait_for_step(self, step, *processes):
        deadline = time.monotonic() + 200
        while max(self.steps(), default=0) < step:
            text = (self.folder / "log").read_text()[-4000:]
            assert time.monotonic() < deadline, text
            assert all(process.poll() is None for process in processes), text
            time.sleep(0.1)

    def statuses(self, *processes):
        return [process.wait(timeout=200) for process in processes]


class Pods(Nodes):
    """Pods of a JobSet, each with its index, in a network with their names."""

    def __init__(self, folder, *edits, flags=()):
        super().__init__(folder)
        self.container = container_of(read(KUBERNETES, *edits))
        self.flags += flags
        launcher = folder / "bin/torchtitan"
        launcher.parent.mkdir()
        launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m torchtitan "$@"\n')
        launcher.chmod(0o755)
        (folder / "config.toml").touch()
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + HOSTS)

    def start(self, node):
        words = [
            word.replace("$(JOB_COMPLETION_INDEX)", str(node))
            .replace("/etc/torchtitan/config.toml", str(self.folder / "config.toml"))
            .replace(":29500", f":{self.port}")
            .replace("--nproc-per-node=8", "--nproc-per-node=1")
            for word in self.container["command"]
        ]
        hosts = 'mount --bind hosts /etc/hosts && exec "$@"'
        return self._popen([*IN_NAMESPACE, hosts, "sh", *words, "--", *self.flags])


class Machines(Nodes):
    """Machines of a SkyPilot job."""

    def __init__(self, folder):
        super().__init__(folder)
        self.task = read(SKY)
        setup = folder / "scripts/setup.sh"
        setup.parent.mkdir()
        setup.write_text(f"#!/bin/sh\necho {sys.executable}\n")
        setup.chmod(0o755)
        (folder / "my.toml").touch()

    def start(self, node):
        home = self.folder / f"home{node}"
        home.mkdir(exist_ok=True)
        script = home / "script"
        script.write_text(
            self.task["run"]
            .replace(":29500", f":{self.port}")
            .replace("--nproc-per-node=8", "--nproc-per-node=1")
            .replace("--checkpoint.folder=s3://my-bucket/my-run", shlex.join(self.flags))
        )
        env = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "HOME": str(home)}
        return self._popen(["bash", "-i", str(script)], **env)

    def preempt(self, node):
        """Run the job's hook on a machine."""
        (hook,) = self.task["config"]["hooks"]
        env = os.environ | {"HOME": str(self.folder / f"home{node}")}
        subprocess.run(["bash", "-c", hook["run"]], env=env, timeout=200, check=True)


def check_losses(nodes, ranks):
    """The whole curve is that of one process, with no step done twice."""
    assert nodes.steps() == list(range(1, STEPS + 1))
    found = losses({"metrics": read_metrics(nodes.folder / "out")})
    whole = ranks(1, train, [*nodes.flags, f"--job.dump_folder={nodes.folder / 'whole'}"])[0]
    assert found == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.skipif(not private_hosts(), reason="needs root, for an /etc/hosts of its own")
def test_pods_save_when_one_is_evicted_and_resume_when_all_start_again(ranks, tmp_path):
    with Pods(tmp_path) as pods:
        first, second = pods.start(0), pods.start(1)
        pods.wait_for_step(5, first, second)
        second.terminate()
        assert pods.statuses(first, second) == [75, 75]
        saved = max(pods.steps())
        assert saved < STEPS
        assert committed_steps(tmp_path / "out/checkpoint")[-1] == saved
        late = pods.start(1)
        time.sleep(5)
        assert pods.statuses(pods.start(0), late) == [0, 0]
        check_losses(pods, ranks)


@pytest.mark.skipif(not private_hosts(), reason="needs root, for an /etc/hosts of its own")
def test_pods_train_on_while_one_is_replaced(ranks, tmp_path):
    with Pods(tmp_path, "elastic", flags=["--fault_tolerance.elastic"]) as pods:
        first, second = pods.start(0), pods.start(1)
        pods.wait_for_step(5, first, second)
        second.terminate()
        assert pods.statuses(second) == [75]
        pods.wait_for_step(max(pods.steps()) + 5, first)
        assert 0 in pods.statuses(pods.start(1), first)
        check_losses(pods, ranks)


def test_machines_save_when_one_is_preempted_and_resume(ranks, tmp_path):
    with Machines(tmp_path) as machines:
        first, second = machines.start(0), machines.start(1)
        machines.wait_for_step(5, first, second)
        machines.preempt(1)
        assert machines.statuses(first, second) == [75, 75]
        assert max(machines.steps()) < STEPS
        assert machines.statuses(machines.start(0), machines.start(1)) == [0, 0]
        check_losses(machines, ranks)
