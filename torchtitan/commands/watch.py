"""Watch runs in a browser while they train: loss, speed, memory, and what happened.

Serves the page of `torchtitan report` to this machine only, and keeps it up to date. It reads the
folders of the runs and changes nothing in them.
"""

import argparse
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.commands.report import find_runs
from torchtitan.tools.reports.folder import Runs
from torchtitan.tools.reports.live import Live
from torchtitan.tools.reports.serve import LOOPBACK, Server, close
from torchtitan.utils.argument_types import count
from torchtitan.utils.errors import UserError
from torchtitan.utils.wording import listed, printable

PORT = 8787
"""Unless it is taken and no other is asked for."""
POLL_SECONDS = 1.0
"""Between two looks for a run that hasn't begun."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtitan watch", description=__doc__)
    add = parser.add_argument
    add(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="folder of a run (job.dump_folder), or of several",
    )
    add(
        "--port", type=lambda text: count(text, fewest=0, most=65535), metavar="N",
        help=f"listen on this port; 0 takes a free one (default: {PORT}, or a free one)",
    )  # fmt: skip
    add(
        "--host", default=LOOPBACK[0],
        help="listen on this address; any but loopback needs the token in the address that is "
        "printed (%(default)s)",
    )  # fmt: skip
    add(
        "--socket",
        type=Path,
        metavar="PATH",
        help="listen on this Unix socket, which only you can use",
    )
    add(
        "--token",
        action="store_true",
        help="need a token on loopback, too: others use this machine",
    )
    return parser


def _begun(folders: Sequence[Path]) -> list[Path]:
    """Those of the folders with a run in or below them, once there is one.

    Raises:
        UserError: one is no folder.
    """
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: not a folder; a run's folder is its job.dump_folder")
    told = False
    while not (begun := [folder for folder in folders if next(iter(Runs([folder])), None)]):
        if not told:
            names = printable(listed(folders, 4))
            print(
                f"No run has begun in {names} yet: waiting for its first step  (Ctrl-C ends)",
                flush=True,
            )
        told = True
        time.sleep(POLL_SECONDS)
    for folder in folders:
        if folder not in begun:
            print(printable(f"No run has begun in {folder} yet: it is left out"), flush=True)
    return begun


def _serve(options: argparse.Namespace) -> tuple[Server, str]:
    """The server, and where it is."""
    if options.socket is not None and (options.port is not None or options.host != LOOPBACK[0]):
        raise UserError(
            "--socket takes no --port and no --host: the server listens on the socket alone"
        )
    live = Live([Path(os.path.abspath(folder)) for folder in find_runs(_begun(options.folders))])
    if options.socket is not None:
        token = secrets.token_urlsafe(32) if options.token else None
        return _listen(live, options.socket, token, f"--socket {options.socket}"), str(
            options.socket
        )
    token = secrets.token_urlsafe(32) if options.token or options.host not in LOOPBACK else None
    ports = [PORT, 0] if options.port is None else [options.port]
    for port in ports:
        try:
            server = _listen(
                live, (options.host, port), token, f"--host {options.host} --port {port}"
            )
            break
        except UserError:
            if port == ports[-1]:
                raise
    host = f"[{options.host}]" if ":" in options.host else options.host
    return server, f"http://{host}:{server.server_address[1]}/" + (
        f"?token={token}" if token else ""
    )


def _listen(live: Live, address: Any, token: str | None, name: str) -> Server:
    try:
        return Server(live, address, token)
    except OSError as error:
        raise UserError(
            f"{name}: can't listen there: {error.strerror or error}; choose another"
        ) from None


def _hint(options: argparse.Namespace, server: Server, where: str) -> str:
    """How to open the page from another machine."""
    here = socket.gethostname()
    if options.socket is not None:
        query = f"?token={server.token}" if server.token else ""
        path = os.path.abspath(options.socket)
        return f"On your machine: ssh -L {PORT}:{path} {here}, then open http://localhost:{PORT}/{query}"
    if options.host not in LOOPBACK:
        return "Whoever has this address can see the runs; nothing is encrypted."
    port = server.server_address[1]
    return (
        f"From another machine: ssh -L {port}:{options.host}:{port} {here}, then open the "
        "same address there."
    )


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server, where = _serve(options)
    except KeyboardInterrupt:
        print("ended")
        return 0
    try:
        server.live.report()  # whoever opens the page doesn't wait for the files
        print(
            f"Watching {printable(', '.join(map(str, options.folders)))} at {where}  (Ctrl-C ends)"
        )
        print(_hint(options, server, where), flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        print("ended")
    finally:
        close(server)
    return 0
