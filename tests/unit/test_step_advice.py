"""What a run is told about time that it spends for nothing: when, and when not."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.plans import FULL, NONE, ONE_ROW, OP, workload
from torchtitan.tools.planner.memory import GIB, memory_of
from torchtitan.train import built_in
from torchtitan.train.advice import unneeded_launches, unneeded_recomputation
from torchtitan.utils.device import free_memory

SMALL = ["--model.flavor=1B", "--training.seq_len=2048", "--training.local_batch_size=1"]
EVERY = "--activation_checkpoint.selective_ac_option"


def said(*argv, free=20.0):
    w = workload(*SMALL, *argv)
    return unneeded_recomputation(w.config, SimpleNamespace(args=w.args, stages=None), free)


def test_recomputation_is_named_where_memory_is_free():
    """Shares of a step by hand: of 3 forwards, one in k is repeated."""
    free = "and 20.0 GiB are free"
    assert "takes about 14 % of a step and saves 1.3 GiB, " + free in said()
    assert "takes about 8 %" in said(EVERY + "=4")
    assert "takes about 25 %" in said(FULL)
    assert "takes about 11 %" in said(*OP)  # wk, wo and w3: 5.25 of 14.5 squares of dim


@pytest.mark.parametrize("flags", [(), (FULL,), OP, ("--compile.enable",)])
def test_the_memory_is_what_a_plan_adds(flags):
    before, after = (memory_of(workload(*SMALL, *argv), 0) for argv in (flags, (NONE,)))
    if flags == ("--compile.enable",):
        after = memory_of(workload(*SMALL, *flags, NONE), 0)
    more = (after.by_category["activations"] - before.by_category["activations"]) / GIB
    assert f"saves {more:.2g} GiB" in said(*flags, free=2.01 * more)
    assert said(*flags, free=1.99 * more) is None


@pytest.mark.parametrize(
    "flags", [(NONE,), ("--activation_checkpoint.offload_blocks=-1",)], ids=["none", "offload"]
)
def test_nothing_is_said_where_nothing_is_to_gain(flags):
    assert said(*flags) is None


@pytest.mark.parametrize(
    ("device", "flags", "lines"),
    [
        ("cpu", [], ["Recomputing"]),
        ("cuda", [], ["Recomputing", "The host launches"]),
        ("cuda", ["--compile.enable"], ["Recomputing"]),
        ("cuda", ["--compile.enable", NONE], []),
        ("cuda", [NONE], ["The host launches"]),
    ],
)
def test_it_is_said_once(device, flags, lines):
    """Steps of two seconds."""
    w = workload(*ONE_ROW, "--model.flavor=1B", "--training.steps=400", *flags)
    progress = SimpleNamespace(step=0)
    run = SimpleNamespace(device=torch.device(device), config=w.config, progress=progress)
    with (
        mock.patch.object(built_in.dist, "get_rank", return_value=0),
        mock.patch("psutil.virtual_memory", return_value=SimpleNamespace(available=60 * GIB)),
        mock.patch("torch.cuda.mem_get_info", return_value=(20 * GIB, 24 * GIB)),
        mock.patch("torchtitan.train.advice.missing_for_kernels", return_value=""),
        mock.patch.object(built_in.logger, "info") as info,
        mock.patch.object(built_in.time, "monotonic") as clock,
    ):
        advise = built_in.Advise(SimpleNamespace(args=w.args, stages=None))
        for step in range(1, 6):
            progress.step = step
            clock.return_value = 2.0 * step
            advise.after_step(run, None)
            told = [call.args[0] for call in info.call_args_list]
            assert len(told) == (len(lines) if step >= 3 else 0)
    assert all(text.startswith(line) for text, line in zip(told, lines, strict=True))


@pytest.mark.parametrize(("missing", "seconds"), [("no compiler", 601.0), ("", 599.0)])
def test_eager_blocks_are_right_for_short_runs_and_without_a_compiler(missing, seconds):
    config = workload(*SMALL).config
    with mock.patch("torchtitan.train.advice.missing_for_kernels", return_value=missing):
        assert unneeded_launches(config, seconds) is None


def test_a_container_may_have_less_memory_than_its_machine(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    free = free_memory(cpu, tmp_path)
    (tmp_path / "memory.current").write_text("1048576\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(cpu, tmp_path) == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("3145728\n")
    assert free_memory(cpu, tmp_path) == 2 / 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_memory(cpu, tmp_path) == 1 / 1024
