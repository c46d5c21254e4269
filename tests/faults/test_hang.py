"""Runs that stand still in different ways: the sentence that says why, and what is written for it.

Where a fault can end again it does, once the sentence is there: so the ranks stay usable.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.runs import EXPERTS, arguments, losses, read_metrics, train
from torchtitan.config import resolve
from torchtitan.config.derive import layout_degrees
from torchtitan.config.sections.schema import Comm
from torchtitan.health import hang_watch as watching
from torchtitan.health.hang_watch import Watch
from torchtitan.health.rank_dumps import read_dumps
from torchtitan.parallel import expert
from torchtitan.testing.ranks import RankError
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.activity import begin
from torchtitan.utils.torch_compat import torch_is_before_2_13

ROOT = Path(__file__).parents[2]
HERE = "tests/faults/test_hang.py"
pytestmark = pytest.mark.clock


@contextmanager
def watched(folder, degrees=None):
    """A watch that loses patience after 5 s, longer than a first step on a busy machine takes, and
    its folder.
    """
    before = watching.PATIENCE, watching.SAVE_SECONDS, watching.ANSWER_SECONDS
    watching.PATIENCE = 0.05
    watching.SAVE_SECONDS = 100
    watching.ANSWER_SECONDS = 3
    watch = Watch(Comm(), str(folder), degrees or {})
    watch.limit = Comm().train_timeout_seconds
    try:
        yield watch
    finally:
        watch.close()
        assert "watch" not in {thread.name for thread in threading.enumerate()}
        watching.PATIENCE, watching.SAVE_SECONDS, watching.ANSWER_SECONDS = before


def until_diagnosed(folder, seconds=30):
    """Wait for the sentence."""
    path = Path(folder, "comm_traces", "diagnosis.txt")
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_text().strip()


def train_with(argv, fault):
    """Train under a watch; `fault(trainer, folder)` breaks something first. The sentence, and what
    training gave.
    """
    config = resolve(argv, dist.get_world_size()).config
    folder = config.job.dump_folder
    trainer = Trainer(config, preflight(config))
    fault(trainer, folder)
    with watched(folder, layout_degrees(config.parallelism)):
        progress = trainer.train()
        dist.barrier()
    trainer.close()
    return until_diagnosed(folder), progress.step


def in_step(step, trainer, action):
    """A hook that does `action` once, in the given step."""
    done = []

    def hook(*_):
        if trainer.progress.step + 1 == step and not done:
            done.append(True)
            action()

    return hook


def sleep(trainer, folder):
    if dist.get_rank() == 3:
        output = trainer.parts.models[0].layers["0"].attention.wo
        output.register_forward_pre_hook(in_step(2, trainer, lambda: until_diagnosed(folder)))


def hang_in_sleep(argv):
    return train_with(argv, sleep)


def test_a_rank_that_does_not_enter_a_collective(ranks, tmp_path, capsys, caplog):
    """Of 2 x 2 ranks one sleeps: its tensor-parallel partner waits for it, and the others for that
    one.
    """
    argv = arguments(tmp_path, "--parallelism.tensor_parallel_degree=2")
    sentence, step = ranks(4, hang_in_sleep, argv)[0]
    assert sentence.startswith("rank 3 did not enter reduce_scatter #")
    assert " of tp (Float [4, 16, 64]; ranks 2-3), where rank 2 waits: " in sentence
    assert "running forward and backward of batch 1 of 2" in sentence
    assert f"in step 2, at {HERE}:" in sentence
    assert sentence.endswith("in until_diagnosed")
    assert step == 4

    assert len(list((tmp_path / "out/comm_traces").iterdir())) == 4 * 2 + 1

    if torch_is_before_2_13():
        return  # its analyzer knows no gloo
    from torch.distributed.flight_recorder import (
        fr_trace,
    )  # torch's own analyzer takes the same files

    fr_trace.main([str(tmp_path / "out/comm_traces"), "-p", "rank_"])
    assert "missing ranks: {3}" in capsys.readouterr().err + "".join(
        r.getMessage() for r in caplog.records
    )


def starve(trainer, folder):
    if dist.get_rank() == 1:
        source = trainer.parts.loader.sources["data"]
        reader = source.reader

        def slow(*args):
            lanes = reader(*args)
            count = []
            read = lanes.read

            def starving(*args):
                count.append(0)
                if len(count) == 4:
                    until_diagnosed(folder)
                return read(*args)

            lanes.read = starving
            return lanes

        source.reader = slow


def hang_in_data(argv):
    return train_with(argv, starve)


def test_a_rank_that_waits_for_data(ranks, tmp_path):
    sentence, step = ranks(2, hang_in_data, arguments(tmp_path))[0]
    assert sentence.startswith(
        f"rank 1 has been waiting for data from {tmp_path}/corpus.jsonl for "
    )
    assert f"in step 4, at {HERE}:" in sentence, "where the reading thread is, not who waits for it"
    assert ", and did not enter all_reduce #" in sentence
    assert sentence.endswith("where rank 0 waits")
    assert step == 4


def wrong_splits(trainer, folder, change):
    """Let `change` spoil the splits that rank 1 computes in step 2; those of its first layer, on
    the way to experts.
    """
    real = expert._splits
    done = []

    def splits(*args):
        theirs, ours = real(*args)
        if dist.get_rank() == 1 and trainer.progress.step == 1 and not done:
            done.append(True)
            change(ours)
        return theirs, ours

    return mock.patch.object(expert, "_splits", splits)


def late_exchange(argv):
    with ExitStack() as stack:
        return train_with(
            argv,
            lambda trainer, folder: stack.enter_context(
                wrong_splits(trainer, folder, lambda _: until_diagnosed(folder))
            ),
        )


MIXTURE = [*EXPERTS, "--parallelism.expert_parallel_degree=2"]


def test_a_rank_that_does_not_exchange_rows_with_experts(ranks, tmp_path):
    sentence, step = ranks(2, late_exchange, arguments(tmp_path, *MIXTURE))[0]
    found = re.search(
        r"^rank 1 did not enter all_to_all #\d+ of all ranks = dp_shard = ep \(Float \[128, 64\]; ranks 0-1\), where "  # noqa: E501
        r"rank 0 waits \(rank 0 sends (\d+), (\d+) rows to these ranks and expects (\d+), \d+ from them\): it has ",  # noqa: E501
        sentence,
    )
    assert found, sentence
    own, away, kept = map(int, found.groups())
    assert own + away == 128, "2 rows of 32 tokens, to 2 experts each"
    assert kept == own
    assert step == 4


def uneven_exchange(argv):
    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))

    def more(ours):
        ours[0] += 2

    with watched(config.job.dump_folder) as watch, wrong_splits(trainer, "", more):
        try:
            trainer.train()
        except RuntimeError as error:
            watch.failed(error)
            until_diagnosed(
                config.job.dump_folder
            )  # the pool kills the ranks soon after the first error
            raise


def test_ranks_that_disagree_about_the_rows_they_exchange(ranks, tmp_path):
    """The receiver waits for rows that don't come (NCCL), or continues without them (gloo): one
    sentence for both.
    """
    with pytest.raises(RankError):
        ranks(2, uneven_exchange, arguments(tmp_path, *MIXTURE))
    sentence = until_diagnosed(tmp_path / "out")
    found = re.match(
        r"rank 0 sends (\d+) rows to rank 1, which expects (\d+), in exchange #17 of experts' rows among ranks 0-1"  # noqa: E501
        r"; rank 1 raised RuntimeError in step 2 while running forward and backward of batch 1 of 2, at torchtitan/",  # noqa: E501
        sentence,
    )
    assert found, sentence
    assert int(found[2]) == int(found[1]) + 2


def idle_stage(trainer, folder):
    if dist.get_rank() == 0:
        block = trainer.parts.models[0].layers["0"]
        calls = []

        def third(*_):
            calls.append(0)
            if len(calls) == 3:
                until_diagnosed(folder)

        block.register_forward_pre_hook(third)


def hang_in_pipeline(argv):
    return train_with(argv, idle_stage)


def test_a_pipeline_stage_that_never_sends(ranks, tmp_path):
    """gloo records neither sends nor receives."""
    argv = arguments(
        tmp_path, "--parallelism.pipeline_parallel_degree=2", global_batch=4, local_batch=4
    )
    sentence, step = ranks(2, hang_in_pipeline, argv)[0]
    assert sentence.startswith("rank 0 did not enter a send or receive")
    assert (
        "where rank 1 waits: it has been running stage 0, from the forward of microbatch 2 for "
        in sentence
    )
    assert f"in step 1, at {HERE}:" in sentence
    assert step == 4


def stuck_save(trainer, folder):
    if dist.get_rank() == 1:
        from torchtitan.checkpoint.save import CommittingWriter

        write = CommittingWriter.write_data

        def stuck(*args):
            CommittingWriter.write_data = write
            until_diagnosed(folder)
            return write(*args)

        CommittingWriter.write_data = stuck


def hang_in_save(argv):
    return train_with(argv, stuck_save)


def test_a_save_that_is_stuck(ranks, tmp_path):
    sentence, step = ranks(
        2, hang_in_save, arguments(tmp_path, "--checkpoint.enable", "--checkpoint.interval=2")
    )[0]
    assert sentence.startswith("rank 1 did not enter ")
    assert " of checkpoint (" in sentence
    assert "it has been saving for " in sentence
    assert f"in step 2, at {HERE}:" in sentence
    assert step == 4


def slow(trainer, folder):
    trainer.parts.models[0].layers["0"].register_forward_pre_hook(
        in_step(2, trainer, lambda: until_diagnosed(folder))
    )


def all_slow(argv):
    return train_with(argv, slow)


def test_ranks_that_are_only_slow_are_called_so(ranks, tmp_path):
    sentence, step = ranks(2, all_slow, arguments(tmp_path))[0]
    assert sentence.startswith("no rank waits for another; rank ")
    assert " has been running forward and backward of batch 1 of 2 for " in sentence
    assert step == 4


def interrupted(trainer, folder):
    if dist.get_rank() == 1:
        block = trainer.parts.models[0].layers["0"]
        block.register_forward_pre_hook(
            in_step(2, trainer, lambda: os.kill(os.getpid(), signal.SIGUSR2))
        )
    block = trainer.parts.models[0].layers["1"]
    block.register_forward_pre_hook(in_step(3, trainer, lambda: until_diagnosed(folder)))


def train_interrupted(argv):
    return train_with(argv, interrupted)


def test_sigusr2_lets_all_ranks_write_and_changes_nothing(ranks, tmp_path):
    plain = ranks(2, train, arguments(tmp_path, f"--job.dump_folder={tmp_path / 'plain'}"))[0]
    _, step = ranks(2, train_interrupted, arguments(tmp_path))[0]
    assert step == 4
    assert losses({"metrics": read_metrics(tmp_path / "out")}) == losses(plain)
    dumps = read_dumps(tmp_path / "out/comm_traces")
    assert dumps.why == "SIGUSR2"
    assert sorted(dumps.by_rank) == [0, 1]
    assert all(one.collectives and one.state["step"] >= 2 for one in dumps.by_rank.values())


def small_group():
    """A group whose collectives give up after some seconds, as tensor parallelism's would."""
    group = dist.new_group(timeout=timedelta(seconds=6), group_desc="mesh_tp")
    begin("step", "running forward and backward", 7)
    dist.all_reduce(torch.ones(8), group=group)
    return group


