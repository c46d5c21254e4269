"""A plan as a self-contained page with charts: `page.js` draws the JSON embedded in it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.derive import layout_name, replace
from torchtitan.config.sections.schema import Config
from torchtitan.tools.planner.costs import timeline
from torchtitan.tools.planner.pipeline_timeline import Timeline
from torchtitan.tools.planner.predict import Plan, derived_workload, predict
from torchtitan.tools.web import web_page
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import plural

_COLORS = {"F": "#4477aa", "B": "#ddaa33", "I": "#cc6677", "W": "#44aa99"}
"""Colors of computations, distinct to color-blind readers and in gray."""
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_PALER = 0.4
"""Share of white added to the color from one of a rank's stages to the next."""
_LEGIBLE = 16
"""Pixels that the number of a microbatch takes."""
_SMALLEST = 3.0
"""Height in pixels of the smallest numbers drawn; an image can be enlarged."""
_ROW = 22
"""Pixels from one rank of a schedule to the next."""
_CHECKPOINTING: tuple[dict[str, Any], ...] = (
    {"mode": "none"},
    {"mode": "selective", "selective_ac_option": "op"},
)
_SCALES = [2.0**power for power in range(-3, 5)]
"""Numbers of shards that the page's scaling chart shows, relative to the plan's."""


def page(data: dict[str, Any]) -> str:
    """The page that shows `data`: a plan's data with its pictures."""
    title = f"{data['model']} on {data['world']} x {data['hardware']}"
    return web_page(title, data, [Path(__file__).with_name("page.js")])


def pictures(plan: Plan, proposals: Sequence[Plan] = ()) -> dict[str, Any]:
    """Pictures beside the plan's data: the schedule, other numbers of ranks, what doesn't fit.

    Args:
        proposals: of a search.
    """
    schedule = {"schedule_svg": schedule_svg(plan, legible=True)} if plan.workload.pipeline else {}
    return {"scaling": _scaling(plan), "too_large": _too_large(proposals)} | schedule


def _too_large(proposals: Sequence[Plan]) -> list[dict[str, Any]]:
    """The proposals with less recomputation or twice the rows at a time, where that doesn't fit."""
    out = []
    for proposal in proposals:
        for config in _larger(proposal.config):
            try:
                workload = derived_workload(config, proposal.spec, proposal.workload.world)
            except ConfigError:
                continue
            larger = predict(workload, proposal.spec, proposal.hardware)
            near = larger.peak_gib < 2 * larger.hardware.usable_gib  # enough to be drawn
            if not larger.fits and near:
                rows = plural(larger.config.training.local_batch_size, "row")
                name = f"{layout_name(larger.layout)}, {rows}, checkpointing {larger.checkpointing}"
                out.append({"name": name} | _figures(larger))
    return out


def _larger(config: Config) -> Iterator[Config]:
    for mode in _CHECKPOINTING:
        yield config.model_copy(
            update={"activation_checkpoint": config.activation_checkpoint.model_copy(update=mode)}
        )
    yield replace(config, "training.local_batch_size", 2 * config.training.local_batch_size)


def _figures(plan: Plan) -> dict[str, float]:
    return {"tokens_per_second_per_gpu": plan.tokens_per_second, "peak_gib": plan.peak_gib}


def _scaling(plan: Plan) -> list[dict[str, float]]:
    """Speed and memory with other numbers of shards, each with as many rows as in the plan."""
    out = []
    shard = plan.workload.dp_shard
    batch = plan.config.training.global_batch_size
    for scale in _SCALES:
        if (shard * scale) % 1 or (batch * scale) % 1:
            continue
        config = replace(plan.config, "parallelism.data_parallel_shard_degree", int(shard * scale))
        config = replace(config, "training.global_batch_size", int(batch * scale))
        world = int(plan.workload.world * scale)
        try:
            scaled = predict(derived_workload(config, plan.spec, world), plan.spec, plan.hardware)
        except ConfigError:
            continue
        out.append({"world": world, "fits": scaled.fits} | _figures(scaled))
    return out


