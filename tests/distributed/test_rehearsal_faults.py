"""`torchtitan rehearse` names each planted fault, its rank and its line."""

import re

import pytest
import torch.distributed as dist

from tests.faults import rehearsal_faults
from tests.runs import arguments
from torchtitan.config import resolve
from torchtitan.tools.rehearsal import recorder
from torchtitan.tools.rehearsal.fake import start_group
from torchtitan.tools.rehearsal.rank import record
from torchtitan.tools.rehearsal.rank_sample import RankSample
from torchtitan.tools.rehearsal.recorder import Recorder
from torchtitan.tools.rehearsal.rehearsal import compare, rehearse
from torchtitan.utils.activity import forget_exchanges

HERE = r"tests/faults/rehearsal_faults.py:\d+ in {}"
SUM_4 = r"all_reduce #4 of all ranks = dp_shard \(float32 \[4\] sum; ranks 0-1\) during the start"
AFTER_3 = (
    r"where rank 0 waits, at .*:\d+ in sums; its last one there is #3 all_reduce, at .* in sums$"
)
BY_DATA = r"rank 1 depends on a value of its own data, which it reads at .* in own_value: rank 1 "
WHAT = {
    "skip": (
        2,
        "collectives",
        1,
        r"rank 1 did not enter all_reduce #1 of all ranks = dp_shard \(float32 \[4\] sum; ranks "
        r"0-1\) during the start, where rank 0 waits, at {}$",
    ),
    "two_left_out": (
        2,
        "collectives",
        1,
        rf"rank 1 did not enter {SUM_4}, nor the 1 collective after it, {AFTER_3}",
    ),
    "three_left_out": (
        2,
        "collectives",
        1,
        rf"rank 1 did not enter {SUM_4}, nor the 2 collectives after it, {AFTER_3}",
    ),
    "four_left_out": (
        2,
        "collectives",
        1,
        rf"rank 1 did not enter {SUM_4}, nor the 3 collectives after it, {AFTER_3}",
    ),
    "rank_0_saves_alone": (
        4,
        "collectives",
        0,
        r"rank 0 entered all_reduce #2 of .* ranks 0-3\) during the start, at .* in sums, and the "
        r"2 collectives after it, which ranks 1-3 did not enter; their last one there is #1 "
        r"barrier, at {}",
    ),
    "rank_0_after_objects": (
        4,
        "collectives",
        0,
        r"^rank 0 entered barrier #2 of .* at {}, which ranks 1-3 did not enter",
    ),
    "returns_early": (
        4,
        "collectives",
        3,
        r"rank 3 did not enter all_reduce #3 of .*\(float32 \[8\] sum; .* nor the 2 collectives "
        r"after it, where ranks 0-2 wait, at {}; its last one there is #2 all_reduce, at .* in sum",
    ),
    "object_of_rank_0": (
        2,
        "collectives",
        1,
        r"rank 1 did not enter broadcast_object_list #1 .*, where rank 0 waits, at {}$",
    ),
    "object_of_others": (
        2,
        "collectives",
        1,
        r"rank 1 entered broadcast_object_list #1 .* at {}, which rank 0 did not enter",
    ),
    "alike": (2, "collectives", 1, r"rank 1 did not enter all_reduce #1 .* at {}$"),
    "wrong_loss": (
        2,
        "error",
        0,
        r'ranks 0-1 raised UserError: training.loss: "counts_all" gives a loss to tokens whose '
        r"label is -100; they must not count, at ",
    ),
    "registered_loss": (2, "collectives", 1, r"rank 1 did not enter all_reduce #1 .* in skip$"),
    "raises": (2, "error", 1, r"rank 1 raised ValueError: boom, at {}"),
    "exits": (2, "error", 1, r"rank 1 raised SystemExit: enough, at {}"),
    "order": (
        2,
        "collectives",
        1,
        r"rank 1 entered all_reduce #1 of extra \(float32 \[8\] sum; ranks 0-1\) during the start, "
        r"at {}, where rank 0 entered all_reduce \(float32 \[4\] sum\), at {}",
    ),
    "kind": (2, "collectives", 1, r"rank 1 entered all_reduce .*\(float64 \[4\] sum; .* {}, where"),
    "shape": (
        2,
        "collectives",
        1,
        r"rank 1 entered all_reduce .*\(float32 \[2\] .* {}, where .*\[4\]",
    ),
    "reduction": (
        2,
        "collectives",
        1,
        r"rank 1 entered all_reduce #1 .*\(float32 \[4\] max; .*where .* \[4\] sum.*{}",
    ),
    "root": (
        2,
        "collectives",
        1,
        r"rank 1 entered broadcast #1 of all ranks .* of root 1 during the start, at {}",
    ),
    "group": (
        2,
        "groups",
        1,
        r"rank 1 creates group #2 extra \(rank 0\), at {}, where rank 0 creates .*ranks 0-1.*{}",
    ),
    "group_order": (
        2,
        "groups",
        1,
        r"rank 1 creates group #2 second .*, at {}, where rank 0 creates group #2 first .*{}",
    ),
    "no_group": (
        4,
        "groups",
        3,
        r"rank 3 creates only 1 group, where ranks 0-2 create group #2 extra \(ranks 0-1\), at {}",
    ),
    "above_100": (2, "data", 1, BY_DATA + r"entered barrier #1 of all .*{}"),
    "modulo_3": (2, "data", 1, BY_DATA + r"did not enter all_reduce #1 .* in sums"),
    "modulo_5": (2, "data", 1, BY_DATA + r"did not enter all_reduce #1 .* in sums"),
    "modulo_15": (2, "data", 1, BY_DATA + r"did not enter all_reduce #1 .* in sums"),
    "every_seventh": (2, "data", 1, BY_DATA + r"entered barrier #1 .*{}"),
    "third_value": (
        3,
        "data",
        2,
        r"rank 2 depends on a value of its own data, which .* in own_value: rank 2 entered barrier",
    ),
    "loop": (
        2,
        "error",
        0,
        r"ranks 0-1 did not leave a loop at {}: it waits for a tensor's value to change",
    ),
    "unreceived": (
        2,
        "messages",
        1,
        r"rank 0 sends message #1 \(float32 \[4\]\) to rank 1 .*at {}, but rank 1 receives",
    ),
    "unsent": (
        2,
        "messages",
        0,
        r"rank 1 receives message #1 \(float32 \[4\]\) from rank 0 .*at {}, but rank 0 sends",
    ),
    "size": (
        2,
        "messages",
        0,
        r"rank 0 sends message #1 \(float32 \[4\]\) to rank 1, at {}, which receives .* \[2\]",
    ),
    "way": (
        2,
        "messages",
        0,
        r"rank 0 sends message #1 \(float32 \[4\]\) to rank 1, at {}, over the two ranks' "
        r"communicator, but it is received over the group's communicator, at {}",
    ),
    "circle": (
        4,
        "circle",
        0,
        r"rank 0 waits to send to rank 1 \(float32 \[4\]\) in all ranks = dp_shard, posted at {}; "
        r"rank 1 waits to send to rank 2 .* rank 3 waits to send to rank 0",
    ),
    "crossed": (
        2,
        "circle",
        0,
        r"rank 0 waits in barrier #1 of all ranks .*, at {}; rank 1 waits to receive from rank 0 "
        r".*{}",
    ),
    "experts": (
        2,
        "exchanges",
        0,
        r"rank 0 sends 5 rows to rank 1, which expects 6, in exchange #1 .* among ranks 0-1",
    ),
}
"""Number of ranks; kind, rank to blame and words of each planted fault; {} is its Python line."""


