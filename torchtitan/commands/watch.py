"""Watch runs in a browser while they train: loss, speed, memory, and what happened.

Writes the page of `torchtitan report` again every few seconds; an open page follows. Otherwise it
only reads.
"""

import argparse
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan.commands.report import find_runs
from torchtitan.tools.reports.collect import collect, report_page
from torchtitan.tools.reports.folder import Runs
from torchtitan.tools.reports.serve import PageServer
from torchtitan.utils.argument_types import command_parser, count
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output
from torchtitan.utils.wording import listed, printable

PAGE = "report.html"
_EVERY_SECONDS = 5
_POLL_SECONDS = 1.0
"""Seconds between checks for a run that hasn't begun."""
_BUSY = 0.1
"""Maximum share of the time spent on reading and writing."""


def parser() -> argparse.ArgumentParser:
    parser = command_parser("watch", __doc__)
    add = parser.add_argument
    folders = "folder of a run (job.dump_folder), or of several"
    add("folders", type=Path, nargs="+", metavar="FOLDER", help=folders)
    output = f"write the page to this file (default: {PAGE} in the first FOLDER)"
    add("--output", type=Path, metavar="FILE", help=output)
    every = "write it again after so many seconds (%(default)s)"
    add("--every", type=count, default=_EVERY_SECONDS, metavar="SECONDS", help=every)
    port = "serve the page on this port of this machine's loopback; 0 chooses a free one"
    add("--port", type=lambda text: count(text, fewest=0, most=65535), metavar="N", help=port)
    return parser


def _wait_for_runs(folders: Sequence[Path]) -> list[Path]:
    """Wait for the first run, and return the folders with a run in or below them.

    Raises:
        UserError: a path is not a folder.
    """
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: not a folder; a run's folder is its job.dump_folder")
    waiting = False
    while not (ready := [folder for folder in folders if any(Runs([folder]))]):
        if not waiting:
            names = printable(listed(folders, 4))
            print(
                f"No run has begun in {names} yet: waiting for its first step  (Ctrl-C ends)",
                flush=True,
            )
        waiting = True
        time.sleep(_POLL_SECONDS)
    for folder in folders:
        if folder not in ready:
            print(printable(f"No run has begun in {folder} yet: it is left out"), flush=True)
    return ready


def _write(runs: Sequence[Path], page: Path, every: float | None) -> None:
    """Write the page.

    Raises:
        UserError: it can't be written.
    """
    html = report_page(collect(runs), every=every).encode()
    try:
        write_output({page: html})
    except UserError as error:
        raise UserError(f"{error}; name another file with --output") from None


def _hint(page: Path, server: PageServer | None) -> str:
    """Instructions for opening the page."""
    if server is None:
        return (
            f"Open {page.absolute().as_uri()}\n"
            "On a machine without a browser: --port N serves it to an SSH tunnel."
        )
    return (
        f"Open {server.address}\n"
        f"From another machine: ssh -L {server.server_port}:127.0.0.1:{server.server_port} "
        f"{socket.gethostname()}, then open the same address there."
    )


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    page = options.output or options.folders[0] / PAGE
    runs: list[Path] = []
    try:
        runs = [Path(os.path.abspath(run)) for run in find_runs(_wait_for_runs(options.folders))]
        server = None if options.port is None else PageServer(page, options.port)
        interval = options.every
        _write(runs, page, interval)
        print(f"Watching {printable(listed(options.folders, 4))}  (Ctrl-C ends)")
        print(_hint(page, server), flush=True)
        if server is not None:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        while True:
            time.sleep(interval)
            began = time.monotonic()
            _write(runs, page, interval)
            interval = max(options.every, (time.monotonic() - began) / _BUSY)
    except KeyboardInterrupt:
        if runs:
            _write(runs, page, None)
        print(f"ended; the page stays: {page}" if runs else "ended")
    return 0
