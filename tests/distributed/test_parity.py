"""The numbers don't depend on the layout: every layout's run equals a plain single-process loop."""

import pytest
import torch

from tests.rounding import assert_trained_alike
from tests.runs import LR, arguments, losses, train
from torchtitan.testing.reference import run_reference

STEPS = 10

LAYOUTS = {
    "one process, accumulating": (1, ["--training.local_batch_size=2"]),
    "fsdp 2": (2, ["--training.local_batch_size=4"]),
    "fsdp 2, accumulating": (2, ["--training.local_batch_size=1"]),
    "fsdp 4": (4, ["--training.local_batch_size=2"]),
    "fsdp 4, accumulating": (4, ["--training.local_batch_size=1"]),
    "fsdp 2, never resharded": (2, ["--parallelism.fsdp_reshard_after_forward=never"]),
    "fsdp 2, always resharded": (2, ["--parallelism.fsdp_reshard_after_forward=always"]),
    "fsdp 2, offloaded": (2, ["--training.enable_cpu_offload"]),
    "hsdp 2 x 2": (
        4,
        ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=1"],
    ),
    "ddp 2": (
        2,
        ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=4"],
    ),
    "ddp 2, accumulating": (
        2,
        ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=2"],
    ),
}


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    """What plain PyTorch computes on one process."""
    argv = arguments(tmp_path_factory.mktemp("reference"), steps=STEPS, local_batch=8)
    return ranks(1, run_reference, argv)[0]


@pytest.fixture(scope="module")
def initial(ranks, tmp_path_factory):
    """Weights before training on one process."""
    return ranks(1, train, arguments(tmp_path_factory.mktemp("initial"), steps=1, local_batch=8))[
        0
    ]["initial"]


SUITE = ("one process, accumulating", "fsdp 2, accumulating", "hsdp 2 x 2")
"""The support matrix has each axis."""


@pytest.mark.parametrize(
    "layout", [x if x in SUITE else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS]
)
def test_curve_and_weights_equal_a_plain_loop(ranks, reference, initial, tmp_path, layout):
    world, extra = LAYOUTS[layout]
    results = ranks(
        world, train, arguments(tmp_path, *extra, steps=STEPS, local_batch=2), timeout=120
    )
    run = results[0]
    for name, value in initial.items():
        assert torch.equal(run["initial"][name], value), f"initial {name}"
    assert losses(run) == pytest.approx(reference.losses, rel=1e-5)
    assert [r["grad_norm"] for r in run["metrics"]] == pytest.approx(reference.grad_norms, rel=1e-4)
    assert run["metrics"][-1]["tokens"] == STEPS * 8 * 32
    for name, value in reference.weights[-1].items():
        assert_trained_alike(run["weights"][name], value[0], LR, STEPS, name)
        for other in results[1:]:
            assert torch.equal(other["weights"][name], run["weights"][name]), (
                f"ranks disagree on {name}"
            )


def test_the_reference_learns(reference):
    """Guards the comparison: curves that don't move would agree under any mistake."""
    assert reference.losses[-1] < reference.losses[0] - 1


@pytest.mark.parametrize(
    ("dtype", "param"),
    [("float32", "bfloat16"), pytest.param("bfloat16", "bfloat16", marks=pytest.mark.slow)],
)
def test_bf16_stays_near_fp32(ranks, reference, tmp_path, dtype, param):
    extra = [f"--training.dtype={dtype}", f"--training.mixed_precision_param={param}"]
    run = ranks(2, train, arguments(tmp_path, *extra, steps=STEPS))[0]
    assert losses(run) == pytest.approx(reference.losses, rel=0.03)
    assert losses(run) != pytest.approx(reference.losses, rel=1e-6)
    assert run["weights"]["output.weight"].dtype == getattr(torch, dtype)


def test_two_runs_are_identical(ranks, tmp_path):
    argv = [
        arguments(tmp_path, f"--job.dump_folder={tmp_path / name}", "--debug.deterministic")
        for name in "ab"
    ]
    first, second = (ranks(2, train, args)[0] for args in argv)
    assert losses(first) == losses(second)


def test_another_seed_is_another_run(ranks, tmp_path):
    argv = [
        arguments(tmp_path, f"--job.dump_folder={tmp_path / s}", f"--debug.seed={s}") for s in "12"
    ]
    first, second = (ranks(1, train, args)[0] for args in argv)
    assert losses(first) != losses(second)
