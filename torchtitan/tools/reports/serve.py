"""Serves one file to this machine, at an address that can't be guessed."""

import secrets
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from torchtitan.utils.errors import UserError

_LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 20.0


class PageServer(ThreadingHTTPServer):
    """Answers GET at `address` with the file's current content, and nothing else."""

    daemon_threads = True

    def __init__(self, file: Path, port: int):
        """Listen on a port of loopback; 0 is any free one.

        Raises:
            UserError: the port can't be used.
        """
        self.file = file
        self.path = f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__((_LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(
                f"--port {port}: {error.strerror or error}; choose another, or 0 for a free one"
            ) from None

    @property
    def address(self) -> str:
        """URL of the file for a browser."""
        return f"http://{_LOOPBACK}:{self.server_port}{self.path}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _TIMEOUT_SECONDS

    def do_GET(self) -> None:
        body = None
        path = self.path.partition("?")[0]
        # Compared in constant time: other users of the machine can measure.
        if secrets.compare_digest(path.encode(), self.server.path.encode()):
            with suppress(OSError):
                body = self.server.file.read_bytes()
        if body is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "frame-ancestors 'self'")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a browser asks every few seconds."""
