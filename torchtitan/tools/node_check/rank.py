"""One rank of the check: measures its products and memory, then collectives with the other ranks.

    python -m torchtitan.tools.node_check.rank FOLDER

Appends a JSON line to `FOLDER/rank-N.jsonl` as it begins something, and for each result. All ranks
compute at the same time, as in training.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.sections.schema import Comm
from torchtitan.parallel.groups import init_distributed
from torchtitan.utils.device import current_device, device_name, tune_cpu

ROUNDS = 3
"""Number of repetitions; their median is the result."""


@dataclass(frozen=True)
class Sizes:
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
CPU = Sizes(256, 2**25, 2**20, 0.03)


class Record:
    """The file of this rank."""

    def __init__(self, path: Path):
        self._file = path.open("a")

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def main(folder: Path) -> None:
    record = Record(folder / f"rank-{os.environ['RANK']}.jsonl")
    record.write(doing="starting")
    device = current_device()
    tune_cpu()
    sizes = CUDA if device.type == "cuda" else CPU
    record.write(device=device_name())
    record.write(doing="connecting to the other ranks")
    began = time.perf_counter()
    init_distributed(Comm(), device)
    clock = Clock(device, sizes.seconds)
    clock.agree(0.0)
    record.write(connect_s=time.perf_counter() - began)
    measure(record, clock, sizes)
    record.write(doing="ending")
    clock.agree(0.0)
    record.write(done=True)
    os._exit(0)  # the clean-up of process groups may hang


def measure(record: Record, clock: "Clock", sizes: Sizes) -> None:
    """Measure everything, on all ranks."""
    device = clock.device
    for name, work, flops in products(device, sizes.product):
        record.write(doing=f"products in {name}")
        record.write(result=name, value=flops / clock.seconds(work))
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    record.write(doing="copies of memory")
    seconds = clock.seconds(partial(target.copy_, source))
    record.write(result="memory", value=2 * sizes.copied / seconds)
    del source, target
    if dist.get_world_size() > 1:
        record.write(no_peers=no_peers(device))
        for collective in collectives(device, sizes.moved):
            record.write(doing=collective.name)
            collective.run()
            record.write(result=collective.name, right=collective.right())
            collective.source.zero_()
            record.write(
                result=collective.name, value=collective.moved / clock.seconds(collective.run)
            )


class Clock:
    """Times work that all ranks do together."""

    def __init__(self, device: torch.device, seconds: float):
        self.device = device
        self.budget = seconds

    def agree(self, value: float) -> float:
        """The smallest value of all ranks."""
        smallest = torch.tensor(value, device=self.device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return smallest.item()

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds of one call, which all ranks make equally often."""
        self._run(work, 1)
        once = max(self._run(work, 1), 1e-7)
        times = max(1, math.ceil(self.agree(self.budget / ROUNDS / once)))
        return median(self._run(work, times) for _ in range(ROUNDS)) / times

    def _run(self, work: Callable[[], Any], times: int) -> float:
        self.agree(0.0)  # ranks begin together
        self._wait()
        began = time.perf_counter()
        for _ in range(times):
            work()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def products(device: torch.device, n: int) -> Iterator[tuple[str, Callable[[], Any], float]]:
    """Name, work and FLOPs of the square products that this device computes."""
    flops = 2.0 * n**3
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        yield f"{dtype}".removeprefix("torch."), partial(torch.mm, left, right), flops
    if _has_float8(device):
        left, right = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        scaled = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        yield "float8", partial(scaled, left, right.t(), use_fast_accum=True), flops


def _has_float8(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and not torch.version.hip
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def no_peers(device: torch.device) -> list[tuple[int, int]]:
    """Pairs of this node's GPUs that can't read each other's memory."""
    if device.type == "cpu" or dist.get_rank():
        return []
    pairs = [(i, j) for j in range(torch.cuda.device_count()) for i in range(j)]
    return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


@dataclass
class Collective:
    """A collective, its tensors, and what they should hold after it."""

    name: str
    call: Callable[[Tensor, Tensor], Any]
    """Communicates from the second tensor to the first."""
    source: Tensor
    """Holds this rank's number everywhere."""
    out: Tensor
    expected: Tensor
    """`[parts, 1]`: what each part of `out` should hold."""
    moved: float
    """Bytes that a rank sends in a ring, of an all-to-all those that leave it."""

    def run(self) -> None:
        self.call(self.out, self.source)

    def right(self) -> bool:
        return bool((self.out.view(len(self.expected), -1) == self.expected).all())


def collectives(device: torch.device, size: int) -> Iterator[Collective]:
    """The kinds of collectives that training uses, over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    elements = size // dtype.itemsize // world
    away = elements * dtype.itemsize * (world - 1)

    def parts(number: int, value: int = -1) -> Tensor:
        return torch.full((number * elements,), value, dtype=dtype, device=device)

    def expected(*values: int) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    def shift(out: Tensor, source: Tensor) -> None:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
