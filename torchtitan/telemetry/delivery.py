"""Ways to deliver a message about the run: a POST to a URL, and a command."""

import http.client
import json
import os
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress

from torchtitan.config.rules.machine import url_problem
from torchtitan.telemetry.events import Event
from torchtitan.utils.retry import retry
from torchtitan.utils.wording import cut

_ATTEMPTS = 3
_PAUSE = 0.5


class DeliveryError(Exception):
    """A message could not be delivered. The text never contains the URL, which is a secret."""


class _TransientError(DeliveryError):
    """Another attempt may succeed."""


def post(url: str, body: Event, timeout: float) -> None:
    """POST `body` as JSON. Waits `timeout` seconds for an answer, up to three times.

    Raises:
        DeliveryError: it was not accepted.
    """
    problem = url_problem(url)
    if problem:
        raise DeliveryError(problem)
    retry(
        lambda: _post_once(url, body, timeout),
        attempts=_ATTEMPTS,
        pause=_PAUSE,
        may_pass=lambda error: isinstance(error, _TransientError),
    )


def _post_once(url: str, body: Event, timeout: float) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "torchtitan"}
    data = json.dumps(body, default=str).encode()
    request = urllib.request.Request(url, data, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout):
            return
    except urllib.error.HTTPError as error:
        error.close()
        kind = _TransientError if error.code == 429 or error.code >= 500 else DeliveryError
        raise kind(f"the server answered HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        words = type(error).__name__
        if isinstance(reason, OSError):
            words = reason.strerror or str(reason)
        raise _TransientError(f"can't be reached: {words}") from None


class Command:
    """A program that is run for each message, one at a time."""

    def __init__(self, words: Sequence[str], timeout: float):
        self.words = list(words)
        self.timeout = timeout
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, event: Event) -> None:
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
                child = subprocess.Popen(
                    self.words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=os.environ | named,
                    start_new_session=True,
                )
                self._child = child
                child.communicate(json.dumps(event, default=str).encode(), timeout=self.timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise DeliveryError(f"killed after {self.timeout:g} s") from None
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise DeliveryError(f"can't be run: {reason}") from None
            if child.returncode:
                errors.seek(0)
                output = " ".join(errors.read(2000).decode(errors="replace").split())
                problem = f"exit status {child.returncode}: {cut(output, 200)}"
                raise DeliveryError(problem.rstrip(": "))

    def kill(self) -> None:
        """Kill it, and what it started, if it runs."""
        child = self._child
        if child is not None and child.poll() is None:
            with suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
