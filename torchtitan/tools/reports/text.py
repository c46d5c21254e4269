"""Runs and how they differ, for a terminal: summaries, plots, time lines, differences."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from textwrap import fill, indent
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.telemetry.run_record import KINDS
from torchtitan.tools.reports.compare import setting_text
from torchtitan.tools.reports.folder import UNENDED
from torchtitan.tools.reports.plots import SMOOTHING, lines_of, plot
from torchtitan.utils.wording import (
    aligned,
    cut,
    plural,
    printable,
    show_date,
    show_duration,
    show_gib,
    show_loss,
    show_percent,
    show_rate,
    show_recent,
    show_tokens,
    validation_title,
)

Run = dict[str, Any]
_LONGEST_LINE = 40
"""Maximum number of entries in a time line."""
_BEFORE_MESSAGE = 36
_KIND = 40
_VALUE = 60
_SCORES = 4
"""Maximum number of benchmark scores in a summary."""
_SAMPLE = 160
"""Maximum number of characters shown of a generated text."""


def as_text(
    data: dict[str, Any], *, metrics: Sequence[str], axis: str, width: int, color: bool
) -> str:
    """A report for a terminal.

    Args:
        metrics: names of the metrics to plot against `axis`.
        width: width of the plots in characters.
    """
    runs = data["runs"]
    sections: list[str | None] = ["\n".join(_summary(run)) for run in runs]
    for metric in metrics:
        title = metric.replace("_", " ") + (", smoothed" if metric in SMOOTHING else "")
        sections.append(
            plot(title, lines_of(runs, metric, axis), unit=axis, width=width, color=color)
        )
    sections.append(_time_by_kind(runs))
    sections += [_time_line(run, width) for run in runs if run["starts"]]
    if len(runs) > 1:
        sections += [_differences(data), _comparison(data, width)]
    return "\n\n".join(filter(None, sections))


# ---- one run


def _summary(run: Run) -> Iterator[str]:
    latest = run["latest"]
    message = f": {cut(run['message'], 200)}" if run["message"] else ""
    yield printable(f"{run['name']}  {run['state']}{message}")
    total = f"/{run['total_steps']:,}" if run["total_steps"] is not None else ""
    losses = [loss for loss in run["metrics"].get("loss", ()) if loss is not None]
    validation = (
        f"{validation_title(name)} {show_loss(curve['loss'][-1])} (step {curve['step'][-1]:,})"
        for name, curve in run["validation"].items()
    )
    yield _join(
        f"step {run['step']:,}{total}",
        show_optional(run["tokens"], lambda count: f"{show_tokens(count)} tokens"),
        show_optional(show_recent(losses, "record"), lambda loss: f"loss {loss}"),
        *validation,
    )
    speed = latest.get("tokens_per_second")
    yield _join(
        show_optional(speed, lambda rate: f"{show_rate(rate)} tokens/s per device"),
        show_optional(latest.get("mfu"), lambda mfu: f"MFU {show_percent(mfu)}"),
        show_optional(latest.get("memory_gib"), show_gib),
        ", ".join(f"{count} x {name}" for name, count in run["devices"].items()),
        layout_name(run["layout"]) if (run["ranks"] or 1) > 1 else "",
    )
    if scores := [_score(name, curve) for name, curve in run["evals"].items()]:
        surplus = len(scores) - _SCORES
        yield _join(*scores[:_SCORES], f"{surplus} more scores" if surplus > 0 else "")
    if run["samples"]:
        sample = run["samples"][0]
        text = cut(f"{sample['prompt']}{sample['text'][-1]}", _SAMPLE)
        more_prompts = len(run["samples"]) - 1
        more = f"({plural(more_prompts, 'more prompt')}: --html)" if more_prompts else ""
        yield _join(f'wrote at step {sample["step"][-1]:,}: "{text}"', more)
    seen = "last seen" if run["state"] in UNENDED else "ended"
    yield _join(
        show_optional(
            run["goodput"]["percent"], lambda percent: f"goodput {show_percent(percent)}"
        ),
        plural(len(run["starts"]), "start"),
        show_optional(run["last_seen"], lambda at: f"{seen} {show_date(at)}"),
        show_optional(run["eta_s"], lambda seconds: f"{show_duration(seconds)} left"),
    )


def _score(name: str, curve: dict[str, Any]) -> str:
    error = curve["error"][-1]
    noise = "" if error is None else f" ± {show_loss(error)}"
    return f"{name} {show_loss(curve['value'][-1])}{noise} (step {curve['step'][-1]:,})"


def _join(*phrases: str) -> str:
    return "  " + "   ".join(printable(phrase) for phrase in phrases if phrase)


def show_optional(value: Any, show: Callable[[Any], str]) -> str:
    """`show(value)`; empty if the value is unknown."""
    return "" if value is None else show(value)


def _time_line(run: Run, width: int) -> str:
    """Starts, ends and events of a run in order of time; successive equal events share a line.

    Args:
        width: approximate width in characters.
    """
    entries = list(run["events"])
    logged = any(entry["kind"] in ("started", "resumed") for entry in entries)
    # A killed process logs nothing.
    starts = _starts(run["starts"])
    entries += [entry for entry in starts if not logged or entry["kind"] == "killed"]
    entries.sort(key=itemgetter("hours"))
    rows = []
    for kind, group in groupby(entries, key=itemgetter("kind")):
        same_kind = list(group)
        first, last = same_kind[0], same_kind[-1]
        label = f"{kind} x {len(same_kind)}" if len(same_kind) > 1 else kind
        ends = [f"{entry['step']:,}" for entry in (first, last) if entry["step"] is not None]
        steps = " to ".join(dict.fromkeys(ends))
        message = cut(last["message"], max(width - _BEFORE_MESSAGE, 64))
        rows.append([show_duration(first["hours"] * 3600), cut(label, _KIND), steps, message])
    surplus = len(rows) - _LONGEST_LINE
    if surplus > 0:
        rows[1 : 1 + surplus] = [["", f"{surplus:,} more", "", ""]]
    table = aligned([["after", "event", "step", ""], *rows])
    return printable(f"Time line of {run['name']}") + "\n" + indent(table, "  ")


def _starts(starts: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Starts and ends as events, for a run that recorded no events of these kinds."""
    layout = None
    for start in starts:
        where = f"{plural(start['ranks'] or 1, 'rank')}, {layout_name(start['layout'])}"
        note = " (changed)" if layout not in (None, start["layout"]) else ""
        layout = start["layout"]
        step = start["resumed_step"]
        kind = "resumed" if step else "started"
        yield {"hours": start["hours"], "kind": kind, "step": step, "message": f"{where}{note}"}
        if start["end"]:
            kind, _, message = start["end"].partition(": ")
            at = start["last_seen_hours"]
            yield {"hours": at, "kind": kind, "step": start["step"], "message": message}


