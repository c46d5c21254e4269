"""A table of many runs, one line each."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.tools.reports.collect import run_names
from torchtitan.tools.reports.compare import differences, setting_text
from torchtitan.tools.reports.folder import METRICS, STATES, Folder, read_folder
from torchtitan.tools.reports.records import last_training
from torchtitan.tools.reports.text import show_optional
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
_VALUE = 40
"""Maximum number of characters of a setting."""
_COLUMNS = 12
"""Maximum number of settings that get a column."""
_FIXED_COLUMNS = ("ranks", "layout")
"""Settings that always have a column."""

Row = dict[str, Any]
"""A run's line in the table: its name, `Folder.summary`, latest metrics, goodput in percent, and
`settings`: the values of the settings that differ between runs, by key.
"""
ORDERS = (
    *("last-seen", "name", "state", "step", "loss"),
    *("tokens", "tokens-per-second", "mfu", "goodput"),
)
"""Orders of rows, see `sort_key`."""


def sort_key(row: Row, order: str) -> Any:
    """A key to sort rows: latest, fastest or lowest loss first, unknown values last."""
    value = row[order.replace("-", "_")]
    if order == "name":
        return value
    if order == "state":
        return STATES.index(value)
    return value is None, (value or 0) * (1 if order == "loss" else -1)


def read_rows(paths: Sequence[Path], *, with_differences: bool = False) -> list[Row]:
    """A row for each run."""
    folders = [read_folder(path) for path in paths]
    setting_differences = differences(folders) if with_differences else []
    rows = []
    for i, (name, folder) in enumerate(zip(run_names(paths), folders, strict=True)):
        settings = {
            difference["key"]: difference["values"][i]
            for difference in setting_differences
            if difference["key"] not in _FIXED_COLUMNS
        }
        rows.append(_row(name, folder) | {"settings": settings})
    return rows


def _row(name: str, folder: Folder) -> Row:
    record = None
    with suppress(OSError):
        record = last_training(folder.path / METRICS)
    step, values = record or (0, {})
    return {
        "name": name,
        **folder.summary(step),
        **{key: values.get(key) for key in ("tokens", "loss", "tokens_per_second", "mfu")},
        "goodput": folder.goodput["percent"],
    }


def as_text(rows: Sequence[Row]) -> str:
    """The rows as a table, their messages, and the number of runs in each state."""
    now = time.time()
    settings = list(rows[0]["settings"]) if rows else []
    keys = settings[:_COLUMNS]
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
    lines = [
        _cells(row, now)
        + [setting_text(row["settings"][key], unset="", limit=_VALUE) for key in keys]
        for row in rows
    ]
    counts = Counter(row["state"] for row in rows)
    states = ", ".join(f"{counts[state]:,} {state}" for state in STATES if counts[state])
    messages = [
        printable(f"{row['name']}: {cut(row['message'], _MESSAGE)}")
        for row in rows
        if row["message"]
    ]
    summary = f"{plural(len(rows), 'run')}{': ' if states else ''}{states}"
    more = len(settings) - _COLUMNS
    if more > 0:
        note = f"{plural(more, 'more setting')} differ; `torchtitan report` and --json list them"
        summary = f"{summary}\n{note}"
    return "\n\n".join(filter(None, [aligned([heading, *lines]), "\n".join(messages), summary]))


def _cells(row: Row, now: float) -> list[str]:
    total = "" if row["total_steps"] is None else f"/{row['total_steps']:,}"
    return [
        row["name"],
        row["state"],
        f"{row['step']:,}{total}",
        show_optional(row["loss"], show_loss),
        show_optional(row["tokens_per_second"], show_rate),
        show_optional(row["mfu"], show_percent),
        show_optional(row["goodput"], show_percent),
        show_optional(row["last_seen"], lambda at: show_duration(max(now - at, 0))),
        show_optional(row["ranks"], str),
        layout_name(row["layout"]) if (row["ranks"] or 1) > 1 else "",
    ]
