"""A plan as a self-contained page with charts: `page.html` draws the JSON embedded in it."""

import json
from pathlib import Path
from typing import Any

from torchtitan.config.derive import replace
from torchtitan.plan.predict import Plan, derived_workload, predict
from torchtitan.plan.schedule import Timeline
from torchtitan.utils.errors import ConfigError

_COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#eeca3b", "W": "#54a24b"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_SCALES = [2.0**power for power in range(-3, 5)]
"""Numbers of shards that the page's scaling chart shows, relative to the plan's."""


def page(data: dict[str, Any]) -> str:
    """The page that shows `data`: a plan's data with its pictures."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", json.dumps(data).replace("</", "<\\/"))


def pictures(plan: Plan) -> dict[str, Any]:
    """What the page draws beside the plan's data: the schedule, and the plan on other numbers of ranks."""
    timeline = plan.time.timeline
    return {"scaling": _scaling(plan)} | ({"schedule_svg": schedule_svg(timeline)} if timeline else {})


def _scaling(plan: Plan) -> list[dict[str, float]]:
    """Speed and memory with other numbers of shards, each with as many rows as in the plan."""
    out = []
    shard, batch = plan.workload.dp_shard, plan.config.training.global_batch_size
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
        speed = scaled.tokens_per_second
        out.append({"world": world, "tokens_per_second_per_gpu": speed, "peak_gib": scaled.peak_gib})
    return out


def schedule_svg(timeline: Timeline, width: int = 960) -> str:
    """The schedule as an SVG image: a row per rank, time to the right, the bubble blank.

    Args:
        width: in pixels.
    """
    height, left, below = 22, 56, 26
    rows = len(timeline.busy)
    scale = (width - left) / timeline.length
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {rows * height + below}" '
        'font-family="sans-serif" font-size="10">'
    ]
    for rank in range(rows):
        y = rank * height
        out.append(f'<text x="0" y="{y + 15}" fill="#888">rank {rank}</text>')
        out.append(f'<rect x="{left}" y="{y + 2}" width="{width - left}" height="{height - 4}" fill="#8881"/>')
    for rank, action, begin, end in timeline.events:
        x, w = left + begin * scale, (end - begin) * scale
        shade = 1 if action.stage < rows else 0.6  # later stages of a rank are paler
        title = f"stage {action.stage} {_NAMES[action.kind]} {action.microbatch}: {begin:.3f} to {end:.3f} s"
        out.append(
            f'<rect x="{x:.2f}" y="{rank * height + 2}" width="{max(w, 0.3):.2f}" height="{height - 4}" '
            f'fill="{_COLORS[action.kind]}" fill-opacity="{shade}" stroke="#fff" stroke-width="0.4">'
            f"<title>{title}</title></rect>"
        )
        if w > 12:
            out.append(f'<text x="{x + 2:.2f}" y="{rank * height + 15}" fill="#fff">{action.microbatch}</text>')
    for i, kind in enumerate(
        kind for kind in _COLORS if any(action.kind == kind for _, action, _, _ in timeline.events)
    ):
        x, y = left + i * 150, rows * height + 8
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLORS[kind]}"/>')
        out.append(f'<text x="{x + 16}" y="{y + 10}" fill="#888">{_NAMES[kind]}</text>')
    summary = f"{timeline.length:.3g} s, {timeline.idle:.0%} idle"
    out.append(f'<text x="{width}" y="{rows * height + 18}" fill="#888" text-anchor="end">{summary}</text>')
    return "\n".join([*out, "</svg>", ""])
