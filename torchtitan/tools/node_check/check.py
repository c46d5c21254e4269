"""Starts the ranks of the check on this node, waits for them, and compares them with the plan."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan.tools.node_check.rank import CUDA
from torchtitan.tools.planner.hardware import Hardware

PRODUCTS = ("bfloat16", "float32", "float8")
MEMORY = "memory"
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send/recv")
_LOW = 0.85
"""Share of the plan's expectation from which a result is as expected."""
_UNEVEN = 0.92
"""Share of the median below which a GPU is named as slow."""


@dataclass
class RankResult:
    """What one rank has written."""

    doing: str = "starting"
    """What it began last."""
    done: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    """FLOP/s of products, bytes/s of all else."""
    wrong: list[str] = field(default_factory=list)
    """Collectives that returned wrong numbers."""
    error: str = ""
    """Why it ended early: the last line of its output."""


def run_ranks(ranks: int, folder: Path, seconds: float) -> list[RankResult]:
    """Run all ranks, and kill those that haven't ended after `seconds`; their results."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for rank in range(ranks):
        launched = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        with (folder / f"log-{rank}.txt").open("w") as log:
            command = [sys.executable, "-m", "torchtitan.tools.node_check.rank", str(folder)]
            env = os.environ | {name: str(value) for name, value in launched.items()}
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline and any(process.poll() is None for process in started):
            if any(process.poll() for process in started):  # the others wait for it
                deadline = min(deadline, time.monotonic() + 3)
            time.sleep(0.05)
        statuses = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [read_result(folder, rank, status) for rank, status in enumerate(statuses)]


def read_result(folder: Path, rank: int, status: int | None) -> RankResult:
    """What a rank wrote before it ended with `status`; None: it was killed."""
    result = RankResult()
    file = folder / f"rank-{rank}.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    for line in (json.loads(text) for text in lines if text.endswith("\n")):
        if "result" in line and "value" in line:
            result.values[line["result"]] = line["value"]
        elif "result" in line:
            result.wrong += [] if line["right"] else [line["result"]]
        else:
            result.doing = line.pop("doing", result.doing)
            result.done = line.pop("done", result.done)
            result.about |= line
    if status:
        said = (folder / f"log-{rank}.txt").read_text(errors="replace").strip().splitlines()
        result.error = said[-1][:400] if said else f"it ended with status {status}"
    return result


# ---- the plan's expectation


def expected(hw: Hardware, ranks: int) -> dict[str, float]:
    """What the plan expects of each measurement on a GPU, in FLOP/s and bytes/s."""
    n = CUDA.product
    rates = {
        "bfloat16": (hw.bf16 * hw.gemm_bf16, 1.0),
        "float32": (hw.fp32 * hw.gemm_bf16, 1.0),
        "float8": (hw.fp8 * hw.gemm_fp8, 2.0),
    }
    plan = {
        name: 2 * n**3 / hw.product_seconds(n, n, n, rate, depth=depth)
        for name, (rate, depth) in rates.items()
        if rate
    }
    plan[MEMORY] = hw.bytes_per_s
    if ranks > 1 and not math.isinf(hw.link):
        ring = CUDA.moved * (ranks - 1) / ranks
        once = ring / hw.bandwidth(ranks, 1) + hw.launch
        plan |= dict.fromkeys(("all-gather", "reduce-scatter"), ring / once)
        plan["all-reduce"] = 2 * ring / (2 * ring / hw.bandwidth(ranks, 1) + hw.launch)
        plan["all-to-all"] = ring / hw.exchange(CUDA.moved, ranks)
        plan["send/recv"] = CUDA.moved / (CUDA.moved / hw.bandwidth(2, 1) + hw.launch)
    return plan


# ---- the report


def report(results: Sequence[RankResult], hw: Hardware | None) -> tuple[bool, str]:
    """Whether every rank measured everything and got the right numbers, and the text."""
    plan = expected(hw, len(results)) if hw else {}
    rates = _rates(results)
    lines = []
    if seconds := [r.about["connect_s"] for r in results if "connect_s" in r.about]:
        lines.append(f"Process groups and the first collective took {max(seconds):.1f} s.")
    if rates:
        lines += [f"{'':16}{'slowest':>10}{'median':>10}{'fastest':>10}{'plan':>10}"]
    for name, values in rates.items():
        cells = [_number(name, x) for x in (min(values), median(values), max(values))]
        cells += [_number(name, plan[name])] if name in plan else ["-"]
        lines.append(f"{name:16}" + "".join(f"{cell:>10}" for cell in cells) + f"  {_unit(name)}")
    problems = _failures(results)
    lines += ["", *problems, *_remarks(results, rates)]
    if rates:
        lines.append(_sentence(results, rates, plan, hw))
    return not problems, "\n".join(lines)


def _rates(results: Sequence[RankResult]) -> dict[str, list[float]]:
    """The rates of each measurement, for the ranks that finished it."""
    names = (*PRODUCTS, MEMORY, *COLLECTIVES)
    rates = {name: [r.values[name] for r in results if name in r.values] for name in names}
    return {name: values for name, values in rates.items() if values}


def _number(name: str, value: float) -> str:
    scaled = value / (1e12 if name in PRODUCTS else 1e9)
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.2g}"


def _unit(name: str) -> str:
    return "TFLOP/s" if name in PRODUCTS else "GB/s"


def _failures(results: Sequence[RankResult]) -> list[str]:
    sentences = []
    for rank, result in enumerate(results):
        if result.wrong:
            sentences.append(f"rank {rank}: WRONG numbers from {', '.join(result.wrong)}.")
        if result.error:
            sentences.append(f"rank {rank} failed while {_doing(result)}: {result.error}")
    if not any(result.error for result in results):
        stuck = [f"rank {i} {_doing(r)}" for i, r in enumerate(results) if not r.done]
        if stuck:
            sentences.append(f"Killed when the time was over (--limit): {', '.join(stuck)}.")
    return sentences


def _doing(result: RankResult) -> str:
    started = ("starting", "connecting", "ending")
    return result.doing if result.doing.startswith(started) else f"measuring {result.doing}"


def _remarks(results: Sequence[RankResult], rates: Mapping[str, list[float]]) -> list[str]:
    """Sentences about missing links and slow ranks. Collectives take all ranks equally long."""
    remarks = []
    if pairs := results[0].about.get("no_peers"):
        shown = ", ".join(f"{i} and {j}" for i, j in pairs[:8])
        remarks.append(
            f"No peer access between GPUs {shown}: their data goes through the host's memory."
        )
    for name, values in rates.items():
        if name in COLLECTIVES or len(values) < len(results):
            continue
        usual = median(values)
        remarks += [
            f"rank {rank} is slow in {name}: {_number(name, value)}, the median is "
            f"{_number(name, usual)}."
            for rank, value in enumerate(values)
            if value < _UNEVEN * usual
        ]
    return remarks


def _sentence(
    results: Sequence[RankResult],
    rates: Mapping[str, list[float]],
    plan: Mapping[str, float],
    hw: Hardware | None,
) -> str:
    """The median rates beside the plan's, and a verdict."""
    clauses = []
    for name, values in rates.items():
        what = f"products in {name} run" if name in PRODUCTS else name
        planned = f" of {_number(name, plan[name])}" if name in plan else ""
        clauses.append(f"{what} at {_number(name, median(values))}{planned} {_unit(name)}")
    text = "; ".join(clauses)
    text = text[0].upper() + text[1:]
    if hw is None:
        return (
            f"{text}. The planner has no constants for {results[0].about.get('device', 'it')}: "
            "--hardware names what to compare with."
        )
    low = [name for name in plan if name in rates and median(rates[name]) < _LOW * plan[name]]
    verdict = (
        f"below the plan by more than {1 - _LOW:.0%}: {', '.join(low)}"
        if low
        else f"all within {1 - _LOW:.0%} of the plan, or better"
    )
    return f"{text} that the plan expects of {len(results)} x {hw.name}; {verdict}."
