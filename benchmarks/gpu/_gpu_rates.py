"""Rates of a machine's ranks, measured together: matrix products, copies of memory, and each kind
of collective, whose numbers are checked; and the planner's expectation of each.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from _gpu_bench import Bench, Beyond, Figures, gpus, run_ranks

ROUNDS = 3
"""Number of repetitions; their median is the result."""
PRODUCTS = ("bfloat16", "float32", "float8")
MEMORY = "memory"
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send/recv")


class Sizes(NamedTuple):
    """How much is computed and sent."""

    product: int
    """Rows, columns and depth of a matrix product."""
    copied: int
    """Bytes of a copy within the device's memory."""
    moved: int
    """Bytes of the largest tensor of a collective on each rank."""
    seconds: float
    """Approximate duration of a measurement."""


CUDA = Sizes(8192, 2**30, 2**28, 0.6)
CPU = Sizes(64, 2**16, 2**12, 0.003)


def rates(bench: Bench, world: int) -> Figures:
    """The slowest rank's rates: FLOP/s of products, bytes/s of all else.

    Raises:
        Beyond: a collective returned wrong numbers.
    """
    found = run_ranks(bench, world, measure)
    names = [name for name in found[0] if name != "wrong"]
    figures: Figures = {name: min(rank[name] for rank in found) for name in names}
    if gpus(bench) >= world > 1:
        figures["without_peer_access"] = without_peer_access(world)
    wrong = [f"rank {rank}: {', '.join(r['wrong'])}" for rank, r in enumerate(found) if r["wrong"]]
    if wrong:
        raise Beyond([f"wrong numbers on {'; '.join(wrong)}"], figures)
    return figures


def without_peer_access(world: int) -> list[tuple[int, int]]:
    """Pairs of GPUs that can't read each other's memory: their data goes through the host's."""
    import torch

    pairs = [(i, j) for j in range(world) for i in range(j)]
    return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


def measure() -> Figures:
    """This rank's rates, and the collectives that returned wrong numbers as `wrong`. All ranks
    measure at the same time.
    """
    import torch
    import torch.distributed as dist

    from torchtitan.config.sections.schema import Comm
    from torchtitan.parallel.groups import init_distributed
    from torchtitan.utils.device import current_device, tune_cpu

    device = current_device()
    tune_cpu()
    sizes = CUDA if device.type == "cuda" else CPU
    init_distributed(Comm(), device)
    seconds = partial(_seconds, device=device, budget=sizes.seconds)
    figures: Figures = {
        name: flops / seconds(work) for name, work, flops in products(device, sizes.product)
    }
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    figures[MEMORY] = 2 * sizes.copied / seconds(partial(target.copy_, source))
    wrong = []
    for collective in collectives(device, sizes.moved) if dist.get_world_size() > 1 else ():
        collective.run()
        wrong += [] if collective.right() else [collective.name]
        collective.source.zero_()
        figures[collective.name] = collective.moved / seconds(collective.run)
    dist.destroy_process_group()
    return figures | {"wrong": wrong}


def _seconds(work: Callable[[], Any], device: Any, budget: float) -> float:
    """Seconds of one call, which all ranks make equally often."""
    import torch
    import torch.distributed as dist

    def smallest(value: float) -> float:
        common = torch.tensor(value, device=device)
        dist.all_reduce(common, dist.ReduceOp.MIN)
        return common.item()

    def run(times: int) -> float:
        smallest(0.0)  # ranks begin together
        began = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    run(1)
    times = max(1, math.ceil(smallest(budget / ROUNDS / max(run(1), 1e-7))))
    return median(run(times) for _ in range(ROUNDS)) / times


def products(device: Any, n: int) -> Iterator[tuple[str, Callable[[], Any], float]]:
    """Name, work and FLOPs of the square products that this device computes."""
    import torch

    flops = 2.0 * n**3
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        yield f"{dtype}".removeprefix("torch."), partial(torch.mm, left, right), flops
    nvidia = device.type == "cuda" and not torch.version.hip
    if nvidia and torch.cuda.get_device_capability(device) >= (8, 9):
        left, right = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        scaled = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        yield "float8", partial(scaled, left, right.t(), use_fast_accum=True), flops


class Collective(NamedTuple):
    """A collective, its tensors, and what they should hold after it."""

    name: str
    call: Callable[[Any, Any], Any]
    """Communicates from the second tensor to the first."""
    source: Any
    """Holds this rank's number everywhere."""
    out: Any
    expected: Any
    """`[parts, 1]`: what each part of `out` should hold."""
    moved: float
    """Bytes that a rank sends in a ring, of an all-to-all those that leave it."""

    def run(self) -> None:
        self.call(self.out, self.source)

    def right(self) -> bool:
        return bool((self.out.view(len(self.expected), -1) == self.expected).all())


def collectives(device: Any, size: int) -> Iterator[Collective]:
    """The kinds of collectives that training uses, over all ranks."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    elements = size // dtype.itemsize // world
    away = elements * dtype.itemsize * (world - 1)

    def parts(number: int, value: int = -1) -> Any:
        return torch.full((number * elements,), value, dtype=dtype, device=device)

    def expected(*values: int) -> Any:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    def shift(out: Any, source: Any) -> None:
        pair = [
            dist.P2POp(dist.isend, source, (rank + 1) % world),
            dist.P2POp(dist.irecv, out, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    gathered, total = expected(*range(world)), expected(sum(range(world)))
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    yield Collective("all-gather", gather, parts(1, rank), parts(world), gathered, away)
    yield Collective("reduce-scatter", scatter, parts(world, rank), parts(1), total, away)
    both = parts(world, rank)
    yield Collective("all-reduce", lambda out, _: dist.all_reduce(out), both, both, total, 2 * away)
    exchange = dist.all_to_all_single
    yield Collective("all-to-all", exchange, parts(world, rank), parts(world), gathered, away)
    sent, before = parts(world, rank), expected((rank - 1) % world)
    yield Collective("send/recv", shift, sent, parts(world), before, sent.nbytes)


# ---- the planner's expectation


def expected_rates(hw: Any, ranks: int) -> dict[str, float]:
    """What the plan expects of each measurement on a GPU, in FLOP/s and bytes/s.

    Args:
        hw: the planner's `Hardware`.
    """
    n = CUDA.product
    peaks = {
        "bfloat16": hw.bf16 * hw.gemm_bf16,
        "float32": hw.fp32 * hw.gemm_bf16,
        "float8": hw.fp8 * hw.gemm_fp8,
    }
    plan = {
        name: 2 * n**3 / hw.product_seconds(n, n, n, rate) for name, rate in peaks.items() if rate
    }
    plan[MEMORY] = hw.bytes_per_s
    if ranks > 1 and not math.isinf(hw.link):
        ring = CUDA.moved * (ranks - 1) / ranks
        once = ring / hw.bandwidth(ranks, 1) + hw.collective
        plan |= dict.fromkeys(("all-gather", "reduce-scatter"), ring / once)
        plan["all-reduce"] = 2 * ring / (2 * ring / hw.bandwidth(ranks, 1) + hw.collective)
        plan["all-to-all"] = ring / hw.exchange(CUDA.moved, ranks)
        plan["send/recv"] = CUDA.moved / (CUDA.moved / hw.bandwidth(2, 1) + hw.collective)
    return plan
