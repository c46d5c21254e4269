"""Where a step's time went, by the parts of a plan, from a trace of torch's profiler."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.utils.errors import UserError

PRODUCTS = "matrix products, head and loss"
ATTENTION = "attention"
POINTWISE = "pointwise"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
REST = "everything else"
PARTS = (PRODUCTS, ATTENTION, POINTWISE, COMMUNICATION, OPTIMIZER, REST)
"""A trace shows the output projection as one more product, and the loss beside it."""

_KINDS = (
    (COMMUNICATION, r"nccl|rccl|c10d::|gloo:|record_param_comms|_c10d_functional|symm_mem"),
    (ATTENTION, r"flash|fmha|attention|sdpa"),
    (OPTIMIZER, r"adam|multi_tensor|_foreach_|lpnorm"),
    (
        PRODUCTS,
        r"gemm|cutlass|nvjet|cublas|xmma|wgmma|matmul|cijk_|aten::(add|b|_scaled_|_grouped_)?mm$|softmax|nll",
    ),
)
"""What marks the names of kernels and operations; the first match counts, and pointwise is what
matches none.
"""
_PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS]
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[float, float]


def kind_of(name: str) -> str:
    """The part that a kernel or an operation belongs to."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), POINTWISE)


def planned_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """A plan's seconds by the parts that a trace tells apart."""
    out = dict.fromkeys(PARTS, 0.0)
    own = {
        "matrix products": PRODUCTS,
        "head and loss": PRODUCTS,
        "attention": ATTENTION,
        "pointwise": POINTWISE,
        "8-bit casts": POINTWISE,
        "optimizer": OPTIMIZER,
    }
    for part, seconds in parts.items():
        out[COMMUNICATION if part.startswith("communication") else own.get(part, REST)] += seconds
    return out


def traced_parts(file: Path) -> dict[str, float]:
    """Seconds of a step by part, from a Chrome trace; communication only where nothing computes.

    Raises:
        UserError: the file can't be read, or holds no complete step.
    """
    try:
        events = [
            event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"--from-run: can't read {file}: {error}") from None
    steps = [
        e
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")
    ]
    if not steps:
        raise UserError(
            f"--from-run: {file} holds no complete step; raise profiling.profiler_active"
        )
    on_device = [event for event in events if event.get("cat") in _DEVICE]
    spans = (
        _spans(on_device)
        if on_device
        else _own_times(e for e in events if e.get("cat") == "cpu_op")
    )
    computing = _union(
        [span for kind, intervals in spans.items() if kind != COMMUNICATION for span in intervals]
    )
    out = dict.fromkeys(PARTS, 0.0)
    for kind, intervals in spans.items():
        covered = _length(_union(intervals))
        if kind == COMMUNICATION:
            covered = _length(_union([*intervals, *computing])) - _length(computing)
        out[kind] = covered / len(steps) / 1e6
    whole = sum(event["dur"] for event in steps) / len(steps) / 1e6
    out[REST] += max(0.0, whole - sum(out.values()))
    return out


def _spans(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Interval]]:
    """When kernels of each kind ran, in microseconds. Copies are of no kind."""
    out: defaultdict[str, list[Interval]] = defaultdict(list)
    for event in events:
        kind = kind_of(event["name"]) if event["cat"] == "kernel" else REST
        out[kind].append((event["ts"], event["ts"] + event["dur"]))
    return out


def _own_times(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Interval]]:
    """When each kind of operation ran on the CPU, without the operations that it called."""
    out: defaultdict[str, list[Interval]] = defaultdict(list)
    threads: defaultdict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        threads[event.get("tid")].append(event)
    for calls in threads.values():
        running: list[tuple[float, str]] = []  # (end, kind), the innermost last
        now = 0.0
        for call in [*sorted(calls, key=lambda e: (e["ts"], -e["dur"])), None]:
            begin = call["ts"] if call else float("inf")
            while running and running[-1][0] <= begin:
                end, kind = running.pop()
                if end > now:
                    out[kind].append((now, end))
                    now = end
            if call:
                if running and begin > now:
                    out[running[-1][1]].append((now, begin))
                now = max(now, begin)
                kind = kind_of(call["name"])
                outer = running[-1][1] if running else POINTWISE
                running.append((begin + call["dur"], kind if kind != POINTWISE else outer))
    return out


def _union(intervals: list[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((begin, end))
    return out


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
