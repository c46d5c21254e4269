"""A real Slurm on this machine: a head and two nodes, each with addresses and processes of its own.

Every machine of the cluster is a container of Linux namespaces. The kernel ends all its processes,
and removes its network, with its first process, and that with the tests; so to kill a node's first
process is to switch it off. Files are shared, and so are the cluster's own /run, /etc/slurm and
/etc/hosts, which nothing outside sees. Debian's packages (`PACKAGES`) have to be installed.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PACKAGES = "slurm-wlm slurmdbd munge mariadb-server iproute2 util-linux"
_PROGRAMS = (
    "slurmctld slurmd slurmdbd munged mariadbd mariadb-install-db ip unshare nsenter setpriv"
)
_NAMESPACES = ["--mount", "--net", "--pid", "--uts"]
_HEAD = "10.0.0.1"
_NODES = ["10.0.0.10", "10.0.0.11"]

CREDENTIAL_SECONDS = 10
"""A job that was requeued waits as long (120 by default)."""
SILENT_SECONDS = 10
"""A node that doesn't answer for so long is DOWN (300 by default)."""

# The prolog fails on a node with a file `broken-NODE` in the cluster's folder.
_FILES = {
    "etc/slurm.conf": f"""\
ClusterName=test
SlurmctldHost=head({_HEAD})
SlurmUser=root
AuthInfo=cred_expire={CREDENTIAL_SECONDS}
StateSaveLocation={{folder}}/state
SlurmdSpoolDir={{folder}}/spool-%n
SlurmctldLogFile={{folder}}/slurmctld.log
SlurmdLogFile={{folder}}/slurmd-%n.log
SlurmdTimeout={SILENT_SECONDS}
SlurmdParameters=config_overrides
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
Prolog={{folder}}/prolog
PrologFlags=Alloc
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=head
JobAcctGatherType=jobacct_gather/none
NodeName=n0 NodeAddr={_NODES[0]} CPUs=2 RealMemory=2000 Gres=gpu:1
NodeName=n1 NodeAddr={_NODES[1]} CPUs=2 RealMemory=2000 Gres=gpu:1
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
""",
    "etc/slurmdbd.conf": """\
DbdHost=head
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
LogFile={folder}/slurmdbd.log
""",
    "etc/gres.conf": "Name=gpu File=/dev/null\n",
    "hosts": f"""\
127.0.0.1 localhost
{_HEAD} head
{_NODES[0]} n0
{_NODES[1]} n1
""",
    "prolog": '#!/bin/sh\n[ ! -e "{folder}/broken-$SLURMD_NODENAME" ]\n',
}

_START_HEAD = f"""
set -euo pipefail
mount -t tmpfs tmpfs /run
mkdir /run/munge /run/mysqld
mount --bind etc /etc/slurm
mount --bind hosts /etc/hosts
hostname head
ip link set lo up
ip link add switch type bridge
ip address add {_HEAD}/24 dev switch
ip link set switch up
munged --force --key-file="$PWD/munge.key" --seed-file="$PWD/seed" --log-file="$PWD/munged.log"
database=(--no-defaults --user=root --datadir="$PWD/database")
mariadb-install-db "${{database[@]}}" --auth-root-authentication-method=normal --skip-test-db
mariadbd "${{database[@]}}" --socket=/run/mysqld/mysqld.sock --skip-networking &
until [[ -S /run/mysqld/mysqld.sock ]]; do sleep 0.1; done
slurmdbd
until sacctmgr list cluster >/dev/null; do sleep 0.2; done
slurmctld
touch ready
while true; do sleep 1; done
"""
_START_NODE = """
set -euo pipefail
hostname "$1"
until ip link show eth0 &>/dev/null; do sleep 0.05; done
ip link set lo up
ip address add "$2/24" dev eth0
ip link set eth0 up
slurmd
while true; do sleep 1; done
"""

_TRY = """
set -e
mount -t tmpfs tmpfs /run
ip link add switch type bridge
ip link add port0 master switch type veth peer name eth0
"""


def what_is_missing() -> str | None:
    """Why no cluster can be started here."""
    lacking = [name for name in _PROGRAMS.split() if not shutil.which(name)]
    if lacking:
        install = f"apt-get install -y --no-install-recommends {PACKAGES}"
        return f"no Slurm: {', '.join(lacking)} not found; on Debian: {install}"
    command = ["unshare", *_NAMESPACES, "--fork", "bash", "-c", _TRY]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"no namespaces for a cluster: {done.stderr.strip()}" if done.returncode else None


class Cluster:
    """Two nodes of one fake GPU, accounting, and two partitions: `urgent` preempts `usual`."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("etc", "state"):
            (folder / name).mkdir()
        for name, text in _FILES.items():
            (folder / name).write_text(text.format(folder=folder))
        (folder / "etc/slurmdbd.conf").chmod(0o600)
        (folder / "prolog").chmod(0o755)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        self._log = (folder / "log").open("a")
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start("head", [], _START_HEAD)
            self.wait("the head", (folder / "ready").exists)
            for node in range(len(_NODES)):
                self.switch_on(node)
            self.wait("the nodes", lambda: self.node_states() == ["idle", "idle"])
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Switch everything off."""
        for process in self._machines.values():
            process.kill()
            process.wait()
        self._log.close()

    def switch_on(self, node: int) -> None:
        name = f"n{node}"
        first = self._start(name, self._in_head("--mount"), _START_NODE, name, _NODES[node])
        port = ["ip", "link", "add", f"port{node}", "master", "switch", "up", "type", "veth"]
        cable = [*port, "peer", "name", "eth0", "netns", str(first)]
        subprocess.run([*self._in_head("--net"), *cable], check=True)

    def switch_off(self, node: int) -> None:
        """As a loss of power: its processes and its address are gone at once."""
        process = self._machines.pop(f"n{node}")
        process.kill()
        process.wait()

    def node_states(self) -> list[str]:
        """Of both nodes, as `sinfo` abbreviates them: `idle`, `alloc`, `drain`, `down*`."""
        return self.ask("sinfo", "--noheader", "-N", "--partition=usual", "-o", "%t").split()

    def ask(self, *command: str, folder: Path | None = None) -> str:
        """What a command prints on the head.

        Raises:
            AssertionError: it fails.
        """
        done = self.run(*command, folder=folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def run(
        self, *command: str, folder: Path | None = None, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the head, as a user who has logged in there does."""
        return subprocess.run(
            [*self._in_head(*_NAMESPACES), f"--wd={folder or self.folder}", *command],
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "TORCHTITAN_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
            | env,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def wait(self, what: str, condition: Callable[[], object], timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            head = self._machines["head"].poll()
            assert head is None, f"the head ended with {head}\n{self.logs()}"
            assert time.monotonic() < deadline, f"{what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The ends of what the daemons have written."""
        files = [self.folder / "log", *self.folder.glob("*.log")]
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def _start(self, name: str, prefix: list[str], script: str, *arguments: str) -> int:
        """Start a machine with a script for its first process, whose process id is returned."""
        unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        with_tests = ["setpriv", "--pdeathsig=KILL"]  # no machine outlives the tests
        process = subprocess.Popen(
            [*with_tests, *prefix, *unshare, "bash", "-c", script, name, *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._machines[name] = process
        parent = psutil.Process(process.pid)
        while not (children := parent.children()):
            assert process.poll() is None, self.logs()
            time.sleep(0.02)
        return children[0].pid

    def _in_head(self, *namespaces: str) -> list[str]:
        (first,) = psutil.Process(self._machines["head"].pid).children()
        return ["nsenter", f"--target={first.pid}", *namespaces]
