"""Checkpoints in object storage: a real S3 client against a real S3 server on this machine."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.runs import arguments, losses, train
from torchtitan.checkpoint.commit import committed_steps, leftovers
from torchtitan.checkpoint.load import Reader, read_tensor
from torchtitan.commands import ckpt
from torchtitan.config import resolve
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.storage import patiently, storage_path

pytest.importorskip("s3fs")
pytest.importorskip("moto")

SAVE = ["--checkpoint.enable", "--checkpoint.interval=3", "--lr_scheduler.total_steps=8"]


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """The environment of a client of a fresh server with the bucket `runs`."""
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("w") as file:  # on a free port, which the server names in its log
        server = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "-p", "0"], stdout=file, stderr=file
        )
    while not (address := re.search(r"Running on (http://127.0.0.1:\d+)", log.read_text())):
        assert server.poll() is None, log.read_text()
        time.sleep(0.05)
    env = {
        "AWS_ENDPOINT_URL": address[1],
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(env)
    storage_path("s3://runs/x").fs.mkdir("runs")
    yield env
    server.kill()
    server.wait()
    for key in env:
        del os.environ[key]


def remote(env, action, *args):
    """Run `action(*args)` on a rank, as a client of the server."""
    os.environ.update(env)
    return action(*args)


@pytest.fixture(scope="module")
def ranks(ranks):
    """With a longer timeout: the server shares a few cores with its clients."""
    return functools.partial(ranks, timeout=200)


def train_remote(env, argv):
    return remote(env, train, argv)


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    return ranks(1, train, arguments(tmp_path_factory.mktemp("whole"), SAVE[-1], steps=8))[0]


@pytest.mark.parametrize(
    "mode",
    [
        "disabled",
        pytest.param("async", marks=pytest.mark.slow),
        pytest.param("async_with_pinned_mem", marks=pytest.mark.slow),
    ],
)
def test_resume_from_a_bucket_on_other_ranks(ranks, tmp_path, s3, uninterrupted, mode):
    url = f"s3://runs/{mode}"
    extra = [*SAVE, f"--checkpoint.folder={url}", f"--checkpoint.async_mode={mode}"]
    ranks(2, train_remote, s3, arguments(tmp_path, *extra, steps=6))
    assert committed_steps(storage_path(url)) == [3, 6]
    assert not leftovers(storage_path(url))
    assert not (tmp_path / "out/checkpoint").exists()
    other = ["--parallelism.tensor_parallel_degree=2"] if mode == "async" else []
    run = ranks(2 if other else 1, train_remote, s3, arguments(tmp_path, *extra, *other, steps=8))[
        0
    ]
    assert [r["step"] for r in run["metrics"]] == list(range(1, 9)), "resumed from step 6"
    assert losses(run) == pytest.approx(losses(uninterrupted), rel=1e-5)


# A local disk has the same test in the suite.
@pytest.mark.slow
def test_retention_damage_and_the_commands(ranks, tmp_path, s3, capsys):
    url = "s3://runs/kept"
    folder = storage_path(url)
    extra = ["--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"]
    extra += [f"--checkpoint.folder={url}", "--checkpoint.last_save_in_hf"]
    ranks(2, train_remote, s3, arguments(tmp_path, *extra, steps=4))
    assert sorted(p.name for p in folder.iterdir()) == ["step-3", "step-4", "step-4-hf"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (folder / "step-4-hf").iterdir()
    }

    assert ckpt.main(["verify", url]) == 0
    ckpt.main(["to-hf", url, str(tmp_path / "hf"), "--no-check"])
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (
        folder / "step-4-hf/model.safetensors"
    ).read_bytes()
    ckpt.main(
        [
            "from-hf",
            str(tmp_path / "hf"),
            "s3://runs/started",
            "--toml",
            str(tmp_path / "train.toml"),
        ]
    )
    trained, started = Reader(folder / "step-4"), Reader(storage_path("s3://runs/started/step-0"))
    for key in started.read_metadata().state_dict_metadata:
        assert torch.equal(read_tensor(started, key), read_tensor(trained, key)), key
    argv = [f"--config={tmp_path / 'train.toml'}", f"--job.dump_folder={tmp_path / 'started'}"]
    argv = [a for a in arguments(tmp_path, *argv, steps=1) if not a.startswith("--model.")]
    assert ranks(1, train_remote, s3, argv)[0]["progress"]["step"] == 1

    shard = folder / "step-4/__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    assert ckpt.main(["verify", url]) == 1
    assert "step-4: damaged" in capsys.readouterr().out
    (folder / "step-9/.incomplete").touch()
    (folder / "step-9/__0_0.distcp").write_bytes(b"half")
    (folder / "step-8/.metadata").write_bytes(b"of another trainer")
    assert ckpt.main(["verify", f"{url}"]) == 1
    assert "step-9: left by" in capsys.readouterr().out
    run = ranks(2, train_remote, s3, arguments(tmp_path, *extra, steps=5))[0]
    assert run["progress"]["step"] == 5
    assert committed_steps(folder) == [4, 5]
    assert not leftovers(folder)
    assert ckpt.main(["verify", url]) == 0, "resumed from step 3, and step 4 was saved again"
    assert (folder / "step-8/.metadata").is_file(), "not ours to delete"


@pytest.mark.slow
def test_a_folder_that_another_program_has_copied(ranks, tmp_path, s3, uninterrupted):
    url = "s3://runs/copies"
    argv = arguments(tmp_path, *SAVE, steps=8)
    ranks(2, train_remote, s3, [*argv, "--training.steps=6"])
    ranks(1, put, s3, tmp_path / "out/checkpoint", url)
    run = ranks(1, train_remote, s3, [*argv, f"--checkpoint.folder={url}"])[0]
    assert [r["step"] for r in run["metrics"]] == list(range(1, 9)), "resumed from step 6"
    assert losses(run) == pytest.approx(losses(uninterrupted), rel=1e-5)


def put(env, folder, url):
    """Copy a folder as fsspec does it."""
    os.environ.update(env)
    target = storage_path(url)
    target.fs.put(str(folder), target.path, recursive=True)


KILLED = """
import os, signal, sys
from torchtitan.train.rank_main import main
from torchtitan.checkpoint import writer

