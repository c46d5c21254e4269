"""From the outside: the real launcher, torchrun and scripts, as a user meets them."""

import base64
import contextlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.processes import run_module
from tests.runs import arguments, read_metrics
from torchtitan.models import get_spec

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.e2e


def environment(env):
    return (
        os.environ
        | {"PYTHONPATH": str(ROOT), "TORCHTITAN_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        | env
    )


def start(*command, cwd=ROOT, **env):
    command = [str(c) for c in command]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment(env), timeout=240
    )


def addresses_that_listen(launcher):
    """Of `launcher` and the processes below it, until it ends."""
    found = set()
    while launcher.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            for process in [launcher, *launcher.children(recursive=True)]:
                sockets = process.net_connections("inet")
                found |= {
                    socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN
                }
        time.sleep(0.5)
    return found


@pytest.mark.proof
def test_run_train_in_another_folder_on_two_ranks(tmp_path):
    """The demo configuration on gloo ranks, then the same command again, which has nothing left to
    do.

    On one node all that listens, the ranks' store and gloo, does so on the loopback interface.
    """
    command = [
        ROOT / "run_train.sh",
        "--training.steps=6",
        "--training.seq_len=32",
        "--training.local_batch_size=2",
        "--training.global_batch_size=4",
        "--metrics.log_freq=2",
        "--validation.steps=1",
        "--validation.seq_len=32",
    ]
    with (tmp_path / "stdout").open("w") as out, (tmp_path / "stderr").open("w") as err:
        env = environment({"NGPU": "2"})
        launcher = psutil.Popen(
            list(map(str, command)), cwd=tmp_path, env=env, stdout=out, stderr=err
        )
        addresses = addresses_that_listen(launcher)
    assert launcher.returncode == 0, (tmp_path / "stderr").read_text()
    assert addresses == {"127.0.0.1"}
    stdout = (tmp_path / "stdout").read_text()
    dump = tmp_path / "outputs/debug_model"
    steps = [r["step"] for r in read_metrics(dump) if "loss" in r]
    assert steps == [1, 2, 4, 6]
    assert "Done: step 6" in stdout
    assert re.search(r"step 4/6 .*  ETA \S+ s \(\d\d:\d\d:\d\d\)\n", stdout)
    for rank in range(2):
        assert "INFO step 6/6 " in (dump / f"logs/rank_{rank}.log").read_text(), (
            "each rank has its file"
        )
    assert "outputs/debug_model/checkpoint/step-6" in stdout
    assert "--training.steps 12" in stdout
    assert json.loads((dump / "checkpoint/step-6/manifest.json").read_text())["step"] == 6
    again = start(*command, cwd=tmp_path, NGPU="1")
    assert again.returncode == 0, again.stderr
    assert "Nothing to do" in again.stdout


def test_torchrun_names_our_error_as_the_root_cause(tmp_path):
    """Our error is printed once, then torchrun's report names it; the status is torchrun's.

    Also if the other rank finds the error first: torchrun ends all ranks when one has ended.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    late = "--experimental.custom_import=tests.faults.late_rank_0"
    done = start(*torchrun, "-m", "torchtitan.train", "--model.flavor=3X", late, cwd=tmp_path)
    sizes = ", ".join(get_spec("llama3").flavors)
    error = f"error: model.flavor: llama3 has no flavor '3X' (it has {sizes})"
    assert done.returncode == 1
    assert f"traceback : {error}" in done.stderr.split("Root Cause")[1]
    assert done.stderr.splitlines().count(error) == 1


@pytest.mark.slow
def test_options_for_torchrun_reach_it_as_they_are(tmp_path):
    """A folder with a space and an equals sign; also with one rank, which needs no torchrun
    otherwise.
    """
    done = start(
        sys.executable,
        "-m",
        "torchtitan",
        "train",
        "--log-dir",
        tmp_path / "a b=c",
        "--redirects=3",
        "--nproc-per-node=1",
        "--",
        *arguments(tmp_path, steps=1),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (log,) = (tmp_path / "a b=c").glob("*/attempt_0/0/stdout.log")
    assert "Done: step 1" in log.read_text()


class Attack:
    """Unpickled, it leaves a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def join(port, *options):
    node = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", *options]
    return start(
        sys.executable,
        "-m",
        "torchtitan",
        "train",
        "debug_model",
        *node,
        RDZV_SECRET="0123456789abcdef",
    )


