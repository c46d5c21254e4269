"""Compare the planner with published measurements.

    python benchmarks/published/plan_accuracy.py [--fit]

`published.csv` and `elsewhere.csv` hold the measurements with their settings and sources, in
groups. Each row becomes a configuration of this project and is planned like any other
(`_measurements.py`). `--fit` fits the constants again, to the rows marked `fit` alone, and the
bands to the others. `--trace repo-T1 paper-70B` also traces the memory of the rows whose names
begin so: half a minute to minutes each.
"""

import argparse
import csv
import io
import itertools
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plan_schedules
from _measurements import FILES, TORCHTITAN, Row, load, refusals
from scipy.optimize import least_squares, minimize
from scipy.stats import spearmanr

from torchtitan.tools.planner.hardware import load_hardware
from torchtitan.tools.planner.memory import memory_of, pipeline_bytes
from torchtitan.tools.planner.predict import LATE_HOST_NOTE, SPEED_DEVIATIONS, features, memory_band
from torchtitan.tools.planner.workload import Workload

COLUMNS = (
    *("row", "tokens_per_second", "predicted", "error", "band"),
    *("gib", "gib_predicted", "gib_error"),
)


@dataclass(frozen=True)
class Fitted:
    """Constants of the performance model that are fitted by one common factor."""

    hardware: tuple[str, ...]
    """That share them; () for all."""
    priors: Mapping[str, float]
    """Their values before any measurement."""
    width: float
    """Standard deviation of the factor's logarithm before any measurement."""


SLOW = ("h100-hbm2e",)
FAST = ("h100-sxm", "h200")
"""One chip with limits of 500 and 700 W."""
HOPPER = (*SLOW, *FAST, "h100-pcie")
BLACKWELL = ("b200", "b300", "gb200", "gb300")
AMD = ("mi300x", "mi325x", "mi355x")
"""Their rates of products alone, which a step doesn't reach."""
FITTED = (
    Fitted(SLOW, {"gemm_bf16": 0.55}, 0.15),
    Fitted(FAST, {"gemm_bf16": 0.66}, 0.15),
    Fitted(SLOW, {"gemm_fp8": 0.50}, 0.2),
    Fitted(FAST, {"gemm_fp8": 0.58}, 0.2),
    Fitted(SLOW, {"gemm_fp8_rowwise": 0.40}, 0.2),
    Fitted(AMD, {"gemm_bf16": 0.49, "attention": 0.25}, 0.4),
    Fitted(AMD, {"gemm_fp8": 0.44, "gemm_fp8_rowwise": 0.44}, 0.4),
    Fitted(SLOW + FAST, {"attention": 0.30}, 0.2),
    Fitted(HOPPER + BLACKWELL, {"attention_cudnn": 1.6}, 0.15),
    Fitted((), {"ring_attention": 0.8}, 0.4),
    Fitted((), {"eager": 2.4}, 0.3),
    Fitted((), {"async_tp": 0.5}, 0.4),
    Fitted((), {"link_efficiency": 0.75}, 0.1),
    Fitted((), {"gemm_ramp": 2.2e6}, 0.25),
    Fitted((), {"gemm_split": 4096}, 0.7),
    Fitted((), {"gemm_start": 1.7e-6}, 0.3),
    Fitted(BLACKWELL + AMD, {"gemm_grouped": 0.8}, 0.5),  # torch's kernel was written for Hopper
    Fitted((), {"collective": 40e-6}, 0.4),
    Fitted((), {"step_overhead": 5e-3}, 0.7),
)
ROWWISE_OVER_BF16 = "pr808-8B-bs1-rowwise", "pr808-8B-bs1-none", 1.095
"""Two rows of one host, and the mean of the published gains of this recipe, 6.8 % (torchao pull
request 1802) and 12.3 % (these rows).
"""
DEVIATION = 0.02
DEVIATION_ELSEWHERE = 0.06
"""Standard deviation assumed for the logarithm of a measured throughput: of TorchTitan on hardware
whose rates are fitted; of others. Other systems are compared with their own rows, since a system
may be faster or slower as a whole.
"""
Constants = dict[str, dict[str, float]]
"""Constants that replace those of the tables, by hardware."""


