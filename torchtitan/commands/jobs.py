"""List Slurm jobs and their logs: all jobs of the user, one by number, or those of a submitted
folder.

torchtitan jobs outputs/my-grid
torchtitan jobs 123_4 --logs --follow
"""

import argparse

from torchtitan.tools.launch.slurm_jobs import (
    find_jobs,
    held_jobs_advice,
    list_jobs,
    log_files,
    show_logs,
    state_table,
)
from torchtitan.utils.argument_types import command_parser, count


def parser() -> argparse.ArgumentParser:
    parser = command_parser("jobs", __doc__)
    add = parser.add_argument
    add(
        "target",
        nargs="?",
        metavar="JOB|FOLDER",
        help="123, 123_4, or the folder of runs (all jobs of the user)",
    )
    add("--logs", action="store_true", help="print the ends of the logs instead")
    add("--lines", type=count, default=20, metavar="N", help="of each log (20)")
    add("--follow", action="store_true", help="keep printing what is added")
    return parser


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    jobs, task, record = find_jobs(options.target)
    if options.logs or options.follow:
        return show_logs(log_files(jobs, task, record), options.lines, follow=options.follow)
    listed, note = list_jobs(jobs, task, record)
    print(
        state_table(listed, record)
        if listed
        else f"The scheduler knows no job of {options.target or 'yours'}"
    )
    for text in filter(None, (note, held_jobs_advice(listed))):
        print(f"note: {text}")
    if record and record.runs:
        print(f"Results: torchtitan runs {options.target}")
    return 0