def skip_one(folder):
    with watched(folder):
        group = small_group()
        if dist.get_rank() != 1:
            with pytest.raises(
                RuntimeError
            ):  # a timeout: its own, or one of a peer that then closes the connection
                dist.all_reduce(torch.ones(8), group=group)
        else:
            parts = [torch.empty(4) for _ in range(3)]
            with pytest.raises(RuntimeError):
                dist.all_gather(parts, torch.ones(4), group=group)
        return until_diagnosed(folder)


def test_a_rank_that_skips_a_collective(ranks, tmp_path):
    """It is one ahead, and its next one meets the others' last."""
    sentence = ranks(3, skip_one, tmp_path)[0]
    assert sentence.startswith(
        f"rank 1 entered all_gather #2 of tp (Float [4]; ranks 0-2), at {HERE}:"
    )
    assert f", where ranks 0, 2 entered all_reduce (Float [8]), at {HERE}:" in sentence


def raise_one(folder):
    with watched(folder) as watch:
        group = small_group()
        if dist.get_rank() == 1:
            try:
                raise ValueError("boom\nand more")
            except ValueError as error:
                watch.failed(error)
        dist.all_reduce(torch.ones(8), group=group)
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as error:
            watch.failed(error)  # what follows from it is not written over it
        return until_diagnosed(folder), [str(p.name) for p in Path(folder, "comm_traces").iterdir()]


