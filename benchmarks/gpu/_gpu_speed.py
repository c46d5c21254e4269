"""Stages of `gpu.py` that measure speed and memory: tokens/s, MFU, peak memory, and where a step's
time goes.

8B and 70B run as one rank of 8 and of 64 on a fake process group, whose collectives copy what this
rank has: the real kernels at the true sizes of the shards. Without communication that is an upper
bound of the speed, and close to the memory of a real run.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from _gpu_bench import Bench, Figures, Skip, column, train
from _gpu_fake import copying_collectives
from _gpu_load import summary
from _gpu_watch import Watched, gpu_now

WARM = 5
"""Steps that compile and allocate, and aren't timed."""
TIMED = 20
"""Steps that are timed; one more is profiled."""

AT_8K = ("--training.seq_len=8192", "--activation_checkpoint.mode=none", "--compile.enable=true")
MODELS = {
    "8b_layers": (
        "--model.flavor=8B",
        "--model.overrides.n_layers=8",
        "--training.local_batch_size=1",
        "--training.global_batch_size=4",  # an update of unsharded weights is long
        *AT_8K,
    ),
    "1b": ("--model.flavor=1B", "--training.local_batch_size=2", *AT_8K),
    "3b": ("--model.flavor=3B", "--training.local_batch_size=2", *AT_8K),
    "8b_of_8": ("--job.config_file=llama3_8b",),
    "8b_tp8": (
        "--job.config_file=llama3_8b",
        "--parallelism.tensor_parallel_degree=8",
        "--compile.enable=false",
    ),
    "moe_of_8": (
        "--model.name=qwen3_moe",
        "--model.flavor=30B-A3B",
        "--model.overrides.n_layers=8",
        "--parallelism.expert_parallel_degree=8",
        "--training.local_batch_size=1",
        *AT_8K,
    ),
    "70b_of_64": (
        "--job.config_file=llama3_70b",
        "--parallelism.enable_async_tensor_parallel=false",  # needs the other ranks' memory
    ),
}
"""All state of a model is in fp32 on one GPU, so an 8B has 8 layers there."""
FLOAT8 = "--model.converters=float8"
VARIANTS = {
    "": (),
    "eager": ("--compile.enable=false",),
    "selective_op": (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ),
    "full": ("--activation_checkpoint.mode=full",),
    "loss_chunks_8": ("--training.loss_chunks=8",),
    "float8_tensorwise": (FLOAT8, "--quantize.linear.float8.filter_fqns=output"),
    "float8_rowwise": (
        FLOAT8,
        "--quantize.linear.float8.filter_fqns=output",
        "--quantize.linear.float8.recipe_name=rowwise",
    ),
}


def speed(
    bench: Bench,
    model: str,
    variant: str = "",
    *,
    world: int = 1,
    gib: float = 0,
    steps: int = TIMED,
) -> Figures:
    """Train a few steps of `model` and measure them.

    Args:
        world: if more than 1, be rank 0 of a fake process group of this size.
        gib: memory that the device needs.
        steps: number of timed steps; a multiple of `WARM`.
    """
    import torch

    if not bench.dry and (total := torch.cuda.get_device_properties(0).total_memory / 2**30) < gib:
        raise Skip(f"needs a device with {gib:g} GiB, this one has {total:.0f}")
    flags = [*MODELS[model], *VARIANTS[variant]]
    warm, timed = (1, 2) if bench.dry else (WARM, steps)
    run = [
        f"--training.steps={warm + timed + 1}",
        f"--metrics.log_freq={warm}",
        "--training.on_nonfinite=skip",
    ]
    watched = Watched(bench, warm, warm + timed)
    cached = compiled_before()
    before = gpu_now()
    with _one_of(world), watched.load:
        found = train(bench.flags(*flags, *run), [watched.callback()], world)
    seconds = median(watched.seconds)
    rate = watched.tokens / seconds
    mfu = 100 * rate * watched.flops / watched.peak_flops if watched.peak_flops else None
    updates = median(watched.update_ms) / 1e3
    return {
        "flags": flags,
        "world": world,
        "upper_bound": world > 1,  # of the speed: collectives take no time
        "tokens_per_second": rate,
        "mfu": mfu,
        "mfu_without_update": mfu and mfu * seconds / (seconds - updates),
        "step_s": seconds,
        "step_s_min": min(watched.seconds),
        "step_s_max": max(watched.seconds),
        "timed_steps": len(watched.seconds),
        "update_ms": 1e3 * updates,
        "head_flops_pct": 100 * watched.head_flops / watched.flops,
        "first_step_s": watched.first,
        "cached_graphs": cached,
        "peak_reserved_gib": max(column(found, "memory_gib")),
        "peak_allocated_gib": watched.allocated / 2**30,
        "alloc_retries": watched.retries,
        "data_loading_pct": max(column(found[1:], "data_loading_pct")),
        "loss": found[-1]["loss"],
        "skipped_steps": found[-1]["skipped_steps"],
        "gpu": {"before": before, "timed": summary(watched.rows), "after": gpu_now()},
        "kernels": watched.kernels,
        "kernels_ms": watched.kinds,
    }


