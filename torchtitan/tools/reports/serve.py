"""Server of `torchtitan watch`: the page and its updates. GET only; no request opens a path.

A connection is one request, has a thread and a deadline, and there are few at a time; so slow or
many clients cost a bounded amount. Pages of other sites can't read answers: their requests name
another host (DNS rebinding), or lack the token.
"""

import contextlib
import gzip
import hashlib
import hmac
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torchtitan.tools.reports.collect import live_page
from torchtitan.tools.reports.live import Live
from torchtitan.tools.web import content_security_policy
from torchtitan.utils.errors import UserError
from torchtitan.utils.limits import QUERY_FIELDS

CONNECTIONS = 32
"""At the same time; others are told to come back."""
DEADLINE_SECONDS = 20.0
"""Time limit of a request and its answer."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_POINTS = 4000
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"  # noqa: E501


class Server(ThreadingHTTPServer):
    """Serves runs at an address of this machine, or at a Unix socket."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(self, live: Live, address: tuple[str, int] | Path, token: str | None = None):
        """
        Args:
            token: that each client must have; None serves whoever connects and names this machine
            as `LOOPBACK` does.
        """
        self.live = live
        self.token = token
        self.page = live_page(live.names).encode()
        self.policy = content_security_policy(self.page.decode())
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._deadlines: dict[socket.socket, float] = {}
        if isinstance(address, Path):
            self.address_family = socket.AF_UNIX
            super().__init__(str(address), Handler)  # type: ignore[arg-type]
        else:
            self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            super().__init__(address, Handler)

    def server_bind(self) -> None:
        """Bind, without the name server that HTTPServer asks."""
        if self.address_family != socket.AF_UNIX:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(self.server_address)
            self.server_address = self.socket.getsockname()
            return
        path = Path(str(self.server_address))
        _remove_stale(path)
        before = os.umask(0o177)  # for its owner only
        try:
            self.socket.bind(str(path))
        finally:
            os.umask(before)

    @property
    def cookie(self) -> str:
        """Name of the token's cookie, distinct per server since cookies ignore ports."""
        return f"torchtitan-{hashlib.sha256((self.token or '').encode()).hexdigest()[:8]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if there is room."""
        if not self._room.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + DEADLINE_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then make room."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._deadlines.pop(request, None)
            self._room.release()

    def service_actions(self) -> None:
        """Cut off clients that are too slow; called twice a second."""
        now = time.monotonic()
        for request, deadline in list(self._deadlines.items()):
            if now > deadline:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a fault of ours; a client that went away is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "torchtitan"
    sys_version = ""
    timeout = DEADLINE_SECONDS

    def do_GET(self) -> None:
        """The page, the report, updates, or details."""
        self.close_connection = True
        path, query = self._asked()
        if self.server.token is None and not self._names_loopback():
            self._text(HTTPStatus.FORBIDDEN, "This server answers to localhost only.")
        elif self.server.token is not None and not self._may(query):
            self._text(
                HTTPStatus.UNAUTHORIZED,
                "Open the address that `torchtitan watch` printed: it has a token.",
            )
        elif self.server.token is not None and "token" in query:
            self._send(
                HTTPStatus.SEE_OTHER, b"", {"Location": "./", "Set-Cookie": self._set_cookie()}
            )
        elif path is None:
            self._text(HTTPStatus.BAD_REQUEST, "Not an address of this server.")
        else:
            self._answer(path, query)

    do_HEAD = do_GET

    def _asked(self) -> tuple[str | None, dict[str, str]]:
        """The path and the query of the request; no path if they can't be read."""
        try:
            url = urlsplit(self.path)
            query = parse_qs(url.query, max_num_fields=QUERY_FIELDS)
        except ValueError:
            return None, {}
        return url.path, {key: values[-1] for key, values in query.items()}

    def _names_loopback(self) -> bool:
        """Whether the requested host is loopback, by a name that can't be redirected."""
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in LOOPBACK
        except ValueError:
            return False

    def _may(self, query: dict[str, str]) -> bool:
        given = query.get("token", "")
        if not given:
            with contextlib.suppress(CookieError):
                cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
                given = cookie.value if cookie else ""
        return hmac.compare_digest(given.encode(), (self.server.token or "").encode())

    def _set_cookie(self) -> str:
        return f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Lax; Path=/"

    def _answer(self, path: str, query: dict[str, str]) -> None:
        live = self.server.live
        if path == "/":
            headers = {
                "Content-Type": "text/html; charset=utf-8",
                "Content-Security-Policy": self.server.policy,
            }
            self._send(HTTPStatus.OK, self.server.page, headers)
        elif path == "/data":
            self._json(live.report(), compressed=True)
        elif path == "/updates":
            self._json(live.updates(query.get("after", "")))
        elif path == "/window":
            numbers = [_whole(query.get(key, "")) for key in ("run", "first", "last", "points")]
            if None in numbers or numbers[0] >= len(live.folders):  # type: ignore[operator]
                self._text(HTTPStatus.BAD_REQUEST, "run, first, last and points must be numbers.")
                return
            run, first, last, points = (number or 0 for number in numbers)
            self._json(live.window(run, first, last, min(max(points, 2), _POINTS)))
        else:
            self._text(HTTPStatus.NOT_FOUND, "Nothing here.")

    def _json(self, body: bytes, *, compressed: bool = False) -> None:
        headers = {"Content-Type": "application/json"}
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            body = body if compressed else gzip.compress(body, 3)
        elif compressed:
            body = gzip.decompress(body)
        self._send(HTTPStatus.OK, body, headers)

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._send(status, f"{text}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"})

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        always = {
            "Content-Length": str(len(body)),
            "Connection": "close",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        for name, value in (
            {"Content-Security-Policy": "default-src 'none'"} | always | headers
        ).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that isn't one, or isn't GET."""
        self.close_connection = True
        status = (
            HTTPStatus.METHOD_NOT_ALLOWED
            if code == HTTPStatus.NOT_IMPLEMENTED
            else HTTPStatus(code)
        )
        self._text(status, status.phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests come every other second."""


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _remove_stale(path: Path) -> None:
    """Remove a socket that a killed server left behind.

    Raises:
        UserError: something else is there.
    """
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise UserError(f"--socket {path}: a file is there that is no socket; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise UserError(f"--socket {path}: another server uses it; choose another path")


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve in a thread meanwhile."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="watch", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        close(server)


def close(server: Server) -> None:
    """Stop listening, and remove a Unix socket."""
    server.server_close()
    if server.address_family == socket.AF_UNIX:
        Path(str(server.server_address)).unlink(missing_ok=True)