def test_a_rank_that_raises(ranks, tmp_path):
    """The others, who wait for it, write too, before it ends."""
    sentence, files = ranks(3, raise_one, tmp_path)[0]
    assert sentence.startswith(f"rank 1 raised ValueError: boom, in step 7, at {HERE}:")
    assert sentence.endswith("in raise_one")
    assert {"rank_0", "rank_1", "rank_2", "state-0.json", "state-1.json", "state-2.json"} <= set(
        files
    )


def stop_one(folder):
    with watched(folder) as watch:
        group = small_group()
        pid = watch._processes[1][0]

        def release():
            until_diagnosed(folder)
            os.kill(pid, signal.SIGCONT)

        if dist.get_rank() == 0:
            threading.Thread(target=release).start()
        if dist.get_rank() == 1:
            os.kill(pid, signal.SIGSTOP)
        with suppress(RuntimeError):  # it may give up before the stopped rank continues
            dist.all_reduce(torch.ones(8), group=group)
        return until_diagnosed(folder), pid


def test_a_rank_that_is_stopped(ranks, tmp_path):
    sentence, pid = ranks(2, stop_one, tmp_path)[0]
    assert sentence.startswith(f"rank 1 is stopped by a signal (process {pid} on ")
    assert (
        "and did not enter all_reduce #2 of tp (Float [8]; ranks 0-1), where rank 0 waits"
        in sentence
    )