# ---- the schedule


def schedule_svg(plan: Plan, width: float = 960, *, legible: bool = False) -> str:
    """The pipeline's schedule as an SVG: a row per rank, time to the right, the bubble white.

    Args:
        width: in pixels.
        legible: as wide as it takes to number every computation, if that is more than `width`.
    """
    batch = timeline(plan.workload, plan.hardware)
    left = 56
    below = 26
    rows = len(batch.busy)
    scale = (width - left) / batch.length
    if legible:
        scale = max(
            scale, _LEGIBLE / min(end - begin for _, _, begin, end in batch.events if end > begin)
        )
        width = left + batch.length * scale
    size = f'viewBox="0 0 {width:.0f} {rows * _ROW + below}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">'
    ]
    for rank in range(rows):
        frame = (
            f'x="{left}" y="{rank * _ROW + 2}" width="{width - left - 0.5:.2f}" height="{_ROW - 4}"'
        )
        out.append(
            f'<text class="rank" x="0" y="{rank * _ROW + 15}" fill="#888">rank {rank}</text>'
        )
        out.append(f'<rect class="bubble" {frame} fill="#fff" stroke="#8886" stroke-width="0.6"/>')
    for rank, action, begin, end in sorted(batch.events, key=lambda event: (event[0], event[2])):
        x = left + begin * scale
        y = rank * _ROW + 2
        w = (end - begin) * scale
        fill, ink = _fill(action.kind, action.stage // rows)
        title = (
            f"rank {rank}, stage {action.stage}: {_NAMES[action.kind]} of microbatch "
            f"{action.microbatch}, "
        )
        out.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(w, 0.3):.2f}" height="{_ROW - 4}" '
            f'fill="{fill}" '
            f'stroke="#fff" stroke-width="0.4"><title>{title}{begin:.3f} to {end:.3f} '
            "s</title></rect>"
        )
        text = min(
            10.0, 1.45 * w / len(str(action.microbatch))
        )  # pixels high, as wide as the computation allows
        if text >= _SMALLEST:
            position = (
                f'x="{x + w / 2:.2f}" y="{y + 9 + 0.4 * text:.2f}" text-anchor="middle" '
                f'font-size="{text:.1f}"'
            )
            out.append(
                f'<text {position} fill="{ink}" pointer-events="none">{action.microbatch}</text>'
            )
    out += _legend(batch, plan.time.bubble, left, y=rows * _ROW + 8, width=width)
    return "\n".join([*out, "</svg>", ""])


def _legend(batch: Timeline, bubble: float, left: int, *, y: int, width: float) -> list[str]:
    kinds = {action.kind for _, action, _, _ in batch.events}
    out = ['<g class="legend">']
    for i, kind in enumerate(kind for kind in _COLORS if kind in kinds):
        x = left + i * 130
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLORS[kind]}"/>')
        out.append(f'<text x="{x + 16}" y="{y + 10}" fill="#888">{_NAMES[kind]}</text>')
    summary = f"{batch.length:.3g} s; bubble {bubble:.1%} of the step"
    return [
        *out,
        f'<text x="{width:.0f}" y="{y + 10}" fill="#888" text-anchor="end">{summary}</text>',
        "</g>",
    ]


def _fill(kind: str, chunk: int) -> tuple[str, str]:
    """Color of a computation and of the number on it. Later stages of a rank are paler."""
    opacity = (1 - _PALER) ** min(chunk, 3)
    channels = [round(255 - (255 - int(_COLORS[kind][i : i + 2], 16)) * opacity) for i in (1, 3, 5)]
    red, green, blue = channels
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140  # perceived lightness, ITU-R BT.601
    return "#" + "".join(f"{channel:02x}" for channel in channels), "#fff" if dark else "#222"