# ---- several runs


def _time_by_kind(runs: Sequence[Run]) -> str | None:
    rows = [["time", *(run["name"] for run in runs)]]
    for kind, words in KINDS.items():
        shares = [_share(run["goodput"]["seconds"], kind) for run in runs]
        if any(shares):
            rows.append([words, *shares])
    return aligned(rows) if len(rows) > 1 else None


def _share(seconds: dict[str, float], kind: str) -> str:
    duration = seconds.get(kind, 0.0)
    total = sum(seconds.values())
    if not duration or not total:
        return ""
    return f"{show_duration(duration)}, {show_percent(100 * duration / total)}"


def _differences(data: dict[str, Any]) -> str:
    if not data["differences"]:
        return "The configurations are the same"
    rows = [["differs", *(run["name"] for run in data["runs"])]]
    for row in data["differences"]:
        values = (setting_text(value, unset="unset", limit=_VALUE) for value in row["values"])
        rows.append([row["key"], *values])
    return aligned(rows)


def _comparison(data: dict[str, Any], width: int) -> str | None:
    lines = [
        fill(
            f"{printable(comparison['run'])} against {printable(comparison['base'])}: "
            f"{comparison['text']}",
            width,
            initial_indent="  ",
            subsequent_indent="      ",
        )
        for comparison in data["comparison"]
    ]
    return "\n".join(["Differences, with 95 % confidence", *lines]) if lines else None
