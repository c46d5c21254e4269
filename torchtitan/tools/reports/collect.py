"""Runs as data: for a page, for `torchtitan report --json`, and for comparisons."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.load.keys import without_defaults
from torchtitan.telemetry.run_record import KINDS
from torchtitan.tools.reports.compare import LoadedRun, compare, differences, plain, settings
from torchtitan.tools.reports.folder import Folder, Start, read_events, read_folder, read_log
from torchtitan.tools.reports.records import number
from torchtitan.tools.reports.samples import read_samples
from torchtitan.tools.reports.scores import read_scores
from torchtitan.tools.reports.series import POINTS, Curves, read_curves
from torchtitan.tools.web import web_page
from torchtitan.utils.wording import listed, path_text


def collect(folders: Sequence[Path], *, points: int = POINTS) -> dict[str, Any]:
    """All data of a report about these runs, ready for JSON.

    Args:
        folders: dump folders; later runs are compared with the first.
        points: minimum number of points of a longer curve; at most twice as many.
    """
    runs = []
    for name, path in zip(run_names(folders), folders, strict=True):
        folder = read_folder(path)
        began = next((start.time for start in folder.starts), None)
        curves = read_curves(path, points=points, began=began)
        runs.append(LoadedRun(name, folder, curves, read_scores(path), read_samples(path)))
    return {
        "runs": [_run_data(run) for run in runs],
        "differences": differences([run.folder for run in runs]),
        "comparison": compare(runs),
    }


def run_names(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its path below the common parent."""
    if not folders:
        return []
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [path_text(path.relative_to(common)) for path in paths]


def _run_data(run: LoadedRun) -> dict[str, Any]:
    """Data of one run in a report."""
    folder = run.folder
    curves = run.curves
    latest = curves.latest()
    last = folder.last_start
    events = read_events(folder.path)
    summary = folder.summary(curves.last_step)
    return {
        "name": run.name,
        "description": folder.config.get("job.description"),
        **summary,
        "tokens": latest.get("tokens"),
        "eta_s": _seconds_left(folder, curves, summary["step"]),
        "devices": last.devices if last else {},
        "goodput": folder.goodput,
        "latest": {key: value for key, value in latest.items() if key not in ("step", "time")},
        "axes": curves.axes(),
        "metrics": curves.metrics(),
        "sampled": curves.records_per_point,
        "validation": curves.validation(),
        "evals": run.evals,
        "sources": curves.sources(),
        "experts": curves.experts(),
        "samples": run.samples,
        "starts": [_start_data(start, curves) for start in folder.starts],
        "settings": {
            key: plain(value)
            for key, value in without_defaults(settings(folder)).items()
            if value is not None
        },
        "log": read_log(folder.path),
        "events": [
            {"hours": curves.hours(event["time"])}
            | {key: event[key] for key in ("kind", "step", "message")}
            for event in events
        ],
    }


def _seconds_left(folder: Folder, curves: Curves, step: int) -> float | None:
    """Seconds until a running run ends, at the mean rate of its last start."""
    last = folder.last_start
    if folder.state != "running" or folder.total_steps is None or last is None:
        return None
    rate = curves.seconds_per_step(since=last.time)
    return None if rate is None else number(max(folder.total_steps - step, 0) * rate)


def _start_data(start: Start, curves: Curves) -> dict[str, Any]:
    return {
        "time": start.time,
        "hours": curves.hours(start.time),
        "resumed_step": start.resumed_step,
        "step": start.step,
        "end": start.end,
        "ranks": start.ranks,
        "layout": start.layout,
        "last_seen_hours": curves.hours(start.last_seen),
    }


# ---- the page

_FOLDER = Path(__file__).parent
_SCRIPTS = [
    _FOLDER / name
    for name in ("formats.js", "curves.js", "timeline.js", "samples.js", "live.js", "page.js")
]
_STYLES = [_FOLDER / "page.css"]


def report_page(report: dict[str, Any], *, every: float | None = None) -> str:
    """A self-contained page that shows a report from `collect`.

    Args:
        every: seconds after which the page reads its own file again.
    """
    title = listed([run["name"] for run in report["runs"]], 4) or "no runs"
    data = {"kinds": KINDS, "report": report, "written": time.time(), "every": every}
    return web_page(title, data, _SCRIPTS, _STYLES)
