"""A table of many runs, one line each."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.tools.reports.collect import run_names
from torchtitan.tools.reports.compare import differences
from torchtitan.tools.reports.folder import METRICS, STATES, Folder, read_folder
from torchtitan.tools.reports.records import last_training
from torchtitan.utils.wording import (
    aligned,
    cut,
    plural,
    printable,
    show_duration,
    show_loss,
    show_percent,
    show_rate,
)

_MESSAGE = 80
_COLUMNS = 12
"""Maximum number of settings that get a column."""
_SHOWN = ("ranks", "layout")
"""Settings that always have a column."""


@dataclass(frozen=True)
class Row:
    """A run's line in the table."""

    name: str
    path: str
    state: str
    message: str
    step: int
    total_steps: int | None
    tokens: float | None
    loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    goodput: float | None
    last_seen: float | None
    ranks: int | None
    layout: dict[str, int]
    settings: dict[str, Any]
    """Values of the settings that differ between runs, by key."""


ORDERS: dict[str, Callable[[Row], Any]] = {
    "last-seen": lambda row: _descending(row.last_seen),
    "name": lambda row: row.name,
    "state": lambda row: STATES.index(row.state),
    "step": lambda row: _descending(row.step),
    "loss": lambda row: (row.loss is None, row.loss),
    "tokens": lambda row: _descending(row.tokens),
    "tokens-per-second": lambda row: _descending(row.tokens_per_second),
    "mfu": lambda row: _descending(row.mfu),
    "goodput": lambda row: _descending(row.goodput),
}
"""Sort keys by name: latest, fastest or lowest loss first, unknown values last."""


def read_rows(paths: Sequence[Path], *, with_differences: bool = False) -> list[Row]:
    """A row for each run."""
    folders = [read_folder(path) for path in paths]
    changed = differences(folders) if with_differences else []
    changed = [difference for difference in changed if difference["key"] not in _SHOWN]
    rows = []
    for i, (name, folder) in enumerate(zip(run_names(paths), folders, strict=True)):
        settings = {difference["key"]: difference["values"][i] for difference in changed}
        rows.append(_row(name, folder, settings))
    return rows


def _row(name: str, folder: Folder, settings: dict[str, Any]) -> Row:
    record = None
    with suppress(OSError):
        record = last_training(folder.path / METRICS)
    values = record.values if record else {}
    last = folder.starts[-1] if folder.starts else None
    return Row(
        name=name,
        path=str(folder.path),
        state=folder.state,
        message=folder.message,
        step=max(record.step if record else 0, last.step if last else 0),
        total_steps=folder.total_steps,
        tokens=values.get("tokens"),
        loss=values.get("loss"),
        tokens_per_second=values.get("tokens_per_second"),
        mfu=values.get("mfu"),
        goodput=folder.goodput["percent"],
        last_seen=folder.last_seen,
        ranks=last.ranks if last else None,
        layout=last.layout if last else {},
        settings=settings,
    )


def _descending(value: float | None) -> tuple[bool, float]:
    return value is None, -(value or 0)


def as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as data for JSON."""
    return [asdict(row) for row in rows]


def as_text(rows: Sequence[Row], *, now: float | None = None) -> str:
    """The rows as a table, their messages, and the number of runs in each state."""
    now = time.time() if now is None else now
    differing = list(rows[0].settings) if rows else []
    keys = differing[:_COLUMNS]
    heading = [
        "run",
        "state",
        "step",
        "loss",
        "tokens/s",
        "MFU",
        "goodput",
        "last seen",
        "ranks",
        "layout",
        *keys,
    ]
    cells = [[*_cells(row, now), *(_setting(row.settings[key]) for key in keys)] for row in rows]
    counts = {state: sum(row.state == state for row in rows) for state in STATES}
    states = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    table = aligned([heading, *([printable(cell) for cell in line] for line in cells)])
    messages = [
        f"{printable(row.name)}: {printable(cut(row.message, _MESSAGE))}"
        for row in rows
        if row.message
    ]
    summary = f"{plural(len(rows), 'run')}{': ' if states else ''}{states}"
    more = len(differing) - len(keys)
    if more:
        note = f"{plural(more, 'more setting')} differ; `torchtitan report` and --json list them"
        summary = f"{summary}\n{note}"
    return "\n\n".join(filter(None, [table, "\n".join(messages), summary]))


def _cells(row: Row, now: float) -> list[str]:
    return [
        row.name,
        row.state,
        f"{row.step:,}" + (f"/{row.total_steps:,}" if row.total_steps is not None else ""),
        _shown(row.loss, show_loss),
        _shown(row.tokens_per_second, show_rate),
        _shown(row.mfu, show_percent),
        _shown(row.goodput, show_percent),
        _shown(row.last_seen, lambda at: show_duration(max(now - at, 0))),
        _shown(row.ranks, str),
        layout_name(row.layout) if row.ranks is not None and row.ranks > 1 else "",
    ]


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "" if value is None else show(value)


def _setting(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return cut(str(value), 40)