def die_before_the_second_commit(path, value, write=writer.write_file):
    if path.parent.name == "step-2" and path.name == "manifest.json":
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, value)

writer.write_file = die_before_the_second_commit
main(sys.argv[1:])
"""


# A local disk has the same test in the suite.
@pytest.mark.slow
@pytest.mark.e2e
def test_kill_during_a_save_leaves_a_good_checkpoint(ranks, tmp_path, s3):
    folder = storage_path("s3://runs/killed")
    extra = [
        "--checkpoint.enable",
        "--checkpoint.interval=1",
        "--checkpoint.folder=s3://runs/killed",
    ]
    argv = arguments(tmp_path, *extra)
    done = subprocess.run([sys.executable, "-c", KILLED, *argv], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (folder / "step-2/__0_0.distcp").is_file()
    assert (folder / "step-2/.metadata").is_file(), "only the manifest is missing"
    assert committed_steps(folder) == [1]
    assert leftovers(folder) == [folder / "step-2"]
    assert ckpt.main(["verify", str(folder)]) == 0
    run = ranks(1, train_remote, s3, argv)[0]
    assert [r["step"] for r in run["metrics"]] == [1, 2, 3, 4]
    assert committed_steps(folder) == [1, 2, 3, 4]
    assert not leftovers(folder)


def test_other_urls(ranks, tmp_path):
    file = f"file://{tmp_path / 'elsewhere'}"
    ranks(2, train, arguments(tmp_path, *SAVE, f"--checkpoint.folder={file}", steps=3))
    assert (tmp_path / "elsewhere/step-3/manifest.json").is_file()
    memory = ["--checkpoint.folder=memory://run", "--training.steps=4"]
    ranks(1, train, arguments(tmp_path, *SAVE, *memory))
    again = ranks(1, train, arguments(tmp_path, *SAVE, *memory, "--training.steps=5"))[0]
    assert again["progress"]["step"] == 5
    start = [
        "--checkpoint.enable",
        f"--checkpoint.initial_load_path={file}/step-3",
        "--checkpoint.folder=new",
    ]
    ranks(1, train, arguments(tmp_path, *start, "--training.steps=1"))


def test_unusable_storage_is_refused_before_anything_starts(ranks, tmp_path, s3, monkeypatch):
    def problems(*extra, world=1):
        argv = arguments(tmp_path, "--checkpoint.enable", *extra)
        with pytest.raises(ConfigError) as error:
            preflight(resolve(argv, world).config)
        return str(error.value)

    assert "checkpoint.folder: unknown storage s4://" in problems(
        "--checkpoint.folder=s4://bucket/run"
    )
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "pip install gcsfs" in problems("--checkpoint.folder=gs://bucket/run")
    assert "pip install gcsfs" in problems("--checkpoint.initial_load_path=gs://bucket/run/step-1")
    hf = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path=s3://runs/hf"]
    assert "must be in a local folder" in problems(*hf)
    assert "has its own memory://" in problems("--checkpoint.folder=memory://run", world=2)
    assert "must be a local folder" in problems("--job.dump_folder=s3://runs/out")
    assert not Path("s3:").exists()
    with pytest.raises(
        AssertionError,
        match=r"checkpoint.folder: can't write to s3://nobucket/run.*bucket does not exist",
    ):
        ranks(
            2, train_remote, s3, arguments(tmp_path, *SAVE, "--checkpoint.folder=s3://nobucket/run")
        )


class NoCredentialsError(Exception):
    """Like the S3 client's, not an OSError."""


def test_transient_errors_pass_and_lasting_ones_do_not(monkeypatch):
    pauses = []
    path = storage_path("memory://x")
    monkeypatch.setattr("time.sleep", pauses.append)
    errors = iter([ConnectionError("reset"), TimeoutError("slow"), None])

    def flaky():
        if error := next(errors):
            raise error
        return "done"

    assert patiently(path, flaky) == "done"
    assert len(pauses) == 2
    assert pauses[0] < 2
    errors = iter([NoCredentialsError("none")])
    with pytest.raises(OSError, match="NoCredentialsError: none"):
        patiently(path, flaky)
    with pytest.raises(FileNotFoundError):
        patiently(path, lambda: (path / "nothing").read_text())
    assert len(pauses) == 2, "not retried"
    errors = iter([ConnectionError("reset")] * 9)
    with pytest.raises(ConnectionError):
        patiently(path, flaky)
    errors = iter([ConnectionError("reset"), None])
    with pytest.raises(ConnectionError):
        patiently(Path("/tmp"), flaky)
