"""A plan as a self-contained page with charts: `page.js` draws the JSON embedded in it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan.tools.planner.advice import RECOMPUTE_NOTHING, RECOMPUTE_OPERATIONS
from torchtitan.tools.planner.costs import timeline
from torchtitan.tools.planner.pipeline_timeline import Timeline
from torchtitan.tools.planner.predict import Plan, replan
from torchtitan.tools.planner.render import summary
from torchtitan.tools.planner.settings import apply_settings, read
from torchtitan.tools.web import web_page

_COLORS = {"F": "#4477aa", "B": "#ddaa33", "I": "#cc6677", "W": "#44aa99"}
"""Colors of computations, distinct to color-blind readers and in gray."""
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_PALER = 0.4
"""Share of white added to the color from one of a rank's stages to the next."""
_LEGIBLE = 16
"""Width in pixels of a microbatch's number."""
_SMALLEST = 3.0
"""Height in pixels of the smallest numbers drawn; an image can be enlarged."""
_ROW = 22
"""Pixels from one rank of a schedule to the next."""
_SCALES = [2.0**power for power in range(-3, 5)]
"""Numbers of shards that the page's scaling chart shows, relative to the plan's."""


def page(data: dict[str, Any]) -> str:
    """The page that shows `data`: a plan's data with its pictures."""
    title = f"{data['model']} on {data['world']} x {data['hardware']}"
    return web_page(title, data, [Path(__file__).with_name("page.js")])


def pictures(plan: Plan, proposals: Sequence[Plan] = ()) -> dict[str, Any]:
    """Pictures beside the plan's data: the schedule, other numbers of ranks, misfits.

    Args:
        proposals: of a search.
    """
    too_large = [summary(larger) for proposal in proposals for larger in _too_large(proposal)]
    images: dict[str, Any] = {"scaling": _scaling(plan), "too_large": too_large}
    if plan.workload.pipeline:
        images["schedule_svg"] = schedule_svg(plan, legible=True)
    return images


def _too_large(proposal: Plan) -> Iterator[Plan]:
    """The proposal with less recomputation or twice the rows at a time, where that doesn't fit."""
    rows = {"training.local_batch_size": 2 * proposal.config.training.local_batch_size}
    for settings in (RECOMPUTE_NOTHING, RECOMPUTE_OPERATIONS, rows):
        larger = replan(proposal, apply_settings(proposal.config, settings))
        # plans of twice the memory would be far outside of the chart
        if larger and not larger.fits and larger.peak_gib < 2 * larger.hardware.usable_gib:
            yield larger


def _scaling(plan: Plan) -> list[dict[str, Any]]:
    """Plans with other numbers of shards, each with as many rows as in this plan."""
    keys = ("parallelism.data_parallel_shard_degree", "training.global_batch_size")
    out = []
    for scale in _SCALES:
        values = {key: read(plan.config, key) * scale for key in keys}
        if all(value.is_integer() for value in values.values()):
            settings = {key: int(value) for key, value in values.items()}
            if other := replan(plan, apply_settings(plan.config, settings)):
                out.append(summary(other))
    return out


# ---- the schedule


def schedule_svg(plan: Plan, width: float = 960, *, legible: bool = False) -> str:
    """The pipeline's schedule as an SVG: a row per rank, time to the right, the bubble white.

    Args:
        width: in pixels.
        legible: wide enough to number every computation, if that is more than `width`.
    """
    batch = timeline(plan.workload, plan.hardware)
    margin = 56
    legend_height = 26
    rows = len(batch.busy)
    scale = (width - margin) / batch.length
    if legible:
        scale = max(
            scale, _LEGIBLE / min(end - begin for _, _, begin, end in batch.events if end > begin)
        )
        width = margin + batch.length * scale
    size = f'viewBox="0 0 {width:.0f} {rows * _ROW + legend_height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">'
    ]
    for rank in range(rows):
        y = rank * _ROW
        out.append(f'<text class="rank" x="0" y="{y + 15}" fill="#888">rank {rank}</text>')
        out.append(
            f'<rect class="bubble" x="{margin}" y="{y + 2}" width="{width - margin - 0.5:.2f}" '
            f'height="{_ROW - 4}" fill="#fff" stroke="#8886" stroke-width="0.6"/>'
        )
    for rank, action, begin, end in sorted(batch.events, key=lambda event: (event[0], event[2])):
        x = margin + begin * scale
        w = (end - begin) * scale
        fill, ink = _fill(action.kind, action.stage // rows)
        y = rank * _ROW + 2
        out.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(w, 0.3):.2f}" height="{_ROW - 4}" '
            f'fill="{fill}" stroke="#fff" stroke-width="0.4"><title>rank {rank}, stage '
            f"{action.stage}: {_NAMES[action.kind]} of microbatch {action.microbatch}, "
            f"{begin:.3f} to {end:.3f} s</title></rect>"
        )
        # pixels high, as wide as the computation allows
        text = min(10.0, 1.45 * w / len(str(action.microbatch)))
        if text >= _SMALLEST:
            out.append(
                f'<text x="{x + w / 2:.2f}" y="{y + 9 + 0.4 * text:.2f}" text-anchor="middle" '
                f'font-size="{text:.1f}" fill="{ink}" pointer-events="none">'
                f"{action.microbatch}</text>"
            )
    out += _legend(batch, plan.time.bubble, margin, y=rows * _ROW + 8, width=width)
    return "\n".join([*out, "</svg>", ""])


def _legend(batch: Timeline, bubble: float, margin: int, *, y: int, width: float) -> list[str]:
    kinds = {action.kind for _, action, _, _ in batch.events}
    out = ['<g class="legend">']
    for i, kind in enumerate(kind for kind in _COLORS if kind in kinds):
        x = margin + i * 130
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
