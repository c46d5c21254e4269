"""The tables that `gpu.py --tables` writes into docs/reference/performance.md, from its results."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _gpu_bench import ROOT, Figures
from _gpu_expected import IDLE, KINDS, kinds_of, step_rows, with_cudnn
from _gpu_rates import PRODUCTS, expected_rates
from _gpu_stages import STAGES

PAGE = ROOT / "docs/reference/performance.md"
BEGIN = "<!-- written by benchmarks/gpu/gpu.py --tables: begin -->"
END = "<!-- end -->"
EXPECTED_OF = "h100-sxm"
"""The planner's hardware that the expectation is for."""
NOTHING = "Not yet measured on GPU."
LINE_BY_LINE = ("8b_layers", "8b_of_8")
"""Stages whose planned steps are shown line by line; the second as the 8 GPUs of llama3_8b.toml."""
GOALS = {"8b_layers": 55.0}
"""MFU in percent that a stage should reach on one H100 or H200."""
FLOAT8_GOAL = 1.35
"""Tokens/s of Float8 over bf16's."""


def write_tables(files: Iterable[Path], *, page: Path = PAGE) -> Path:
    """Put the tables of `files` between the marks of `page`, and return it."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{tables(load(files))}\n{END}{after}")
    return page


def load(files: Iterable[Path]) -> list[Figures]:
    """The last result of each stage, in the stages' order; one that succeeded counts before others,
    a dry run never.
    """
    found: dict[str, Figures] = {}
    for file in files:
        for line in map(json.loads, file.read_text().splitlines()):
            if not line["dry"] and (line["ok"] or not found.get(line["stage"], line)["ok"]):
                found[line["stage"]] = line
    return [found[name] for name in STAGES if name in found]


def tables(found: Sequence[Figures]) -> str:
    """The page's section: machine, date and command, then speed, numbers, and all else."""
    ran = [line for line in found if line.get("figures")]
    if not ran:
        return NOTHING
    parts = ["\n".join(_machines(ran))]
    speed = [line for line in ran if "tokens_per_second" in line["figures"]]
    if speed:
        parts += ["\n".join(part(speed)) for part in (_speed, _conditions, _kinds, _kernels)]
    limited = [line for line in ran if "limits" in line["figures"]]
    if limited:
        parts.append("\n".join(_limits(limited)))
    others = [line for line in ran if line not in speed and line not in limited]
    if others:
        parts.append("\n".join(_others(others)))
    if missing := [line for line in found if not line["ok"]]:
        parts.append("\n".join(_missing(missing)))
    return "\n\n".join(parts)


def _machines(ran: Sequence[Figures]) -> Iterator[str]:
    """Each machine and command once, with its days."""
    days: dict[tuple[str, str], set[str]] = {}
    for line in ran:
        about = line.get("machine", {})
        name = ", ".join(
            [
                str(about.get("device", "unknown")),
                *(f"{k} {v}" for k, v in about.items() if k != "device"),
            ]
        )
        days.setdefault((name, line["command"]), set()).add(line["date"][:10])
    for (name, command), dates in days.items():
        yield f"- {', '.join(sorted(dates))}: {name}; `{command}`"


def _row(*cells: Any) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _speed(found: Sequence[Figures]) -> Iterator[str]:
    """Speed and memory, beside the plan and the goals."""
    rates = {line["stage"]: line["figures"]["tokens_per_second"] for line in found}
    yield _row("", "tokens/s", "planned", "MFU, %", "goal", "peak memory, GiB", "planned")
    yield "|---|---|---|---|---|---|---|"
    for line in found:
        name = line["stage"]
        figures = line["figures"]
        plan = _planned(line)
        base, _, recipe = name.partition("_float8")
        mfu = f"{figures['mfu']:.1f}" if figures["mfu"] else "unknown"
        goal = f"{GOALS[name]:g} %" if name in GOALS else ""
        if recipe and base in rates:
            goal = f"{rates[name] / rates[base]:.2f} x bf16, goal {FLOAT8_GOAL} x"
        skipped = (
            f" ({figures['skipped_steps']} steps without an update)"
            if figures["skipped_steps"]
            else ""
        )
        memory = f"{figures['peak_reserved_gib']:.1f}"
        bound = ", upper bound" if figures["upper_bound"] else ""
        yield _row(
            f"`{name}`{bound}{skipped}",
            f"{figures['tokens_per_second']:,.0f}",
            f"{plan.tokens_per_second:,.0f}" if plan else "",
            mfu,
            goal,
            memory,
            f"{plan.peak_gib:.1f}" if plan else "",
        )


def _conditions(found: Sequence[Figures]) -> Iterator[str]:
    """How even the steps were, what the update and the head take of them, and the GPU's state."""
    yield _row(
        "",
        "step, s: median (min to max)",
        "update, ms",
        "MFU without it, %",
        "head, % of FLOPs",
        "clock, MHz of",
        "power, W of",
        "degrees C",
        "slowed by",
        "allocator retries",
    )
    yield f"|{'---|' * 10}"
    for line in found:
        f = line["figures"]
        gpu = f["gpu"]["timed"]
        without = f["mfu_without_update"]
        yield _row(
            f"`{line['stage']}`",
            f"{f['step_s']:.3f} ({f['step_s_min']:.3f} to {f['step_s_max']:.3f})",
            f"{f['update_ms']:.1f}",
            f"{without:.1f}" if without else "unknown",
            f"{f['head_flops_pct']:.0f}",
            *(
                f"{_range(gpu.get(now))} of {_range(gpu.get(most))}"
                for now, most in (("clocks.sm", "clocks.max.sm"), ("power.draw", "power.limit"))
            ),
            _range(gpu.get("temperature.gpu")),
            ", ".join(gpu["slowed_by"]) or ("nothing" if gpu["samples"] else "unknown"),
            f["alloc_retries"],
        )


