"""Compare the planner with published measurements: `python benchmarks/plan_accuracy.py [--fit]`.

`published.csv` holds the measurements with their settings and sources. Each row becomes a configuration of this
project and is planned like any other. `--fit` fits the constants again, to the rows marked `fit` alone.
`--trace repo-T1 paper-70B` also traces the memory of the rows whose names begin so: half a minute to minutes each.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan.config import resolve
from torchtitan.plan.costs import step_time
from torchtitan.plan.hardware import Hardware, find_hardware
from torchtitan.plan.memory import hidden_bytes, in_flight, memory_of
from torchtitan.plan.trace import trace_ranks
from torchtitan.plan.workload import Workload
from torchtitan.train.preflight import preflight

FILE = Path(__file__).with_name("published.csv")
HARDWARE = {
    "H100-96GB-HBM2e-500W": "h100-hbm2e",
    "H100-80GB-HBM3-700W": "h100-sxm",
    "H200-SXM": "h200",
    "A100-80GB": "a100",
}
LLAMA_2 = {"n_kv_heads": 8, "vocab_size": 32000, "rope_theta": 10000.0}
MODELS = {
    "L2-7B": ("8B", {**LLAMA_2, "n_kv_heads": 32, "ffn_dim": 11008}),
    "L2-13B": ("8B", {**LLAMA_2, "dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824}),
    "L2-70B": ("70B", LLAMA_2),
}
"""Names in the file that are not flavors: the flavor they derive from, and its overrides."""
CHECKPOINTING = {
    "none": ["none"],
    "full": ["full"],
    "sel-op": ["selective", "--activation_checkpoint.selective_ac_option=op"],
    "sel-layer": ["selective", "--activation_checkpoint.selective_ac_option=2"],
}
FITTED = {
    "gemm_bf16": (0.62, 0.15),
    "gemm_fp8": (0.50, 0.2),
    "attention": (0.36, 0.2),
    "ring_attention": (0.8, 0.4),
    "eager": (2.2, 0.4),
    "async_tp": (0.6, 0.4),
    "link_efficiency": (0.65, 0.3),
}
"""Fitted constants: the prior mean of each, and the standard deviation of its logarithm."""
FITTED_ON = "h100-hbm2e"
MEASUREMENT_DEVIATION = 0.02
"""Standard deviation assumed for the logarithm of a measured throughput, against the priors."""
LOSS_COMPILED_SINCE = "2025-05"
"""TorchTitan's earlier tables were measured with a loss that was not compiled."""


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    id: str
    fit: bool
    hardware: str
    rowwise: bool
    workload: Workload
    tokens_per_second: float | None
    memory_gib: float | None


def arguments(row: dict[str, str]) -> list[str]:
    """The row's settings as flags of this project."""
    pp = int(row["pp"])
    rows = int(row["local_bs"])
    mode, *more = CHECKPOINTING[row["ac"]]
    flavor, overrides = MODELS.get(row["model"], (row["model"], {}))
    settings = {
        "model.flavor": flavor,
        **{f"model.overrides.{key}": value for key, value in overrides.items()},
        "parallelism.data_parallel_replicate_degree": row["dp_rep"],
        "parallelism.data_parallel_shard_degree": row["fsdp"],
        "parallelism.context_parallel_degree": row["cp"],
        "parallelism.tensor_parallel_degree": row["tp"],
        "parallelism.pipeline_parallel_degree": pp,
        "parallelism.enable_async_tensor_parallel": row["async_tp"] == "1",
        "parallelism.context_parallel_rotate_method": "alltoall",  # how TorchTitan sent gradients
        "training.seq_len": row["seq"],
        "training.local_batch_size": rows,
        "activation_checkpoint.mode": mode,
        "compile.enable": row["compile"] == "1",
        "compile.components": "model,loss" if row["date"] >= LOSS_COMPILED_SINCE else "model",
    }
    if pp > 1:
        settings |= {
            "parallelism.pipeline_parallel_schedule": row["schedule"],
            "parallelism.pipeline_parallel_microbatch_size": rows // int(row["microbatches"]),
            "parallelism.pipeline_parallel_first_stage_less_layers": 1,
            "parallelism.pipeline_parallel_last_stage_less_layers": 1,
        }
    if row["float8"] != "none":
        gathers = row["float8"] == "tensorwise"
        settings |= {
            "model.converters": "float8",
            "quantize.linear.float8.recipe_name": row["float8"],
            "quantize.linear.float8.filter_fqns": "output",
            "quantize.linear.float8.enable_fsdp_float8_all_gather": gathers,
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": gathers,
        }
    return [
        *(f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()),
        *more,
    ]


def load(file: Path = FILE) -> list[Row]:
    """The rows whose settings are all known."""
    out = []
    for row in csv.DictReader(file.open()):
        if not row["local_bs"]:
            continue
        if row["hw"] not in HARDWARE:
            raise SystemExit(f"{file}: {row['id']}: no hardware {row['hw']!r} (there is {', '.join(HARDWARE)})")
        config = resolve(arguments(row), int(row["gpus"])).config
        setup = preflight(config, output=False)
        workload = Workload(config, setup.args, setup.stages, kv_repeated=True)
        tps, memory = (float(row[key]) if row[key] else None for key in ("tps_gpu", "mem_gib"))
        out.append(
            Row(row["id"], bool(row["fit"]), HARDWARE[row["hw"]], row["float8"] == "rowwise", workload, tps, memory)
        )
    return out


