"""Exchanges of experts' rows of a fixed size: equal to counted ones bit for bit, also where rows
had no room; and how often the host waits.
"""

import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.runs import EXPERTS, SAVE, SCHEDULE, arguments, full, losses, train
from torchtitan.config import resolve
from torchtitan.parallel import exchange
from torchtitan.parallel.exchange import FixedExchange, by_expert, to_slots
from torchtitan.parallel.room import Room, room_for
from torchtitan.train.callbacks import Callback
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer

P = "--parallelism."
EP = f"{P}expert_parallel_degree=2"
FIXED = f"{P}expert_parallel_exchange=fixed"
PIPELINE = [f"{P}pipeline_parallel_degree=2", "--model.overrides.n_layers=4"]
MEASURED = (
    "time",
    "tokens_per_second",
    "tflops",
    "step_time",
    "data_loading",
    "memory",
    "redone",
    "empty",
)
CASES = {
    "plain": (2, []),
    "accumulated, by a guard's leave": (
        2,
        ["--training.global_batch_size=16", "--guard.policy=skip", "--ema.enable"],
    ),
    "qk-clip, sources, full checkpoints": (
        2,
        [
            "--optimizer.qk_clip=0.001",
            "--model.overrides.qk_norm=false",
            "--activation_checkpoint.mode=full",
            "--training.document_mask",
            "--training.sources=[{name='a', dataset_path='CORPUS'}, "
            "{name='b', dataset_path='CORPUS', weight=2}]",
        ],
    ),
    "tensor parallel, by operation": (
        2,
        [
            f"{P}tensor_parallel_degree=2",
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ],
    ),
    "context parallel, chunked loss": (
        2,
        [f"{P}context_parallel_degree=2", "--training.loss_chunks=2"],
    ),
    "replicated": (4, [f"{P}data_parallel_replicate_degree=2"]),
    "1F1B": (4, PIPELINE),
    "zero bubble": (4, [*PIPELINE, f"{P}pipeline_parallel_schedule=ZBVZeroBubble"]),
    "DualPipeV": (
        4,
        [*PIPELINE, f"{P}pipeline_parallel_schedule=DualPipeV", "--training.local_batch_size=4"],
    ),
    "offloaded": (2, ["--training.enable_cpu_offload"]),
    "Muon, activations offloaded": (
        2,
        ["--optimizer.name=Muon", "--activation_checkpoint.offload_blocks=-1"],
    ),
    "Float8": (
        2,
        [
            "--model.converters=quantize.grouped_mm.float8",
            "--quantize.grouped_mm.float8.fqns=experts",
            "--quantize.grouped_mm.float8.emulate",
        ],
    ),
    "MXFP8": (
        2,
        [
            "--model.converters=quantize.grouped_mm.mx",
            "--quantize.grouped_mm.mx.fqns=experts",
            "--quantize.grouped_mm.mx.recipe_name=mxfp8_emulated",
        ],
    ),
    "gpt_oss, with biases": (2, ["--model.name=gpt_oss", "--model.overrides.expert_dim=32"]),
    "deepseek_v3, with further tokens": (
        2,
        [
            "--model.name=deepseek_v3",
            "--model.overrides.n_mtp=1",
            "--model.overrides.n_kv_heads=4",
            "--model.overrides.expert_dim=32",
        ],
    ),
    "compiled": (2, ["--compile.enable"]),
}
SUITE = ("qk-clip, sources, full checkpoints",)
"""In the suite, with fewer steps."""


def trained_with(argv, factor):
    """A run whose exchanges have room for `factor` times the rows of recent steps, and how many of
    its steps were done again.
    """
    repeated = []

    def tight(rows, headroom):
        return max(1, int(rows * factor))

    explain = mock.patch.object(
        FixedExchange, "_explain", lambda self: repeated.append(self.redone)
    )
    with explain, mock.patch.object(exchange, "room_for", tight if factor else room_for):
        run = train(argv)
    return run, len(repeated)


