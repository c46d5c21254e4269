"""`run.json` of real runs: resumed, killed, failed on one rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.runs import arguments, last, train
from torchtitan.config import resolve
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer

SAVE = ["--checkpoint.enable", "--checkpoint.interval=2"]


def record(folder):
    return json.loads((folder / "out/run.json").read_text())


def test_a_resumed_run_has_one_account(ranks, tmp_path):
    held_out = [
        "--validation.enable",
        "--validation.dataset=corpus",
        f"--validation.dataset_path={tmp_path / 'corpus.jsonl'}",
        "--validation.steps=1",
    ]
    ranks(1, train, arguments(tmp_path, *SAVE, *held_out))
    tp = ["--parallelism.tensor_parallel_degree=2"]
    ranks(2, train, arguments(tmp_path, *SAVE, *tp, steps=6))
    run = record(tmp_path)
    first, second = run["starts"]
    assert [
        (s["ranks"], s["layout"], s["resumed_step"], s["step"], s["end"]) for s in run["starts"]
    ] == [(1, {}, 0, 4, "completed"), (2, {"tp": 2}, 4, 6, "completed")]
    assert second["devices"] == {"cpu": 2}
    assert sum(second["hosts"].values()) == 2
    assert first["data"]["sources"] == second["data"]["sources"]
    assert first["config"]["sha256"] != second["config"]["sha256"]
    for kind in ("steps", "first_step", "start", "data", "saves", "validation"):
        assert first["seconds"][kind] > 0, kind
    assert second["seconds"]["validation"] == second["seconds"]["restart"] == 0
    spent = sum(first["seconds"].values())
    assert spent == pytest.approx(first["last_seen"] - first["time"], rel=1e-2), (
        "every second, once"
    )
    events = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in events] == [
        *[("started", 0), ("saved", 2), ("saved", 4), ("finished", 4)],
        *[("resumed", 4), ("saved", 6), ("finished", 6)],
    ]
    assert (
        run["goodput"]["seconds"]["steps"] == first["seconds"]["steps"] + second["seconds"]["steps"]
    )


def kinds(folder):
    events = [json.loads(line) for line in (folder / "out/events.jsonl").read_text().splitlines()]
    return [(event["kind"], event["step"]) for event in events]


def look_after_each_commit(argv, folder, fail):
    """What is on record once a save in the background is committed, before the next one or after an
    error.
    """
    config = resolve(argv, dist.get_world_size()).config
    seen = []

    def look(_):
        writing = trainer.checkpointer._writing
        if fail and trainer.progress.step == 2:
            raise ValueError("bad row")
        if writing is not None:
            writing.result()
            seen.append(kinds(folder))

    trainer = Trainer(config, preflight(config), arrange=last(look))
    error = None
    try:
        trainer.train()
    except ValueError as problem:
        error = problem
    trainer.close(error)
    return seen


BACKGROUND = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2"]


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_a_commit_in_the_background_is_on_record_when_it_happens(ranks, tmp_path, mode):
    argv = arguments(tmp_path, *BACKGROUND, f"--checkpoint.async_mode={mode}", steps=6)
    seen = ranks(2, look_after_each_commit, argv, tmp_path, False)[0]
    saved = [("started", 0), ("saved", 2), ("saved", 4)]
    assert seen[:3] == [saved[:2], saved[:2], saved], "after steps 2, 3 and 4"
    assert kinds(tmp_path) == [*saved, ("saved", 6), ("deleted", 6), ("finished", 6)]


def test_a_commit_is_on_record_though_the_run_fails_meanwhile(ranks, tmp_path):
    argv = arguments(tmp_path, *BACKGROUND, "--checkpoint.async_mode=async", steps=6)
    ranks(2, look_after_each_commit, argv, tmp_path, True)
    assert kinds(tmp_path) == [("started", 0), ("saved", 2), ("failed", 2)]


def fail_on_rank_1(argv):
    """What `torchtitan.train` does when one rank fails and the others learn of it from their
    collectives.
    """
    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    dist.barrier()
    if dist.get_rank() == 1:
        error = ValueError("bad row in shard 7")
    else:
        error = RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:4321")
        deadline = time.monotonic() + 60
        while record(Path(config.job.dump_folder).parent)["starts"][0]["end"] is None:
            assert time.monotonic() < deadline, "rank 1 wrote no cause"
            time.sleep(0.01)
    trainer.close(error)


def test_the_account_names_the_failure(ranks, tmp_path):
    ranks(2, fail_on_rank_1, arguments(tmp_path))
    assert record(tmp_path)["starts"][0]["end"] == "failed: bad row in shard 7"
    last = json.loads((tmp_path / "out/events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["message"]) == ("failed", "bad row in shard 7")


@pytest.mark.slow
@pytest.mark.e2e
def test_a_killed_process_and_its_successor(tmp_path):
    argv = [*arguments(tmp_path, steps=2000), *SAVE]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan.train", *argv], stdout=log, stderr=log
        )
        deadline = time.monotonic() + 120
        while not (
            (tmp_path / "out/run.json").exists() and record(tmp_path)["starts"][0]["step"] >= 4
        ):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    seen = record(tmp_path)["starts"][0]
    assert seen["end"] is None
    steps = seen["step"] + 20
    command = [
        sys.executable,
        "-m",
        "torchtitan.train",
        *arguments(tmp_path, steps=steps),
        *SAVE,
        "--optimizer.lr=2e-2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    changed = next(line for line in done.stdout.splitlines() if "Changed since step" in line)
    assert f"training.steps 2000 -> {steps}" in changed
    assert "optimizer.lr 0.01 -> 0.02" in changed
    killed, completed = record(tmp_path)["starts"]
    assert killed == seen | {"end": "killed"}
    assert completed["end"] == "completed"
    assert completed["seconds"]["restart"] > 1, "importing torch alone takes longer"
    assert completed["time"] - killed["last_seen"] < completed["seconds"]["restart"]
    assert "restarts" in next(line for line in done.stdout.splitlines() if "Goodput" in line)
