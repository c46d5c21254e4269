"""A plan as a self-contained page with charts: `page.js` draws the JSON embedded in it."""

from pathlib import Path
from typing import Any

from torchtitan.tools.planner.predict import Plan, replan
from torchtitan.tools.planner.render import summary
from torchtitan.tools.planner.settings import apply_settings, read
from torchtitan.tools.web import web_page

_SCALES = [2.0**power for power in range(-3, 5)]
"""Numbers of shards that the page's scaling chart shows, relative to the plan's."""


def page(data: dict[str, Any]) -> str:
    """The page that shows `data`: a plan's data with its scaling."""
    title = f"{data['model']} on {data['world']} x {data['hardware']}"
    return web_page(title, data, [Path(__file__).with_name("page.js")])


def scaling(plan: Plan) -> list[dict[str, Any]]:
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