def fit(rows: list[Row]) -> Constants:
    """Constants that best predict the throughput of the rows marked so: least squares on
    logarithms.
    """
    by_id = {row.id: row for row in rows}
    marked = [row for row in rows if row.fit == "fit"]
    faster, slower, gain = (by_id.get(part, part) for part in ROWWISE_OVER_BF16)
    systems = sorted({row.system for row in marked} - {TORCHTITAN})
    every = sorted(load_hardware())
    expected = np.zeros(len(FITTED) + len(systems))
    widths = np.array([*(of.width for of in FITTED), *[0.2] * len(systems)])

    def constants(x: np.ndarray) -> Constants:
        out: Constants = defaultdict(dict)
        for of, factor in zip(FITTED, np.exp(x).tolist(), strict=False):
            for hardware in of.hardware or every:
                out[hardware] |= {name: prior * factor for name, prior in of.priors.items()}
        return out

    def residuals(x: np.ndarray) -> np.ndarray:
        made = constants(x)
        off = []
        whole = dict(zip(systems, x[len(FITTED) :], strict=True)) | {TORCHTITAN: 0.0}
        for row in marked:
            error = math.log(row.predicted(made) / row.tokens_per_second) + whole[row.system]
            ours = row.system == TORCHTITAN and row.hardware.fitted
            off.append(error / (DEVIATION if ours else DEVIATION_ELSEWHERE))
        off.append(math.log(faster.predicted(made) / slower.predicted(made) / gain) / DEVIATION)
        return np.array([*off, *((x - expected) / widths)])

    return constants(least_squares(residuals, expected).x)


# ---- bands

FREEDOM = 8
"""Degrees of freedom of the errors' distribution."""
SHARE = 0.92
"""Of the rows that are within bands fitted to them: a little more than the 90 % that must be, of
rows left out.
"""
Errors = list[tuple[Row, float]]
"""Rows with predicted over measured, less 1."""


@dataclass(frozen=True)
class Bands:
    """The bands that `planner/predict.py` holds."""

    deviations: dict[str, float]
    width: float

    def of(self, row: Row) -> float:
        known = [self.deviations[name] for name in row_features(row)]
        return self.width * math.hypot(*known, row.time.host_doubt)


LEAST_DEVIATIONS = {"scaled hardware": 0.08, "under 2B": 0.08, "pp": 0.06}
"""Of features most of whose rows are other software's, whose deviation would hide theirs. Relative
to their plans, NVIDIA's rows are 11 points slower on Blackwell than on H100, and others' 5 faster
on A100.
"""
OTHER_SOFTWARE = "other software"
"""A feature of rows, not of plans."""


def row_features(row: Row) -> list[str]:
    other = [OTHER_SOFTWARE] * (row.system != TORCHTITAN)
    return [*features(row.workload, row.hardware), *other]


def fit_bands(off: Errors) -> Bands:
    """Deviations by maximum likelihood of errors whose variances add up, distributed like Student's
    t: a few rows are far off. And their number that holds `SHARE`.
    """
    names = [*SPEED_DEVIATIONS, OTHER_SOFTWARE]
    names.remove("unmeasured hardware")
    uses = np.array([[name in row_features(row) for name in names] for row, _ in off], dtype=float)
    host = np.array([row.time.host_doubt for row, _ in off]) ** 2
    squares = np.array([error**2 for _, error in off])

    def cost(logarithms: np.ndarray) -> float:
        variances = uses @ np.exp(2 * logarithms) + host
        tails = np.log1p(squares / (FREEDOM * variances))
        return float((np.log(variances) + (FREEDOM + 1) * tails).sum())

    bounds = [(math.log(LEAST_DEVIATIONS.get(name, 0.002)), 0.0) for name in names]
    deviations = np.exp(minimize(cost, np.full(len(names), math.log(0.05)), bounds=bounds).x)
    width = np.quantile(np.sqrt(squares / (uses @ deviations**2 + host)), SHARE, method="higher")
    return Bands(dict(zip(names, deviations.tolist(), strict=True)), float(width))


def within_band_left_out(off: Errors) -> list[bool]:
    """Whether each row is within the band that the others give it."""
    return [
        abs(off[i][1]) <= fit_bands(off[:i] + off[i + 1 :]).of(off[i][0]) for i in range(len(off))
    ]


# ---- tables


def held_then(w: Workload, pp_rank: int) -> float:
    """Bytes that a pipeline of the published runs held and this project's doesn't.

    Before 2.15, PyTorch's stages have a receive buffer for every microbatch, one for hidden states
    and one for their gradients.
    """
    if w.pipeline is None:
        return 0.0
    every = 2 * w.microbatches * w.hidden_bytes * len(w.stages_of(pp_rank))
    return every - pipeline_bytes(w, pp_rank)[1]


