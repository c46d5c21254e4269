"""Curves as small plots for a terminal, drawn by plotext."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from torchtitan.tools.reports.noise import smooth
from torchtitan.utils.wording import printable, show_tokens

HEIGHT = 14
SMOOTHING = {"loss": 0.95, "grad_norm": 0.9, "tokens_per_second": 0.9, "mfu": 0.9}
"""Metrics that are smoothed, with the weight of past values in the average."""
_TICKS = 5
_MARKERS = "+x*o#@%&"
"""Markers that distinguish runs without colors."""


class Line(NamedTuple):
    """One run's curve."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]


def plot(title: str, lines: Sequence[Line], *, unit: str, width: int, color: bool) -> str | None:
    """One plot of the curves; None if they have no values.

    Args:
        unit: unit of the x axis.
        width: width in characters.
    """
    from plotext import figure

    finite_lines = {
        line.name: [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
        for line in lines
    }
    if not any(finite_lines.values()):
        return None
    all_xs, all_ys = zip(*chain(*finite_lines.values()), strict=True)
    figure.clear()
    figure.theme("default" if color else "colorless")
    figure.plot_size(width, HEIGHT)
    figure.title(title)
    single = len(finite_lines) == 1
    for i, (name, points) in enumerate(finite_lines.items()):
        if points:
            marker = None if color or single else _MARKERS[i % len(_MARKERS)]
            xs, ys = zip(*points, strict=True)
            signal = figure.signal(xs, ys, marker=marker)
            signal.lines()
            if not single:
                signal.label(printable(name))
            figure.draw(signal)
    figure.legend(not single, x=max(all_xs), y=max(all_ys), ha="right", va="top", relative=True)
    across = _ticks(all_xs)
    upward = _ticks(all_ys)
    figure.ruler("x").ticks(across, [_tick(x, unit) for x in across])
    figure.ruler("y").ticks(upward, [_value(y) for y in upward])
    figure.label(unit, "x")
    picture: str = figure.build().string(colorless=not color)
    return "\n".join(line.rstrip() for line in picture.rstrip().splitlines())


def lines_of(runs: Sequence[dict[str, Any]], metric: str, axis: str) -> list[Line]:
    """Curves of a metric of the runs from `collect`, smoothed if the metric is noisy."""
    weight = SMOOTHING.get(metric, 0.0)
    return [
        Line(run["name"], run["axes"][axis], smooth(run["metrics"][metric], weight))
        for run in runs
        if metric in run["metrics"] and run["axes"][axis] is not None
    ]


def _ticks(values: Sequence[float]) -> list[float]:
    first, last = min(values), max(values)
    if last <= first:
        return [first]
    return [first + (last - first) * i / (_TICKS - 1) for i in range(_TICKS)]


def _tick(value: float, unit: str) -> str:
    return f"{value:.2g}" if unit in ("hours", "flops") else show_tokens(value)


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