def held_then(w: Workload, pp_rank: int) -> float:
    """Bytes that a pipeline of the published runs held and this project's doesn't.

    Before 2.15, PyTorch's stages have a receive buffer for every microbatch, one for hidden states and one for their
    gradients.
    """
    if w.pipeline is None:
        return 0.0
    every = 2 * w.microbatches * hidden_bytes(w) * len(w.stages_of(pp_rank))
    return every - in_flight(w, pp_rank)[1]


def memory_then(w: Workload) -> list[float]:
    """Computed memory of each pipeline rank of a published run, in bytes."""
    return [memory_of(w, rank).reserved + held_then(w, rank) for rank in range(w.pp)]


def fit(rows: list[Row], hw: Hardware) -> dict[str, float]:
    """Constants that best predict the throughput of `rows`: least squares on logarithms, by Levenberg-Marquardt."""
    names = list(FITTED)
    expected = np.log([FITTED[name][0] for name in names])
    widths = np.array([FITTED[name][1] for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        made = hw.model_copy(update=dict(zip(names, np.exp(x).tolist(), strict=True)))
        off = [math.log(step_time(row.workload, made).tokens_per_second / row.tokens_per_second) for row in rows]
        return np.array([*(e / MEASUREMENT_DEVIATION for e in off), *((x - expected) / widths)])

    x, damping = expected, 1e-2
    now = residuals(x)
    for _ in range(60):
        jacobian = np.array([(residuals(x + step) - now) / 1e-4 for step in np.eye(len(x)) * 1e-4]).T
        step = -np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(len(x)), jacobian.T @ now)
        then = residuals(x + step)
        if then @ then < now @ now:
            x, now, damping = x + step, then, damping / 2
        else:
            damping *= 4
    return dict(zip(names, np.exp(x).tolist(), strict=True))


Errors = list[tuple[Row, float]]


def errors(rows: list[Row], changed: Mapping[str, float] | None = None) -> tuple[Errors, Errors]:
    """Relative errors of throughput and of peak memory, where published.

    Args:
        changed: constants that replace those of the tables' GPU.
    """
    speed, space = [], []
    for row in rows:
        if row.tokens_per_second:
            hw = find_hardware(row.hardware)
            hw = hw.model_copy(update=dict(changed or {})) if row.hardware == FITTED_ON else hw
            speed.append((row, step_time(row.workload, hw).tokens_per_second / row.tokens_per_second - 1))
        if row.memory_gib:
            space.append((row, max(memory_then(row.workload)) / 2**30 / row.memory_gib - 1))
    return speed, space


def summary(name: str, found: list[float]) -> str:
    sizes = [abs(e) for e in found]
    mean, middle = statistics.fmean(sizes), statistics.median(sizes)
    return f"| {name} | {len(sizes)} | {middle:.1%} | {mean:.1%} | {max(sizes):.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument("--file", type=Path, default=FILE, help="measurements in the format of published.csv")
    parser.add_argument("--trace", nargs="+", metavar="ROW", help="trace the rows whose names begin so instead")
    options = parser.parse_args()
    rows = load(options.file)
    if options.trace:
        for line in traces([row for row in rows if row.memory_gib and row.id.startswith(tuple(options.trace))]):
            print(line, flush=True)
        return
    changed: dict[str, float] = {}
    if options.fit:
        changed = fit([row for row in rows if row.fit], find_hardware(FITTED_ON))
        print("".join(f"{name} = {value:.3f}\n" for name, value in changed.items()))
    print("\n".join(table(rows, changed)))


def table(rows: list[Row], changed: Mapping[str, float] | None = None) -> Iterator[str]:
    """The statistics, held-out rows first, and every row with its errors, as Markdown."""
    speed, space = errors(rows, changed)
    yield "| | rows | median error | mean | worst |\n|---|---|---|---|---|"
    others = [(row, e) for row, e in speed if not row.rowwise]
    groups = {f"throughput, held out, {hw}": [] for hw in sorted({row.hardware for row, _ in others})}
    for row, e in others:
        groups.setdefault("throughput, fitted" if row.fit else f"throughput, held out, {row.hardware}", []).append(e)
    groups["throughput, held out and fitted"] = [e for _, e in others]
    groups["throughput, rowwise Float8"] = [e for row, e in speed if row.rowwise]
    groups["memory"] = [e for _, e in space]
    yield from (summary(name, found) for name, found in groups.items() if found)
    fast, large = {row.id: e for row, e in speed}, {row.id: e for row, e in space}
    yield "\n| row | tokens/s/GPU | predicted | error | GiB | predicted | error |\n|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [f"{row.id}{' (fit)' if row.fit else ''}"]
        for published, off, digits in (
            (row.tokens_per_second, fast.get(row.id), 0),
            (row.memory_gib, large.get(row.id), 1),
        ):
            told = published is not None and off is not None
            cells += [f"{published:g}", f"{published * (1 + off):.{digits}f}", f"{off:+.1%}"] if told else [""] * 3
        yield f"| {' | '.join(cells)} |"


def traces(rows: list[Row]) -> Iterator[str]:
    """Memory of the first, largest and last pipeline ranks, computed and traced."""
    yield "| row | GiB | pp rank | closed form | error | traced | error |\n|---|---|---|---|---|---|---|"
    for row in rows:
        w = row.workload
        forms = [size / 2**30 for size in memory_then(w)]
        for made in trace_ranks(w.config, w.world, sorted({0, forms.index(max(forms)), w.pp - 1})):
            cells = [row.id, f"{row.memory_gib:g}", str(made.pp_rank)]
            for gib in (forms[made.pp_rank], (made.peak_reserved + held_then(w, made.pp_rank)) / 2**30):
                cells += [f"{gib:.1f}", f"{gib / row.memory_gib - 1:+.1%}"]
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