def compiled_before() -> int:
    """Graphs in inductor's cache: with some, the first step of an earlier stage compiled."""
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "none"), "fxgraph")
    return sum(1 for _ in folder.glob("*/*"))


def update(bench: Bench, optimizer: str) -> Figures:
    """Gradient norm and update of the 8B's parameters, as one rank of 8: milliseconds of the host
    and of the device, and kernels.
    """
    import torch

    from torchtitan.train import step
    from torchtitan.train.callbacks import Callback

    steps = 3 if bench.dry else 12
    flags = [
        "--job.config_file=llama3_8b",
        f"--optimizer.name={optimizer}",
        "--training.seq_len=512",
        "--compile.enable=false",
        "--training.on_nonfinite=skip",
        "--metrics.log_freq=1",
        f"--training.steps={steps}",
    ]
    calls: dict[str, list[Figures]] = {"norm": [], "update": []}

    def measured(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _measuring(calls[name], last=len(calls[name]) == steps - 1):
                return function(*args, **kwargs)

        return call

    class Measuring(Callback):
        def on_start(self, run: Any) -> None:
            run.optimizer.step = measured("update", run.optimizer.step)

    first, second = (
        patch.object(kind, "clip", measured("norm", kind.clip))
        for kind in (step.Update, step.HostUpdate)
    )
    with _one_of(8), first, second:
        train(bench.flags(*flags), [Measuring()], 8)
    figures: Figures = {"flags": flags, "world": 8, "cuda": torch.version.cuda}
    for name, found in calls.items():
        timed = found[1:-1]  # the first allocates, the last is profiled
        for key in ("host_ms", "device_ms"):
            figures[f"{name}_{key}"] = median(column(timed, key))
            figures[f"{name}_{key}_min"] = min(column(timed, key))
            figures[f"{name}_{key}_max"] = max(column(timed, key))
        figures[f"{name}_kernels"] = found[-1]["kernels"]
    return figures


@contextmanager
def _measuring(found: list[Figures], *, last: bool) -> Iterator[None]:
    """Append what happens inside: its time and, the last time, its kernels (operators on the
    CPU).
    """
    import torch

    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else lambda: None
    wait()
    activity = torch.profiler.ProfilerActivity
    profile = torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU])
    began = time.perf_counter()
    with profile if last else nullcontext():
        yield
        host = time.perf_counter()
        wait()
    done = time.perf_counter()
    kernels = 0
    if last:
        where = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
        kernels = sum(event.device_type == where for event in profile.events())
    found.append(
        {"host_ms": 1e3 * (host - began), "device_ms": 1e3 * (done - began), "kernels": kernels}
    )


@contextmanager
def _one_of(world: int) -> Iterator[None]:
    """Be rank 0 of `world` ranks, of which more than one are simulated, with any weights."""
    from torchtitan.parallel import agree
    from torchtitan.tools.rehearsal.fake import fake_cluster

    with ExitStack() as stack:
        stack.enter_context(patch("torchtitan.parallel.init._fill", fill))
        if world > 1:
            stack.enter_context(fake_cluster(world, 0))
            stack.enter_context(copying_collectives())
            stack.enter_context(patch.object(agree, "from_all", lambda value: [value]))
        yield


def fill(param: Any, fqn: str, seed: int, init: Any) -> None:
    """Initialize a parameter where it is. The layout-invariant values are made on the CPU, which
    takes half a minute for 3B, and the values of the weights don't matter here.
    """
    import torch

    local = param.to_local() if hasattr(param, "to_local") else param
    with torch.no_grad():
        local.fill_(1.0) if init.kind == "ones" else local.normal_(0.0, init.std)