def outcome(folder, run):
    metrics = [
        {key: value for key, value in record.items() if not key.startswith(MEASURED)}
        for record in run["metrics"]
    ]
    loads = (folder / "out/expert_load.jsonl").read_text()
    return metrics, [json.loads(line) for line in loads.splitlines()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SUITE else pytest.mark.slow) for name in CASES]
)
def test_fixed_is_counted(ranks, tmp_path, name):
    """Also if hardly a step's rows have room."""
    world, extra = CASES[name]
    family = [] if any("model.name" in arg for arg in extra) else EXPERTS
    runs = {}
    steps = 3 if name in SUITE else 5
    for kind, flags, factor in (("counted", [], 0), ("fixed", [FIXED], 0), ("tight", [FIXED], 0.6)):
        (tmp_path / kind).mkdir()
        argv = arguments(tmp_path / kind, *family, EP, *extra, *flags, steps=steps)
        if "sources" in name:
            corpus = str(tmp_path / kind / "corpus.jsonl")
            argv = [a.replace("CORPUS", corpus) for a in argv if "--training.dataset" not in a]
        run, repeated = ranks(world, trained_with, argv, factor, timeout=300)[0]
        assert run["metrics"][-1].get("redone_steps", 0) == repeated
        runs[kind] = (outcome(tmp_path / kind, run), run["weights"], run["average"], repeated)
    expected = runs["counted"]
    for kind in ("fixed", "tight"):
        found = runs[kind]
        assert found[0] == expected[0], kind
        for ours, theirs in zip(found[1:3], expected[1:3], strict=True):
            assert all(torch.equal(ours[key], value) for key, value in theirs.items()), kind
    assert runs["fixed"][3] <= 1
    assert runs["tight"][3] == steps - 1, "all but the first, which counts"


@pytest.mark.slow
def test_fixed_is_counted_when_a_run_resumes_and_its_rows_get_longer(ranks, tmp_path):
    """Both leave nothing to learn sizes from, so the next step counts."""
    stages = "[{from_step = 4, seq_len = 64, global_batch_size = 4, local_batch_size = 2}]"
    extra = [*EXPERTS, EP, *SAVE, SCHEDULE, f"--training.stages={stages}"]
    argv = arguments(tmp_path, *extra, f"--job.dump_folder={tmp_path / 'whole'}", steps=6)
    whole = ranks(2, train, argv)[0]
    repeated = 0
    for steps in (2, 6):
        argv = arguments(tmp_path, *extra, FIXED, steps=steps)
        run, more = ranks(2, trained_with, argv, 0.6)[0]
        repeated += more
    assert losses(run) == losses(whole)
    assert all(torch.equal(run["weights"][key], value) for key, value in whole["weights"].items())
    assert repeated == 6 - 3, "all but the first of each start and of the stage"


class Norms(Callback):
    """Notes the norm of one gradient before each update."""

    def __init__(self):
        self.found = []

    def before_update(self, run):
        gradient = next(p.grad for p in run.models[0].parameters() if p.grad is not None)
        self.found.append(float(full(gradient).norm()))


def seen_by_a_callback(argv):
    norms = Norms()
    config = resolve(argv, 2).config
    room = mock.patch.object(exchange, "room_for", lambda rows, headroom: max(1, int(rows * 0.6)))
    with room:
        trainer = Trainer(config, preflight(config), callbacks=[norms])
        optimizer = trainer.parts.optimizer
        with mock.patch.object(optimizer, "step", wraps=optimizer.step) as step:
            trainer.train()
        trainer.close()
    repeated = trainer.parts.exchange
    return norms.found, step.call_count, repeated and repeated.redone


@pytest.mark.slow
def test_a_callback_sees_only_the_gradients_that_count(ranks, tmp_path):
    """And before each update, so that a save in the background has copied what changes."""
    counted, fixed = (
        ranks(2, seen_by_a_callback, arguments(tmp_path, *EXPERTS, EP, *flags, steps=3))[0]
        for flags in ([], [FIXED])
    )
    assert fixed == (counted[0], 3, 2)
    assert len(counted[0]) == 3


# ---- slots


