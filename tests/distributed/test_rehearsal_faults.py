"""`torchtitan rehearse` names each planted fault, its rank and its line."""

import re

import pytest

from tests.faults import rehearsal_faults
from tests.runs import arguments
from torchtitan.config import resolve
from torchtitan.tools.rehearsal.rehearsal import rehearse

FAULTS = [
    "--experimental.custom_import=tests.faults.rehearsal_faults",
    "--training.callbacks=fault",
]
HERE = r"tests/faults/rehearsal_faults.py:\d+ in {}"
WHAT = {
    "skip": (
        "collectives",
        1,
        r"rank 1 did not enter all_reduce #\d+ of all ranks = dp_shard \(float32 \[4\] sum; ranks 0-1\) during the "  # noqa: E501
        r"callbacks, where rank 0 waits, at {}; its last one there is #\d+ ",
    ),
    "order": (
        "collectives",
        1,
        r"rank 1 entered all_reduce #\d+ of extra \(float32 \[8\] sum; ranks 0-1\) during the callbacks, at {}, where "  # noqa: E501
        r"rank 0 entered all_reduce \(float32 \[4\] sum\), at {}",
    ),
    "kind": (
        "collectives",
        1,
        r"rank 1 entered all_reduce #\d+ .*\(float64 \[4\] sum; ranks 0-1\) .*at {}, where",
    ),
    "reduction": (
        "collectives",
        1,
        r"rank 1 entered all_reduce #\d+ .*\(float32 \[4\] max; .*where .* \[4\] sum.*{}",
    ),
    "root": (
        "collectives",
        1,
        r"rank 1 entered broadcast #\d+ of all ranks .* of root 1 during the callbacks, at {}",
    ),
    "group": (
        "groups",
        1,
        r"rank 1 creates group #\d+ extra \(rank 0\), at {}, where rank 0 creates .*ranks 0-1.*{}",
    ),
    "data": (
        "data",
        1,
        r"rank 1 depends on a value of its own data, which it reads at {}: .* barrier #\d+ of all .*{}",  # noqa: E501
    ),
    "raises": ("error", 1, r"rank 1 raised ValueError: boom, at {}"),
    "loop": (
        "loop",
        1,
        r"rank 1 loops without end at {}: the loop waits for a tensor's value to change",
    ),
    "unreceived": (
        "messages",
        1,
        r"rank 0 sends message #1 \(float32 \[4\]\) to rank 1 .*at {}, but rank 1 receives",
    ),
    "unsent": (
        "messages",
        0,
        r"rank 1 receives message #1 \(float32 \[4\]\) from rank 0 .*at {}, but rank 0 sends",
    ),
    "size": (
        "messages",
        0,
        r"rank 0 sends message #1 \(float32 \[4\]\) to rank 1, at {}, which receives .* \[2\]",
    ),
    "way": (
        "messages",
        0,
        r"rank 0 sends message #1 \(float32 \[4\]\) to rank 1, at {}, over that of the two ranks, but it is received "  # noqa: E501
        r"over the group's communicator, at {}",
    ),
    "circle": (
        "circle",
        0,
        r"rank 0 waits to send to rank 1 \(float32 \[4\]\) in all ranks = dp_shard, posted at {}; rank 1 waits to send",  # noqa: E501
    ),
    "crossed": (
        "circle",
        0,
        r"rank 0 waits in barrier #\d+ of all ranks .*, at {}; rank 1 waits to receive from rank 0 .*{}",  # noqa: E501
    ),
    "experts": (
        "exchanges",
        0,
        r"rank 0 sends 5 rows to rank 1, which expects 6, in exchange #\d+ .* among ranks 0-1",
    ),
}
"""Kind, rank to blame and words of each planted fault; {} is its Python line."""
SUITE = ("data",)


def planted(tmp_path, name):
    argv = arguments(tmp_path, *FAULTS, f"--job.description={name}", "--checkpoint.enable")
    return rehearse(resolve(argv, 2).config, 2).faults


@pytest.mark.parametrize(
    "name", [n if n in SUITE else pytest.param(n, marks=pytest.mark.slow) for n in WHAT]
)
def test_a_planted_fault_is_named(tmp_path, name):
    kind, rank, text = WHAT[name]
    (fault,) = planted(tmp_path, name)
    assert (fault.kind, fault.rank) == (kind, rank), fault.text
    assert re.search(text.replace("{}", HERE.format(name)), fault.text), fault.text


def test_every_fault_is_tried():
    assert {name for name, f in vars(rehearsal_faults).items() if callable(f)} >= WHAT.keys()
