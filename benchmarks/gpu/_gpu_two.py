"""Stages of `gpu.py --two-gpus`: what two ranks tell that one can't, on a GPU each, over NCCL.

The stages `ranks_*` belong to them; on one GPU they need an NCCL that shares it.
"""

from collections.abc import Sequence
from statistics import median
from unittest.mock import patch

from _gpu_bench import SMALL, Bench, Beyond, Figures, Skip, column, run_ranks, train
from _gpu_faults import LAYOUTS
from _gpu_rates import rates
from _gpu_speed import AT_8K, MODELS, fill

WARM = 5
TIMED = 15
_LLAMA = (
    "--model.flavor=8B",
    "--model.overrides.n_layers=8",
    *AT_8K,
    "--training.global_batch_size=4",
)
SPEEDS = {
    "fsdp": (*_LLAMA, "--training.local_batch_size=1", *LAYOUTS["fsdp"]),
    "tp": (*_LLAMA, "--training.local_batch_size=2", *LAYOUTS["tp"]),
    "pp": (*_LLAMA, "--training.local_batch_size=4", *LAYOUTS["pp"]),
    "cp": (*_LLAMA, "--training.local_batch_size=2", *LAYOUTS["cp"]),
    "ep": (*(flag for flag in MODELS["moe_of_8"] if "expert_parallel" not in flag), *LAYOUTS["ep"]),
}
"""Flags of a run of two GPUs by its axis: layers of the 8B's shape, or of Qwen3 30B-A3B's."""


def start(bench: Bench) -> Figures:
    """NCCL starts, connects, moves bytes and gets them right, at which rates."""
    _check_gpus(bench)
    return rates(bench, 2)


def speed(bench: Bench, axis: str) -> Figures:
    """Tokens/s and memory of two ranks along `axis`, with real communication."""
    _check_gpus(bench)
    warm, timed = (1, 2) if bench.dry else (WARM, TIMED)
    run = [f"--training.steps={warm + timed}", "--metrics.log_freq=1"]
    argv = bench.flags(*SPEEDS[axis], *run)
    found = run_ranks(bench, 2, _train_filled, argv)[0]
    seconds = column(found[warm:], "step_time_s")
    rates = column(found[warm:], "tokens_per_second")
    return {
        "flags": SPEEDS[axis],
        "world": 2,
        "rate_per_gpu": median(rates),
        "step_s": median(seconds),
        "step_s_min": min(seconds),
        "step_s_max": max(seconds),
        "first_step_s": found[0]["step_time_s"],
        "peak_reserved_gib": max(column(found, "memory_gib")),
    }


def _train_filled(argv: list[str]) -> list[Figures]:
    """`train` from weights that are quick to make."""
    with patch("torchtitan.parallel.init._fill", fill):
        return train(argv)


def saves(bench: Bench) -> Figures:
    """A save of each rank's shard while they train: what the steps beside it cost, and a resume
    that continues bit for bit.
    """
    _check_gpus(bench)
    half, steps = (2, 4) if bench.dry else (10, 20)
    wide = () if bench.dry else ("--model.overrides.dim=2048", "--model.overrides.ffn_dim=8192")
    flags = [
        *SMALL,
        *wide,
        *LAYOUTS["fsdp"],
        "--checkpoint.enable=true",
        f"--checkpoint.interval={half}",
        "--checkpoint.async_mode=async_with_pinned_mem",
        f"--lr_scheduler.total_steps={steps}",
        "--debug.deterministic=true",
    ]
    whole = run_ranks(bench, 2, train, bench.flags(*flags, f"--training.steps={steps}"))[0]
    again = bench.flags(*flags, name="again")
    run_ranks(bench, 2, train, [*again, f"--training.steps={half}"])
    resumed = run_ranks(bench, 2, train, [*again, f"--training.steps={steps}"])[0]
    seconds = column(whole, "step_time_s")
    differ = [a["step"] for a, b in zip(whole, resumed, strict=True) if a["loss"] != b["loss"]]
    figures = {
        "step_s": median(seconds[1:half]),
        "step_after_save_s": seconds[half],
        "slowest_step_beside_save_s": max(seconds[half:]),
        "steps_that_differ": len(differ),
    }
    if differ:
        raise Beyond([f"the resumed run differs in steps {differ}"], figures)
    return figures


def _check_gpus(bench: Bench) -> None:
    """
    Raises:
        Skip: there is only one.
    """
    import torch

    if not bench.dry and torch.cuda.device_count() < 2:
        raise Skip("needs two GPUs")


def names(stages: Sequence[str]) -> list[str]:
    """Those of `stages` that `--two-gpus` runs, in their order."""
    return [name for name in stages if name.startswith(("two_", "ranks_"))]
