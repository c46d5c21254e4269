"""`torchtitan doctor --gpu`: what it says of the node's state, what its ranks measure, and how that
compares with the plan.
"""

import math

import pytest
import torch
import torch.distributed as dist

from torchtitan.commands.doctor import main
from torchtitan.tools.node_check.check import (
    COLLECTIVES,
    RankResult,
    expected,
    read_result,
    report,
    run_ranks,
)
from torchtitan.tools.node_check.rank import Clock, Record, Sizes, measure
from torchtitan.tools.node_check.state import NodeState, refuse_unusable, warnings_of
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.utils.errors import UserError

HEALTHY = {
    "index": "0",
    "uuid": "GPU-1",
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "580.65",
    "memory.total": "81559",
    "memory.used": "4",
    "mig.mode.current": "Disabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.pending": "No",
}

# ---- the node's state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            NodeState(on_bus=8, no_driver="there is no nvidia-smi"),
            "this machine has 8 GPUs of NVIDIA but no driver that answers: there is no nvidia-smi",
        ),
        (
            NodeState(gpus=[HEALTHY], torch="2.13.0+cpu"),
            r"1 GPU \(NVIDIA H100 80GB HBM3\), but torch 2.13.0\+cpu is built for the CPU: install",
        ),
        (
            NodeState(gpus=[HEALTHY] * 2, cuda="13.0", visible=""),
            "CUDA_VISIBLE_DEVICES= hides this machine's 2 GPUs",
        ),
        (
            NodeState(gpus=[HEALTHY], cuda="13.0", visible=None, why_unusable="too old"),
            "1 GPU: too old. Its driver is 580.65, torch is built for CUDA 13.0",
        ),
    ],
    ids=["no driver", "cpu build", "hidden", "old driver"],
)
def test_gpus_that_torch_cannot_use_are_refused(state, message):
    with pytest.raises(UserError, match=message):
        refuse_unusable(state)


def test_a_machine_without_gpus_is_measured():
    refuse_unusable(NodeState())
    assert warnings_of(NodeState()) == []
    assert NodeState(torch="2.13.0").describe().startswith("This machine has no GPU: measuring its")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"memory.used": "40960"}, "GPU 0 is busy: 40.0 of 80 GiB are in use by other processes"),
        ({"mig.mode.current": "Enabled"}, "GPU 0 is split by MIG"),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "had 3 uncorrected memory errors (ECC)"),
        ({"ecc.errors.uncorrected.volatile.total": "[N/A]"}, None),
        ({"remapped_rows.pending": "Yes"}, "bad memory rows to replace"),
    ],
)
def test_warnings(change, message):
    found = warnings_of(NodeState(gpus=[HEALTHY, HEALTHY | change], usable=2))
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_warnings_of_one_gpu_and_of_no_nvidia_smi():
    found = warnings_of(NodeState(usable=1, no_driver="there is no nvidia-smi"))
    assert found[0] == "The state of the GPUs is unknown: there is no nvidia-smi."
    assert found[1].startswith("One GPU: collectives")


# ---- the ranks


def _measure(folder, damaged):
    """Be a rank; of `damaged` collectives, rank 1 spoils what it receives."""
    record = Record(folder / f"rank-{dist.get_rank()}.jsonl")
    exchange = dist.all_to_all_single

    def damage(out, source):
        exchange(out, source)
        out[-1] += dist.get_rank()

    clock = Clock(torch.device("cpu"), 1e-4)
    try:
        dist.all_to_all_single = damage if damaged else exchange
        measure(record, clock, Sizes(16, 2**10, 2**10, 1e-4))
    finally:
        dist.all_to_all_single = exchange
    record.write(done=True)


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_measure_and_check_what_they_receive(ranks, tmp_path, damaged):
    ranks(2, _measure, tmp_path, damaged)
    results = [read_result(tmp_path, rank, 0) for rank in range(2)]
    for result in results:
        assert {*COLLECTIVES, "bfloat16", "float32", "memory"} == set(result.values)
        assert all(0 < value < math.inf for value in result.values.values())
    right, text = report(results, None)
    assert right == (not damaged)
    assert ("rank 1: WRONG numbers from all-to-all." in text) == damaged


def test_a_rank_that_hangs_is_killed_and_named(tmp_path):
    results = run_ranks(1, tmp_path, 0.05)
    right, text = report(results, None)
    assert not right
    assert "Killed when the time was over (--limit): rank 0 starting." in text


def test_a_rank_that_fails_is_named(tmp_path):
    (tmp_path / "log-0.txt").write_text("Traceback\nRuntimeError: NCCL error\n")
    (tmp_path / "rank-0.jsonl").write_text('{"doing": "all-gather"}\n{"cut')
    right, text = report([read_result(tmp_path, 0, 1)], None)
    assert not right
    assert "rank 0 failed while measuring all-gather: RuntimeError: NCCL error" in text


# ---- beside the plan


def test_expectation():
    """By hand, from the constants of the table."""
    hw = find_hardware("h100-sxm")
    found = expected(hw, 8)
    widened = (8192**2 + hw.gemm_ramp) / 8192**2
    deepened = (8192 + hw.gemm_depth) / 8192
    assert found["bfloat16"] == pytest.approx(989e12 * hw.gemm_bf16 / widened / deepened)
    deepened = (8192 + 2 * hw.gemm_depth) / 8192
    assert found["float8"] == pytest.approx(1979e12 * hw.gemm_fp8 / widened / deepened)
    assert found["memory"] == pytest.approx(3.35e12 * 0.8)
    ring = 2**28 * 7 / 8
    link = 450e9 * hw.link_efficiency
    assert found["all-gather"] == pytest.approx(ring / (ring / link + 20e-6))
    assert set(COLLECTIVES) < set(found)
    assert not set(COLLECTIVES) & set(expected(find_hardware("h100-sxm"), 1))
    assert "float8" not in expected(find_hardware("a100"), 8)


def test_report_beside_the_plan():
    hw = find_hardware("h100-sxm")
    plan = expected(hw, 4)
    fast = RankResult(done=True, values=plan | {"all-gather": plan["all-gather"] / 2})
    slow = RankResult(done=True, values=fast.values | {"bfloat16": plan["bfloat16"] / 2})
    slow.about["connect_s"] = 2.5
    fast.about["no_peers"] = [(0, 1)]
    right, text = report([fast, fast, fast, slow], hw)
    assert right
    assert "took 2.5 s" in text
    assert "No peer access between GPUs 0 and 1" in text
    rate = f"{plan['bfloat16'] / 1e12:.0f}"
    assert (
        f"rank 3 is slow in bfloat16: {plan['bfloat16'] / 2e12:.0f}, the median is {rate}" in text
    )
    assert f"Products in bfloat16 run at {rate} of {rate} TFLOP/s" in text
    assert text.endswith("expects of 4 x h100-sxm; below the plan by more than 15%: all-gather.")


# ---- the command


@pytest.mark.parametrize("argv", [[], ["outputs", "--gpu"]])
def test_a_folder_or_gpu(argv, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert "give the folder of a run, or --gpu" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.e2e
def test_on_this_cpu(capsys):
    assert main(["--gpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("This machine has no GPU: measuring its CPU with gloo")
    assert "send/recv at " in out
