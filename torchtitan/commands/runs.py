"""List the runs below a folder: state, step, loss, speed, goodput, and when they were last seen.

A run is a folder with a run.json or metrics.jsonl (job.dump_folder). One that recorded no end is
`running` while a process holds its .lock, else `killed`.
"""

import argparse
import json
import sys
from pathlib import Path

from torchtitan.tools.reports.folder import STATES, Runs
from torchtitan.tools.reports.table import ORDERS, as_text, read_rows, sort_key
from torchtitan.utils.argument_types import command_parser
from torchtitan.utils.errors import UserError
from torchtitan.utils.wording import listed, plural

_DEFAULT = Path("outputs")
_MAX_NAMES = 3


def parser() -> argparse.ArgumentParser:
    parser = command_parser("runs", __doc__)
    add = parser.add_argument
    add(
        "folders",
        nargs="*",
        type=Path,
        default=[_DEFAULT],
        metavar="FOLDER",
        help=f"where runs are ({_DEFAULT})",
    )
    states = f"only runs in this state, and others given likewise: {listed(STATES)}"
    add("--state", action="append", choices=STATES, default=[], metavar="STATE", help=states)
    add(
        "--sort",
        choices=ORDERS,
        default="last-seen",
        metavar="KEY",
        help="%(choices)s (default: %(default)s)",
    )
    add("--reverse", action="store_true", help="reverse the order")
    add(
        "--differences",
        action="store_true",
        help="a column for each setting that differs between the runs",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    if wrong_folders := [folder for folder in options.folders if not folder.exists()]:
        raise UserError(
            f"{wrong_folders[0]}: there is no such folder; name one that holds runs (their "
            "job.dump_folder)"
        )
    runs = Runs(options.folders)
    paths = list(runs)
    rows = read_rows(paths, with_differences=options.differences)
    rows = [row for row in rows if not options.state or row["state"] in options.state]
    rows.sort(key=lambda row: sort_key(row, options.sort), reverse=options.reverse)
    if runs.unreadable:
        more_count = len(runs.unreadable) - _MAX_NAMES
        more = f", and {more_count} more" if more_count > 0 else ""
        problems = "; ".join(runs.unreadable[:_MAX_NAMES])
        print(
            f"warning: can't read {plural(len(runs.unreadable), 'folder')}: {problems}{more}",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    elif not paths:
        raise UserError(
            f"no runs in {listed(options.folders)} or below; a run's folder (job.dump_folder) has "
            "a run.json"
        )
    else:
        print(as_text(rows))
    return 0