def test_a_state_written_without_the_secret_is_not_unpickled(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    state = base64.b64encode(pickle.dumps(Attack(tmp_path / "attacked"))).decode()
    store.set("torch.rendezvous.none", state)
    done = join(store.port, "--rdzv-conf=is_host=0")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: --rdzv-endpoint=127.0.0.1:{store.port}: its state is not signed with the RDZV_SECR"
    )
    assert not (tmp_path / "attacked").exists()
    assert store.get("torch.rendezvous.none").decode() == state


def test_a_first_node_that_is_not_there_is_one_message():
    """Without the C++ stacks that torch prints."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        done = join(port, "--rdzv-conf=is_host=0,read_timeout=1,join_timeout=1")
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: --rdzv-endpoint=127.0.0.1:{port}: can't reach the first node, or it has gone\n"
    )


def test_help_explains_the_environment_and_lists_the_flags(tmp_path):
    done = start(ROOT / "run_train.sh", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in (
        "CONFIG_FILE",
        "NGPU",
        "NNODES",
        "RDZV_ENDPOINT",
        "RDZV_SECRET",
        "MAX_RESTARTS",
        "NUMA_BINDING",
        "LOG_RANK",
    ):
        assert f"\n  {name} " in done.stdout
    assert "--training.steps" in done.stdout


@pytest.mark.parametrize("env", [{"NGPU": "1"}, {"NGPU": "2", "CONFIG_FILE": "llama3_8b"}])
def test_a_configuration_error_is_one_clear_message(tmp_path, env):
    bad = ["--training.stpes=3", "--optimizer.lr=fast"]
    done = start(ROOT / "run_train.sh", *bad, cwd=tmp_path, **env)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: 2 problems in the configuration",
        "  - --optimizer.lr: got 'fast', must be a number",
        "  - --training.stpes: unknown key; did you mean 'training.steps'?",
    ]
    assert not (tmp_path / "outputs").exists()


BAD = {
    "data file": (
        ["--training.dataset_path=missing*.jsonl"],
        "training.dataset_path: no file matches",
        2,
    ),
    "empty data": (
        ["--training.dataset_path=empty.jsonl"],
        "training.dataset_path: empty.jsonl holds no documents",
        1,
    ),
    "cut data": (
        ["--training.dataset_path=cut.jsonl.gz"],
        "cut.jsonl.gz: line 1: can't be decompressed",
        1,
    ),
    "dump folder is a file": (["--job.dump_folder=empty.jsonl"], "job.dump_folder: can't write", 2),
    "checkpoint": (
        ["--checkpoint.enable", "--checkpoint.initial_load_path=x"],
        "initial_load_path: no folder",
        2,
    ),
    "hf weights": (
        ["--checkpoint.enable", "--checkpoint.initial_load_in_hf"],
        "is not the folder of a Hugging Face model",
        2,
    ),
}


SLOW = ("cut data", "hf weights")  # found by the rank, as empty data are


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in BAD]
)
def test_bad_input_is_one_message_without_a_traceback(tmp_path, case):
    extra, text, status = BAD[case]
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00half")
    argv = [
        a for a in arguments(tmp_path) if a.split("=")[0] not in {e.split("=")[0] for e in extra}
    ]
    done = run_module("torchtitan.train", *argv, *extra, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert len(done.stderr.strip().splitlines()) <= 3, done.stderr


BAD_LAYOUTS = {
    "tied weights": (
        ["--model.overrides.tie_embeddings=true"],
        "shares one weight between tok_embeddings and output",
    ),
    "schedule": (["--parallelism.pipeline_parallel_schedule=1F1b"], "did you mean '1F1B'?"),
}


@pytest.mark.parametrize("case", BAD_LAYOUTS)
def test_a_bad_layout_is_refused_before_any_rank_starts(tmp_path, case):
    extra, text = BAD_LAYOUTS[case]
    argv = [*arguments(tmp_path), "--parallelism.pipeline_parallel_degree=2", *extra]
    done = run_module("torchtitan", "train", *argv, "--nproc-per-node", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
