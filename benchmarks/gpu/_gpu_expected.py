"""A planned step line by line, in the kinds of kernels that a profile shows."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CUDNN = {"forward": 550e12, "backward": 450e12}
"""FLOP/s of cuDNN's causal attention on an H100 SXM with heads of 128, as others published. The
plan's rates are fitted to training runs, which reached less.
"""
PRODUCTS, ATTENTION, POINTWISE = "products", "attention", "pointwise, loss"
COPIES, UPDATE, OTHER, IDLE = "copies", "update", "other kernels", "no kernel"
KINDS = {
    "NCCL": "nccl",
    ATTENTION: "sdpa|flash|fmha|mha",
    PRODUCTS: "gemm|nvjet|cutlass|xmma|cublas|splitk",
    POINTWISE: "triton",
    COPIES: "copy|chunk_cat|CatArray|memcpy",
    UPDATE: "multi_tensor|adam|lp_norm",
    OTHER: "",
}
"""What the names of kernels contain, by kind; the first that fits. Unlisted is `IDLE`, the time in
which the GPU waits for the host or for other ranks.
"""
OF_CAUSES = {"FSDP's copies": COPIES, "optimizer": UPDATE, "8-bit casts": POINTWISE}
"""Kinds of the plan's other causes that move bytes at the memory's rate."""


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next(kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE))


@dataclass(frozen=True)
class Line:
    """Work of a step."""

    name: str
    kind: str
    seconds: float = 0.0
    size: float = 0.0
    """FLOPs if it has calls, else bytes; 0: not counted."""
    calls: int = 0
    """Matrix products, or calls of attention."""

    @property
    def cells(self) -> list[str]:
        unit, scale = ("TFLOP", 1e12) if self.calls else ("GB", 1e9)
        rate = self.size and f"{self.size / self.seconds / 1e12:,.3g}"
        size = self.size and f"{self.size / scale:,.3g} {unit}"
        return [self.name, self.kind, *(str(cell or "") for cell in (self.calls, size, rate))]


def lines_of(plan: Any) -> list[Line]:
    """The lines of a plan without a pipeline; their seconds add up to the step's."""
    from torchtitan.optim.loss import FORWARD_SHARE, MOVED_BYTES
    from torchtitan.tools.planner.block_time import (
        BACKWARD_POINTWISE,
        EMBEDDING_PASSES,
        chunk_sum_bytes,
    )
    from torchtitan.tools.planner.costs import passes

    w, hw, causes = plan.workload, plan.hardware, dict(plan.time.by_cause)
    lines: dict[str, Line] = {}

    def add(name: str, kind: str, seconds: float, size: float = 0.0, calls: int = 0) -> None:
        old = lines.get(name, Line(name, kind))
        lines[name] = Line(name, kind, old.seconds + seconds, old.size + size, old.calls + calls)

    (model,) = w.stages
    runs = w.microbatches * w.accumulation
    timings = passes(w, hw)
    for block, work, count in zip(w.blocks, timings.blocks, model.kinds, strict=True):
        tokens = runs * count * block.tokens
        layers = len(block.linears)
        flops = tokens * sum(x.flops for x in block.linears)
        again = tokens * sum(x.flops * x.recompute_share for x in block.linears)
        mixing = tokens * block.attention_flops
        moved = tokens * block.moved_bytes * (1.0 if block.compiled else hw.eager)
        mixings = block.heads.backward + block.recompute.attention
        passes_back = BACKWARD_POINTWISE + block.recompute.pointwise
        for cause, kind, sizes, calls in (
            ("matrix products", PRODUCTS, (flops, 2 * flops + again), (layers, 2 * layers)),
            ("attention", ATTENTION, (mixing, mixing * mixings), (1, 1)),
            ("pointwise", POINTWISE, (moved, moved * passes_back), (0, 0)),
        ):
            causes.pop(cause, None)
            for i, way in enumerate(("forward", "backward")):
                seconds = runs * count * work.by_cause[cause][i]
                add(f"{cause}, {way}", kind, seconds, sizes[i], runs * count * calls[i])
    runs *= w.predictions
    chunks = w.config.training.loss_chunks
    per_logit = MOVED_BYTES["compiled" if w.loss_compiled else "eager"]
    loss = runs * per_logit * w.vocab * w.tokens / w.tp
    sums = runs * chunk_sum_bytes(w, hw)
    embedding = runs * EMBEDDING_PASSES * w.element * w.tokens * w.dim / w.tp
    for name, kind, size in (
        ("loss", POINTWISE, loss),
        ("sums over the loss's chunks", OTHER, sums),
        ("embedding", OTHER, embedding),
    ):
        if size:
            add(name, kind, size / hw.bytes_per_s, size)
    beside = [FORWARD_SHARE * (loss + sums), (1 - FORWARD_SHARE) * (loss + sums) + embedding]
    for i, way in enumerate(("forward", "backward")):
        seconds = runs / w.predictions * timings.ends.by_cause["head and loss"][i]
        flops = (1 + i) * runs * w.tokens * w.output.flops
        name = f"head's matrix products, {way}"
        add(name, PRODUCTS, seconds - beside[i] / hw.bytes_per_s, flops, (1 + i) * runs * chunks)
    del causes["head and loss"]
    for cause, seconds in causes.items():
        kind = OF_CAUSES.get(cause, IDLE)
        add(cause, kind, seconds, seconds * hw.bytes_per_s * (kind != IDLE))
    return list(lines.values())


def with_cudnn(hw: Any) -> Any:
    """The hardware with `CUDNN`'s rates of attention."""
    forward, backward = CUDNN.values()
    rates = {"attention_cudnn": forward / (hw.bf16 * hw.attention)}
    return hw.model_copy(update=rates | {"attention_backward": backward / forward})


def step_rows(name: str, plan: Any, faster: Any) -> Iterator[list[str]]:
    """The rows of a plan's lines.

    Args:
        faster: the plan with `CUDNN`'s rates.
    """
    yield [name, "kind of kernels", "calls", "size", "T/s", "ms", "ms by cuDNN's published rates"]
    yield ["---"] * 7
    for line, other in zip(lines_of(plan), lines_of(faster), strict=True):
        yield [*line.cells, f"{1e3 * line.seconds:.1f}", f"{1e3 * other.seconds:.1f}"]
    totals = [
        f"{1e3 * each.time.seconds:.0f}: {each.tokens_per_second:,.0f} tokens/s, "
        f"MFU {100 * each.mfu:.1f} %"
        for each in (plan, faster)
    ]
    yield ["sum", "", "", "", "", *totals]


def kinds_of(plan: Any) -> dict[str, float]:
    """Milliseconds of a plan's step by kind of kernels."""
    total: Counter[str] = Counter()
    for line in lines_of(plan):
        total[line.kind] += 1e3 * line.seconds
    return total
