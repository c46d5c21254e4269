"""Show runs, and how they differ: summary, curves, time by kind, events. Several runs are compared:
different settings, and whether loss and speed differ by more than noise.

RUN is a run's folder (job.dump_folder) or one above several. The first run is the one others are
compared with.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from torchtitan.tools.reports.collect import collect, report_page
from torchtitan.tools.reports.folder import Runs
from torchtitan.tools.reports.text import as_text
from torchtitan.utils.argument_types import command_parser
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output
from torchtitan.utils.wording import plural

_AXES = ("step", "tokens", "hours", "flops")
_METRICS = ("loss", "tokens_per_second")
_MOST = 32
_WIDTH = 100


def parser() -> argparse.ArgumentParser:
    parser = command_parser("report", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several")
    plot_help = f"plot this metric, and others given likewise (default: {', '.join(_METRICS)})"
    add("--plot", action="append", metavar="METRIC", help=plot_help)
    add("--axis", choices=_AXES, default=_AXES[0], help="plot against this (default: %(default)s)")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page with charts, which opens without a network",
    )
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    data = collect(find_runs(options.runs))
    if options.html:
        write_output({options.html: report_page(data).encode()})
        print(f"Wrote {options.html}", file=sys.stderr)
    if options.json:
        print(json.dumps(data, allow_nan=False))
        return 0
    if options.html:
        return 0
    names = list(dict.fromkeys(metric for run in data["runs"] for metric in run["metrics"]))
    if typos := [metric for metric in options.plot or () if metric not in names]:
        raise UserError(
            f"--plot: no run has the metric {typos[0]!r}; they have {', '.join(names) or 'none'}"
        )
    width = min(shutil.get_terminal_size().columns, _WIDTH)
    metrics = options.plot or _METRICS
    color = sys.stdout.isatty()
    print(as_text(data, metrics=metrics, axis=options.axis, width=width, color=color))
    return 0


def find_runs(folders: list[Path]) -> list[Path]:
    """Distinct runs in or below these folders.

    Raises:
        UserError: a folder has no run, or there are too many runs.
    """
    distinct: list[Path] = []
    for folder in folders:
        runs = list(Runs([folder]))
        if not runs:
            raise UserError(
                f"{folder}: no run here or below; a run's folder (job.dump_folder) has a run.json"
            )
        distinct += [run for run in runs if run not in distinct]
    if len(distinct) > _MOST:
        raise UserError(
            f"{plural(len(distinct), 'run')} are too many for a report; name at most {_MOST}"
        )
    return distinct
