"""`torchtitan rehearse`: what it checks against real ranks, planted faults, and every shipped configuration."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.faults import rehearsal_faults
from tests.runs import EXPERTS, arguments
from torchtitan.commands.rehearse import main
from torchtitan.config import resolve
from torchtitan.observe.ledger import git_revision  # noqa: F401  (imported by ranks)
from torchtitan.rehearse.agree import Counts
from torchtitan.rehearse.cast import Cast, coordinates, corners, rank_at
from torchtitan.rehearse.events import Collective, Group, Message, Post, Record, Wait
from torchtitan.rehearse.rehearsal import check, rehearse
from torchtitan.rehearse.waits import check_circles
from torchtitan.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))
P = "--parallelism."
FAULTS = "--experimental.custom_import=tests.faults.rehearsal_faults"
HERE = r"tests/faults/rehearsal_faults.py:\d+ in {}"
WHAT = {
    "skip": (
        "collectives",
        1,
        r"rank 1 did not enter all_reduce #\d+ of all ranks \(float32 \[4\] sum; ranks 0-1\) during the report, where "
        r"rank 0 waits, at {}",
    ),
    "order": (
        "collectives",
        1,
        r"rank 1 entered all_reduce #\d+ of dp_shard \(float32 \[8\] sum; ranks 0-1\) during the report, at {}, where "
        r"rank 0 entered all_reduce \(float32 \[4\] sum\), at {}",
    ),
    "kind": ("collectives", 1, r"rank 1 entered all_reduce #\d+ of all ranks \(float64 \[4\] sum; ranks 0-1\).*at {}"),
    "reduction": ("collectives", 1, r"rank 1 entered all_reduce #\d+ of all ranks \(float32 \[4\] max; ranks 0-1\).*{}"),
    "root": ("collectives", 1, r"rank 1 entered broadcast #\d+ of all ranks .* of root 1 during the report, at {}"),
    "group": ("groups", 1, r"rank 1 creates group #\d+ extra \(rank 0\), at {}, where rank 0 creates .*ranks 0-1.*{}"),
    "data": ("data", 1, r"rank 1 depends on a value of its own data, which it reads at {}: .*barrier.* of all ranks.*{}"),
    "raises": ("error", 1, r"rank 1 raised ValueError: boom, at {}"),
    "unreceived": ("messages", 1, r"rank 0 sends message #1 \(float32 \[4\]\) to rank 1 .*at {}, but rank 1 receives"),
    "unsent": ("messages", 0, r"rank 1 receives message #1 \(float32 \[4\]\) from rank 0 .*at {}, but rank 0 sends"),
    "size": ("messages", 0, r"rank 0 sends message #1 \(float32 \[4\]\) to rank 1, at {}, which receives float32 \[2\]"),
    "circle": (
        "circle",
        0,
        r"rank 0 waits to send to rank 1 \(float32 \[4\]\) in all ranks, posted at {}; rank 1 waits to send to rank 0",
    ),
    "crossed": (
        "circle",
        0,
        r"rank 0 waits in barrier #\d+ of all ranks \(ranks 0-1\), at {}; rank 1 waits to receive from rank 0 .*{}",
    ),
    "experts": ("exchanges", 0, r"rank 0 sends 5 rows to rank 1, which expects 6, in exchange #\d+ .* among ranks 0-1"),
}  # fmt: skip
"""Kind, rank to blame and words of each planted fault; {} is its Python line."""
SUITE = ("order", "data", "circle")


def planted(tmp_path, name):
    argv = arguments(tmp_path, FAULTS, f"--job.description={name}", "--checkpoint.enable")
    return rehearse(resolve(argv, 2).config, 2).faults


@pytest.mark.parametrize("name", [n if n in SUITE else pytest.param(n, marks=pytest.mark.slow) for n in WHAT])
def test_a_planted_fault_is_named(tmp_path, name):
    kind, rank, text = WHAT[name]
    (fault,) = planted(tmp_path, name)
    assert (fault.kind, fault.rank) == (kind, rank), fault.text
    assert re.search(text.replace("{}", HERE.format(name)), fault.text), fault.text


def test_every_fault_is_tried():
    assert {name for name, f in vars(rehearsal_faults).items() if callable(f)} >= WHAT.keys()