def test_rows_come_to_their_experts_in_order_and_back():
    """Against sorting by hand: 3 ranks of 2 experts, some without rows, and some slots unused."""
    counts = torch.tensor([[3, 0, 1, 2, 0, 4], [0, 0, 5, 0, 1, 1], [2, 2, 2, 2, 0, 0]])
    room = Room(pair=6, rank=13)
    sent = []
    for rank, own in enumerate(counts):
        rows = [(expert, rank, i) for expert, n in enumerate(own.tolist()) for i in range(n)]
        row_of, slot_of = to_slots(own.cumsum(0).int(), 3, room.pair, len(rows))
        slots = [rows[i] for i in row_of.tolist()]
        assert [slots[i] for i in slot_of.tolist()] == rows, "they come back"
        sent.append((slots, rows))
    for rank in range(3):
        arriving = counts[:, 2 * rank : 2 * rank + 2]
        slots = [row for own, _ in sent for row in own[rank * 6 : rank * 6 + 6]]
        order, place, ends = by_expert(arriving, room)
        rows = [slots[i] for i in order.tolist()]
        mine = {2 * rank, 2 * rank + 1}
        expected = sorted(row for _, own in sent for row in own if row[0] in mine)
        assert rows[: ends[-1]] == expected
        assert ends.tolist() == arriving.sum(0).cumsum(0).tolist()
        assert len(rows) == room.rank
        used = [i for r in range(3) for i in range(6 * r, 6 * r + int(arriving[r].sum()))]
        assert [rows[i] for i in place[used].tolist()] == [slots[i] for i in used]


def test_rows_without_room_break_nothing():
    counts = torch.tensor([[9, 0, 0, 3], [0, 7, 0, 0]])
    row_of, slot_of = to_slots(counts[0].cumsum(0).int(), 2, 4, 12)
    assert row_of.max() < 12
    assert slot_of.max() < 8
    order, place, ends = by_expert(counts[:, :2], Room(pair=4, rank=5))
    assert (order.min() >= 0, order.max() < 8, len(order)) == (True, True, 5)
    assert (place.min() >= 0, place.max() < 5, len(place)) == (True, True, 8)
    assert ends.tolist() == [4, 5]


def test_sizes_are_rounded_up_coarsely():
    assert [room_for(rows, 1.0) for rows in (0, 5, 16, 33, 100, 1000, 1030)] == [
        0,
        5,
        16,
        34,
        100,
        1024,
        1088,
    ]
    assert room_for(100, 1.25) == 128


def test_only_steps_with_slots_say_how_many_are_empty():
    experts = SimpleNamespace(empty=0.5)
    sizes = FixedExchange({0: experts}, 1, 1.1, torch.device("cpu"))
    for said in ({}, {"empty_slots_pct": 50.0}):
        sizes.read([4, 6])
        sizes.learn()
        assert sizes.take() == {"redone_steps": 0} | said
    sizes.forget()
    sizes.read([4, 6])
    sizes.learn()
    assert sizes.take() == {"redone_steps": 0}


# ---- waits


def waits(argv, layers):
    """Places where the host reads tensors in the third step of a run, but for the loops over groups
    that stand for CUDA's kernels.
    """
    places = []

    def reading(name):
        read = getattr(torch.Tensor, name)

        def counted(self, *args):
            frame = sys._getframe(1)
            if not frame.f_code.co_filename.endswith("models/grouped.py"):
                places.append(f"{name} in {frame.f_code.co_qualname}")
            return read(self, *args)

        return mock.patch.object(torch.Tensor, name, counted)

    config = resolve([*argv, f"--model.overrides.n_layers={layers}"], 2).config
    trainer = Trainer(config, preflight(config))
    batches = iter(trainer.parts.loader)
    for _ in range(2):
        trainer._train_one(batches)
    with reading("tolist"), reading("item"), reading("__bool__"), reading("cpu"):
        trainer._train_one(batches)
    trainer.close()
    return places


def test_a_step_waits_once_whatever_the_depth(ranks, tmp_path):
    found = {}
    for kind, flags in (("counted", []), ("fixed", [FIXED])):
        for layers in (2, 6):
            argv = arguments(tmp_path, *EXPERTS, EP, *flags, "--metrics.log_freq=100")
            found[kind, layers] = ranks(2, waits, argv, layers)[0]
    once = ["tolist in forward_backward"]
    assert found["fixed", 2] == found["fixed", 6] == once
    for layers in (2, 6):  # of two batches each
        assert found["counted", layers] == 2 * layers * ["tolist in _splits"] + once