def faults_of(function, world):
    """What a comparison of `world` ranks finds, which only do `function` on a fake group."""
    degrees = {"pp": 1, "dp_shard": world}
    sample = RankSample(range(world), degrees)

    def run(rank, values):
        recording = Recorder(rank, degrees, values=values)

        def work(_):
            start_group(world, rank)
            function()

        forget_exchanges()
        try:
            record(recording, broadcasts if rank else None, work)
        finally:
            dist.destroy_process_group()
        return recording.record

    broadcasts = []
    records = {0: run(0, sample.values(0))}
    broadcasts = records[0].broadcasts
    records |= {rank: run(rank, sample.values(rank)) for rank in range(1, world)}
    return compare(records, sample, run)[1]


@pytest.mark.parametrize("name", WHAT)
def test_a_planted_fault_is_named(name, monkeypatch):
    monkeypatch.setattr(recorder, "_ENDLESS_READS", 100)
    world, kind, rank, text = WHAT[name]
    (fault, *others) = faults_of(getattr(rehearsal_faults, name), world)
    assert (fault.kind, fault.rank) == (kind, rank), fault.text
    assert re.search(text.replace("{}", HERE.format(name)), fault.text), fault.text
    assert others == []


def test_a_fault_in_a_run_is_named(tmp_path):
    flags = [
        "--experimental.custom_import=tests.faults.rehearsal_faults",
        "--training.callbacks=fault",
        "--training.loss=z_loss",
        "--job.description=modulo_3",
        "--checkpoint.enable",
    ]
    (fault,) = rehearse(resolve(arguments(tmp_path, *flags), 2).config, 2).faults
    assert (fault.kind, fault.rank) == ("data", 1), fault.text
    assert re.search(BY_DATA + r"did not enter all_reduce #\d+ .* in sums", fault.text), fault.text
