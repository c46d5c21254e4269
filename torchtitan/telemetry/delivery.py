"""Ways to deliver a message about the run: a POST to a URL, and a command."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torchtitan.config.sections.metrics import Notifications
from torchtitan.utils.retry import retry
from torchtitan.utils.text import brief, cut

_ATTEMPTS = 3
_PAUSE = 0.5


class DeliveryError(Exception):
    """A message could not be delivered. The text never contains the URL, which is a secret."""


class _TransientError(DeliveryError):
    """Another attempt may succeed."""


def url_problem(url: str) -> str | None:
    """Why this can't be the URL of a webhook, without telling it."""
    try:
        parts = urllib.parse.urlsplit(url)
        if (
            parts.scheme in ("http", "https")
            and parts.hostname
            and url.isascii()
            and url.isprintable()
        ):
            return None
    except ValueError:
        pass
    return "must be a URL that begins with https:// or http://"


def unreachable(config: Notifications) -> Iterator[str]:
    """Why messages can't be delivered from this machine."""
    if name := config.webhook_env:
        key = f"notifications.webhook_env: the environment variable {brief(name)}"
        if not os.environ.get(name):
            yield f"{key} is not set; set it to the URL of the webhook"
        elif problem := url_problem(os.environ[name]):
            yield f"{key} {problem}"
    if config.command and shutil.which(config.command[0]) is None:
        yield f"notifications.command: no program {brief(config.command[0])} that can be run"


def post(url: str, body: Mapping[str, Any], timeout: float) -> None:
    """POST `body` as JSON. Waits `timeout` seconds for an answer, up to three times.

    Raises:
        DeliveryError: it was not accepted.
    """
    if problem := url_problem(url):
        raise DeliveryError(problem)
    retry(
        lambda: _post_once(url, body, timeout),
        attempts=_ATTEMPTS,
        pause=_PAUSE,
        may_pass=lambda error: isinstance(error, _TransientError),
    )


def _post_once(url: str, body: Mapping[str, Any], timeout: float) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "torchtitan"}
    request = urllib.request.Request(
        url, json.dumps(body, default=str).encode(), headers, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout):
            return
    except urllib.error.HTTPError as error:
        error.close()
        kind = _TransientError if error.code == 429 or error.code >= 500 else DeliveryError
        raise kind(f"the server answered HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        words = (
            (reason.strerror or str(reason))
            if isinstance(reason, OSError)
            else type(error).__name__
        )
        raise _TransientError(f"can't be reached: {words}") from None


class Command:
    """A program that is run for each message, one at a time."""

    def __init__(self, words: Sequence[str], timeout: float):
        self.words = list(words)
        self.timeout = timeout
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, event: Mapping[str, Any]) -> None:
        """Run it with the event as JSON on standard input, and its parts in the environment.

        Raises:
            DeliveryError: it can't be run, fails, or took too long and was killed.
        """
        named = {
            f"TORCHTITAN_EVENT_{key.upper()}": str(event.get(key))
            for key in ("kind", "step", "text", "folder")
        }
        # a pipe could stay open in what the program started
        with tempfile.TemporaryFile() as errors:
            try:
                self._child = child = subprocess.Popen(
                    self.words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=os.environ | named,
                    start_new_session=True,
                )
                child.communicate(json.dumps(event, default=str).encode(), timeout=self.timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise DeliveryError(f"killed after {self.timeout:g} s") from None
            except (OSError, ValueError) as error:
                raise DeliveryError(
                    f"can't be run: {getattr(error, 'strerror', None) or error}"
                ) from None
            if child.returncode:
                errors.seek(0)
                said = " ".join(errors.read(2000).decode(errors="replace").split())
                raise DeliveryError(
                    f"exit status {child.returncode}: {cut(said, 200)}".rstrip(": ")
                )

    def kill(self) -> None:
        """Kill it, and what it started, if it runs."""
        if (child := self._child) is not None and child.poll() is None:
            with suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