def memory_then(w: Workload) -> list[float]:
    """Computed memory of each pipeline rank of a published run, in bytes."""
    return [memory_of(w, rank).reserved + held_then(w, rank) for rank in range(w.pp)]


def errors(rows: list[Row], changed: Constants | None = None) -> tuple[Errors, Errors]:
    """Relative errors of throughput and of peak memory, where published."""
    speed = [
        (row, row.predicted(changed) / row.tokens_per_second - 1)
        for row in rows
        if row.tokens_per_second
    ]
    own = [row for row in rows if row.memory_gib and row.system == TORCHTITAN]
    return speed, [
        (row, max(memory_then(row.workload)) / 2**30 / row.memory_gib - 1) for row in own
    ]


def held_out(speed: Errors) -> Errors:
    return [(row, error) for row, error in speed if not row.fit]


def outside_the_fit(speed: Errors) -> Errors:
    """Rows to which no constant was fitted; bands are fitted to them."""
    return [(row, error) for row, error in speed if row.fit != "fit"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants and bands again and print them"
    )
    parser.add_argument(
        "--file",
        type=Path,
        nargs="+",
        default=FILES,
        help="measurements in the format of either file",
    )
    parser.add_argument(
        "--trace", nargs="+", metavar="ROW", help="trace the rows whose names begin so instead"
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help="also write every row, as CSV")
    options = parser.parse_args()
    rows = [row for file in options.file for row in load(file)]
    if options.trace:
        for line in traces(
            [row for row in rows if row.memory_gib and row.id.startswith(tuple(options.trace))]
        ):
            print(line, flush=True)
        return
    changed: Constants = {}
    if options.fit:
        changed = fit(rows)
        for hardware in (*SLOW, *FAST, AMD[0]):
            print(
                f"[{hardware}]",
                "".join(f"\n{name} = {value:.4g}" for name, value in changed[hardware].items()),
            )
        speed, _ = errors(rows, changed)
        bands = fit_bands(outside_the_fit(speed))
        print(
            f"[bands]\nwidth = {bands.width:.3g}",
            *(f"{k} = {v:.3g}" for k, v in bands.deviations.items()),
            sep="\n",
        )
    if options.rows:
        options.rows.write_text(row_table(rows, changed))
    print("\n".join(statistics_tables(rows, changed)))
    print("\nPipeline schedules, relative to 1F1B:\n", *plan_schedules.table(), sep="\n")


def spread(off: Errors) -> str:
    """Median and largest error, as cells."""
    sizes = [abs(error) for _, error in off]
    return f"{statistics.median(sizes):.1%} | {max(sizes):.1%}" if sizes else " | "


def by_group(speed: Errors, within: Mapping[str, bool]) -> Iterator[str]:
    """Throughput by group, in and out of the fit, as Markdown.

    Args:
        within: of each row outside of the fit, whether it is in its band.
    """
    yield (
        "| throughput | seen | median error | worst | held out | median error | worst "
        "| median, with its sign | in their band |\n|---|---|---|---|---|---|---|---|---|"
    )
    groups: dict[str, Errors] = defaultdict(list)
    for row, error in speed:
        groups[row.group].append((row, error))
    for name, pairs in [*groups.items(), ("all", speed)]:
        out = held_out(pairs)
        seen = [pair for pair in pairs if pair[0].fit]
        bias = statistics.median(error for _, error in out)
        inside = sum(within[row.id] for row, _ in out)
        yield (
            f"| {name} | {len(seen)} | {spread(seen)} | {len(out)} | {spread(out)} | {bias:+.1%} "
            f"| {inside} |"
        )


def statistics_tables(rows: list[Row], changed: Constants | None = None) -> Iterator[str]:
    """Statistics of the errors, by group first, as Markdown."""
    speed, space = errors(rows, changed)
    out = outside_the_fit(speed)
    within = {
        row.id: inside for (row, _), inside in zip(out, within_band_left_out(out), strict=True)
    }
    yield from by_group(speed, within)
    inside = sum(abs(error) <= memory_band(row.workload) for row, error in space)
    yield f"| memory | {len(space)} | {spread(space)} |  |  |  |  | {inside} |"
    yield from by_feature(speed, within)
    yield (
        "\n| pairs of the same system, model and hardware | in the right order | rank "
        "correlation |\n|---|---|---|"
    )
    yield ordering(speed)


