"""Amount of data that the steps of a run read from each source of a mixture."""

from collections.abc import Mapping
from typing import Any

from torchtitan.data.order.mixture import Shares, divide
from torchtitan.data.spec import DataSpec


def mixture(spec: DataSpec, steps: int, tokens: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Rows, tokens, share of the tokens and epochs of each source.

    Args:
        tokens: tokens in each source; None if unknown.
    """
    shares = Shares()
    rows = dict.fromkeys(tokens, 0)
    read = dict.fromkeys(tokens, 0)
    epoch_limits = {source.name: source.max_epochs for source in spec.sources}
    limits = {
        name: int(limit * count)
        for name, limit in epoch_limits.items()
        if limit is not None and (count := tokens[name]) is not None
    }
    ends = [plan.first for plan in spec.plans[1:]] + [steps]
    for plan, end in zip(spec.plans, ends, strict=True):
        stage_rows = max(min(end, steps) - plan.first, 0) * plan.rows
        rows_left = {name: (limit - read[name]) // plan.seq_len for name, limit in limits.items()}
        for name, count in divide(shares, plan.weights, stage_rows, rows_left).items():
            rows[name] += count
            read[name] += count * plan.seq_len
    total = max(sum(read.values()), 1)
    return [
        {
            "name": name,
            "rows": rows[name],
            "tokens": read[name],
            "share": read[name] / total,
            "epochs": read[name] / count if (count := tokens[name]) else None,
        }
        for name in tokens
    ]