def _range(value: float | Sequence[float] | None) -> str:
    """A number, or minimum, median and maximum, of `_gpu_load.summary`."""
    if value is None:
        return "?"
    return f"{value[0]:g} to {value[-1]:g}" if isinstance(value, list) else f"{value:g}"


def _planned(line: Figures) -> Any:
    """The plan for the run of `line` on its GPU; None if the planner doesn't know the GPU."""
    from torchtitan.tools.planner.hardware import hardware_with

    hardware = hardware_with(line.get("machine", {}).get("device", ""))
    figures = line["figures"]
    return hardware and _plan(figures["flags"], figures["world"], hardware)


def _plan(flags: Sequence[str], world: int, hardware: Any) -> Any:
    from torchtitan.tools.planner.planner import make_plan

    where = [f"--model.hf_assets_path={ROOT / 'tests/assets/tokenizer'}", "--training.dataset=demo"]
    return make_plan([*flags, *where], world, hardware)


# ---- what the plan expects


def expected_tables() -> str:
    """Speed and memory of every stage that trains, then a step of some, line by line, and rates of
    products and collectives.
    """
    from torchtitan.tools.planner.hardware import find_hardware

    hw = find_hardware(EXPECTED_OF)
    lines = [_row("", "tokens/s of a GPU", "MFU, %", "peak memory, GiB"), "|---|---|---|---|"]
    for stage in STAGES.values():
        if stage.flags:
            plan = _plan(stage.flags, stage.world, hw)
            ranks = f", as one of {stage.world}" if stage.world > 2 else ""
            fits = "" if plan.fits else " (doesn't fit: skipped)"
            rate, mfu = f"{plan.tokens_per_second:,.0f}", f"{100 * plan.mfu:.1f}"
            lines.append(_row(f"`{stage.name}`{ranks}", rate, mfu, f"{plan.peak_gib:.1f}{fits}"))
    for name in LINE_BY_LINE:
        flags, world = STAGES[name].flags, STAGES[name].world
        plan, faster = (_plan(flags, world, rates) for rates in (hw, with_cudnn(hw)))
        lines += ["", *(_row(*row) for row in step_rows(f"a step of `{name}`", plan, faster))]
    two, eight = (expected_rates(hw, ranks) for ranks in (2, 8))
    lines += ["", _row("`rates`, `two_start`", "2 GPUs", "8 GPUs"), "|---|---|---|"]
    for name in eight:
        scale, unit = (1e12, "TFLOP/s") if name in PRODUCTS else (1e9, "GB/s")
        lines.append(
            _row(f"{name}, {unit}", *(f"{found[name] / scale:,.0f}" for found in (two, eight)))
        )
    return "\n".join(lines)


def _kinds(found: Sequence[Figures]) -> Iterator[str]:
    """Milliseconds of a step by kind of kernels, with the plan's. Streams overlap."""
    kinds = [*KINDS, IDLE]
    yield _row("ms of a step (planned)", *kinds)
    yield f"|{'---|' * (1 + len(kinds))}"
    for line in found:
        figures = line["figures"]
        measured = figures["kernels_ms"]
        idle = 1e3 * figures["step_s"] - sum(measured.values())
        measured = measured | {IDLE: max(0.0, idle)}
        plan = _planned(line)
        planned = kinds_of(plan) if plan else {}
        cells = [f"{measured.get(kind, 0.0):.1f} ({planned.get(kind, 0.0):.1f})" for kind in kinds]
        yield _row(f"`{line['stage']}`", *cells)


def _kernels(found: Sequence[Figures]) -> Iterator[str]:
    """Where a step's time on the GPU goes."""
    yield _row("", "largest kernels, share of the time of all")
    yield "|---|---|"
    for line in found:
        largest = line["figures"]["kernels"][:4]
        yield _row(
            f"`{line['stage']}`",
            ", ".join(f"`{k['kernel'][:60]}` {k['pct']:.0f} %" for k in largest),
        )


def _limits(found: Sequence[Figures]) -> Iterator[str]:
    """Each check with its limit; a figure without one stands behind."""
    yield _row("", "figure", "value", "limit")
    yield "|---|---|---|---|"
    for line in found:
        limits = line["figures"]["limits"]
        for name, value in line["figures"].items():
            if name != "limits":
                wrong = " **beyond**" if name in limits and not value <= limits[name] else ""
                limit = f"{limits[name]:g}" if name in limits else ""
                yield _row(f"`{line['stage']}`", name, f"{_short(value)}{wrong}", limit)


def _others(found: Sequence[Figures]) -> Iterator[str]:
    yield _row("", "figures")
    yield "|---|---|"
    for line in found:
        yield _row(
            f"`{line['stage']}`",
            "; ".join(f"{name} {_short(v)}" for name, v in line["figures"].items()),
        )


def _missing(found: Sequence[Figures]) -> Iterator[str]:
    """What failed, and what the machine couldn't run."""
    yield _row("not measured", "why")
    yield "|---|---|"
    for line in found:
        why = line.get("skipped") or f"failed: {line['error']}"
        yield _row(f"`{line['stage']}`", _short(why))


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())[:300]