def launched(tmp_path, fault):
    """Two tensor-parallel ranks through the real launcher; `fault` happens to rank 1 in step 3."""
    extra = ["--comm.train_timeout_seconds=8", "--parallelism.tensor_parallel_degree=2"]
    argv = [*arguments(tmp_path, *extra), "--experimental.custom_import=tests.faults.hang_faults"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FAULT": fault}
    command = [sys.executable, "-m", "torchtitan", "train", "--nproc-per-node", "2", "--", *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=200)
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()


@pytest.mark.e2e
def test_the_launcher_ends_with_the_sentence(tmp_path):
    lines = launched(tmp_path, "sleep")
    sentence = lines[-1].removeprefix("error: ")
    assert sentence.startswith("rank 1 did not enter reduce_scatter #"), lines
    assert " of all ranks = tp (Float [4, 16, 64]; ranks 0-1), where rank 0 waits: " in sentence
    assert "in step 3, at tests/faults/hang_faults.py:" in sentence
    assert lines[0].endswith(sentence), "said when it was seen, before the time limit ended it"
    assert f"error: {sentence}" in lines[1:-1], "and by rank 0, whoever started it"
    assert "Traceback" not in "".join(lines)
    told = subprocess.run(
        [sys.executable, "-m", "torchtitan", "doctor", str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert told.stdout.splitlines()[0] == sentence, told.stderr


@pytest.mark.slow
@pytest.mark.e2e
def test_the_launcher_names_a_rank_that_was_killed(tmp_path):
    lines = launched(tmp_path, "kill")
    assert lines[-1].startswith("error: rank 1 was killed by SIGKILL"), lines
