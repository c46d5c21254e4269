"""Runs that stand still in different ways: the sentence that says why, and what is written for it.

Where a fault can end again it does, once the sentence is there: so the ranks stay usable.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.hangs import HERE, until_diagnosed, watched
from tests.runs import EXPERTS, arguments, losses, read_metrics, train
from torchtitan.config import resolve
from torchtitan.config.derive import layout_degrees
from torchtitan.health.rank_dumps import read_dumps
from torchtitan.parallel.experts import shard as expert
from torchtitan.testing.ranks import RankFailure
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.torch_compat import torch_is_before_2_13

ROOT = Path(__file__).parents[2]


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
        output = trainer.engine.models[0].layers["0"].attention.wo
        output.register_forward_pre_hook(in_step(2, trainer, lambda: until_diagnosed(folder)))


def hang_in_sleep(argv):
    return train_with(argv, sleep)


def test_a_rank_that_does_not_enter_a_collective(ranks, tmp_path, capsys, caplog):
    """Of 2 x 2 ranks one sleeps: its tensor-parallel partner waits for it, and so may its
    data-parallel one; the others wait for these.
    """
    argv = arguments(tmp_path, "--parallelism.tensor_parallel_degree=2")
    sentence, step = ranks(4, hang_in_sleep, argv)[0]
    assert re.match(
        r"rank 3 did not enter "
        r"(reduce_scatter #\d+ of tp \(Float \[4, 16, 64\]; ranks 2-3\), where rank 2"
        r"|all_gather #\d+ of dp_shard \(Float \[\d+\]; ranks 1, 3\), where rank 1) waits: ",
        sentence,
    )
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
        source = trainer.engine.loader.sources["data"]
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


@pytest.mark.proof
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
    done = []

    def splits(*args):
        theirs, ours = expert.count_splits(*args)
        if dist.get_rank() == 1 and trainer.progress.step == 1 and not done:
            done.append(True)
            change(ours)
        return theirs, ours

    stack = ExitStack()
    for model in trainer.engine.models:
        for module in model.modules():
            if isinstance(module, expert.ShardedExperts):
                stack.enter_context(mock.patch.object(module, "splits", splits))
    return stack


def late_exchange(argv):
    with ExitStack() as stack:
        return train_with(
            argv,
            lambda trainer, folder: stack.enter_context(
                wrong_splits(trainer, folder, lambda _: until_diagnosed(folder))
            ),
        )


MIXTURE = [*EXPERTS, "--parallelism.expert_parallel_degree=2"]


# A hang in the data, in a collective, in a pipeline and in a save is in the suite.
@pytest.mark.slow
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
            # The pool kills the ranks soon after the first error. If the run also counted as
            # hanging, the other rank would then find this one gone, and say only that.
            until_diagnosed(config.job.dump_folder, hangs=False)
            raise


def test_ranks_that_disagree_about_the_rows_they_exchange(ranks, tmp_path):
    """The receiver waits for rows that don't come (NCCL), or continues without them (gloo): one
    sentence for both.
    """
    with pytest.raises(RankFailure):
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
        block = trainer.engine.models[0].layers["0"]
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
        from torchtitan.checkpoint.writer import CommittingWriter

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
    trainer.engine.models[0].layers["0"].register_forward_pre_hook(
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
        block = trainer.engine.models[0].layers["0"]
        block.register_forward_pre_hook(
            in_step(2, trainer, lambda: os.kill(os.getpid(), signal.SIGUSR2))
        )
    block = trainer.engine.models[0].layers["1"]
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
    assert "rank 1: ended, because another rank failed" in lines, (
        "at once, not by torchrun after 30 s"
    )
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
@pytest.mark.parametrize(
    ("fault", "start", "place"),
    [
        ("kill", "error: rank 1 was killed by SIGKILL", ""),
        (
            "other_size",  # gloo aborts the other rank
            "error: rank 0 was killed by SIGABRT in a collective, as gloo does if ranks exchange "
            "tensors of different sizes: rank 0 was at ",
            "(Double [100000]; ranks 0-1), at tests/faults/hang_faults.py:20 in other_size",
        ),
        (
            "fail_at_the_end",
            "error: rank 1 raised RuntimeError: boom, in step 4, at tests/faults/hang_faults.py:25",
            "",
        ),
    ],
)
def test_the_launcher_names_the_rank_and_the_place(tmp_path, fault, start, place):
    lines = launched(tmp_path, fault)
    assert lines[-1].startswith(start), lines
    assert place in lines[-1]