def kinds_of(row: Row) -> Iterator[str]:
    """What a row is counted as, by feature."""
    w = row.workload
    software = w.software
    if not w.experts:
        kinds = {
            "data parallelism alone": w.tp == w.cp == w.pp == 1,
            "tp": w.tp > 1 and w.compiled,
            "tp, eager": w.tp > 1 and not w.compiled,
            "cp": w.cp > 1,
            "pp": w.pp > 1,
            "8 bits": w.float8 or w.mx,
        }
        yield from (f"dense, {name}" for name, applies in kinds.items() if applies)
        return
    exchange = "fused dispatch" if software.fused_dispatch else "all-to-all, as here"
    yield f"experts, {exchange}{', overlapped' * software.overlaps_experts}"
    if row.time.late_host > LATE_HOST_NOTE:
        yield "experts, bound by the host"


def by_feature(speed: Errors, within: Mapping[str, bool]) -> Iterator[str]:
    """Throughput by feature, and the rows that are refused, as Markdown.

    Args:
        within: of each row outside of the fit, whether it is in its band.
    """
    yield (
        "\n| feature | planned | seen | held out: median error | worst | in their band "
        "| outside |\n|---|---|---|---|---|---|---|"
    )
    kinds: dict[str, Errors] = defaultdict(list)
    for row, error in speed:
        for kind in kinds_of(row):
            kinds[kind].append((row, error))
    for kind, pairs in sorted(kinds.items()):
        out = held_out(pairs)
        count = sum(within[row.id] for row, _ in out)
        yield (
            f"| {kind} | {len(pairs)} | {len(pairs) - len(out)} | {spread(out)} | {count} "
            f"| {len(out) - count} |"
        )
    yield "\n| refused | rows |\n|---|---|"
    reasons = Counter(reason for file in FILES for reason in refusals(file).values())
    yield from (f"| {reason} | {count} |" for reason, count in reasons.items())


def row_table(rows: list[Row], changed: Constants | None = None) -> str:
    """Every row with its errors, as CSV."""
    speed, space = errors(rows, changed)
    speed_errors = {row.id: error for row, error in speed}
    space_errors = {row.id: error for row, error in space}
    bands = fit_bands(outside_the_fit(speed))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        name = f"{row.id} (fit)" if row.fit else row.id
        throughput = compared(row.tokens_per_second, speed_errors.get(row.id), digits=0)
        memory = compared(row.memory_gib, space_errors.get(row.id), digits=1)
        writer.writerow([name, *throughput, f"{bands.of(row):.0%}", *memory])
    return table.getvalue()


def compared(published: float | None, error: float | None, digits: int) -> list[str]:
    """A published figure, the predicted one, and the error; empty where either is missing."""
    if published is None or error is None:
        return ["", "", ""]
    return [f"{published:g}", f"{published * (1 + error):.{digits}f}", f"{error:+.1%}"]


def ordering(speed: Errors) -> str:
    """Pairs of rows that differ by more than 2 % and are predicted in their order; rank correlation
    of all rows.
    """
    right = []
    for (a, off_a), (b, off_b) in itertools.combinations(speed, 2):
        kinds = [(row.system, row.workload.args, row.hardware.name) for row in (a, b)]
        if (
            kinds[0] != kinds[1]
            or not max(ratio := a.tokens_per_second / b.tokens_per_second, 1 / ratio) > 1.02
        ):
            continue
        right.append((ratio > 1) == (ratio * (1 + off_a) / (1 + off_b) > 1))
    measured = [row.tokens_per_second for row, _ in speed]
    planned = [row.tokens_per_second * (1 + off) for row, off in speed]
    return f"| {len(right)} | {sum(right)} | {spearmanr(measured, planned).statistic:.3f} |"


def traces(rows: list[Row]) -> Iterator[str]:
    """Memory of the first, largest and last pipeline ranks, computed and traced."""
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.traced_step.trace import trace_ranks

    yield (
        "| row | GiB | pp rank | closed form | error | traced | error "
        "|\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        w = row.workload
        forms = [size / 2**30 for size in memory_then(w)]
        for made in trace_ranks(w.config, w.world, sorted({0, forms.index(max(forms)), w.pp - 1})):
            cells = [row.id, f"{row.memory_gib:g}", str(made.pp_rank)]
            for gib in (
                forms[made.pp_rank],
                (made.peak_reserved + held_then(w, made.pp_rank)) / 2**30,
            ):
                cells += [f"{gib:.1f}", f"{gib / row.memory_gib - 1:+.1%}"]
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
