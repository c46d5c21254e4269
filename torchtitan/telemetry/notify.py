"""Tells people about events of the run: through a webhook, and by running a command.

Nothing here can stop or delay training: events wait in a short queue for a thread that limits their
rate, and gives up on whoever doesn't answer.
"""

import fcntl
import json
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from torchtitan.config.sections.metrics import Notifications
from torchtitan.config.sections.schema import Config
from torchtitan.telemetry.delivery import Command, DeliveryError, post
from torchtitan.utils.errors import from_another_rank
from torchtitan.utils.logging import logger
from torchtitan.utils.process import launcher_reports, rank_and_world
from torchtitan.utils.text import cut

FILE = "notifications.jsonl"
FLUSH_SECONDS = 5.0
"""At the end of a run, for messages that wait."""
FAILURE_SECONDS = 15.0
"""At the end of one that failed: this message matters most."""
_QUEUED = 100
_SAME_FAILURE_SECONDS = 60
"""Failures of several ranks or nodes within this time are one."""
_CAUSE_FIRST_SECONDS = 3.0
"""For a rank that knows the cause to report it, before rank 0 reports that another one stopped."""
_ALIAS = {"rewound": "spike"}
"""Events that count as another kind here."""
_NEVER_LEFT_OUT = ("failed", "finished")
_SAYS_ALL = ("finished", "preempted")
"""Their messages begin with kind and step."""
_TAIL = 256 * 1024
"""Bytes of `notifications.jsonl` that are read."""


class Notifier:
    """Sends the chosen events from a thread."""

    def __init__(self, config: Notifications, folder: Path):
        self.config = config
        self.folder = folder
        self.limit = RateLimit(folder / FILE, config)
        self.command = Command(config.command, config.timeout_seconds)
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue(_QUEUED)
        self._warned: set[str] = set()
        self._thread = threading.Thread(
            target=self._run,
            name="notifications",
            daemon=True,
        )
        self._thread.start()

    def listen(self, event: Mapping[str, Any]) -> None:
        """Take an event of the log, but a failure: whoever knows its cause calls
        `report_failure`.
        """
        kind = _ALIAS.get(event["kind"], event["kind"])
        if kind in self.config.events and kind != "failed":
            self.send(event)

    def send(self, event: Mapping[str, Any]) -> None:
        """Send this event as soon as possible. Returns at once; if too many wait, it is dropped."""
        with suppress(queue.Full):
            self._events.put_nowait(dict(event))

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send what waits, for at most this long."""
        with suppress(queue.Full):
            self._events.put(None, timeout=seconds)
        self._thread.join(seconds)
        self.command.kill()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                left_out = self.limit.admit(event)
                if left_out is not None:
                    self._deliver(event, left_out)
            except Exception as error:  # whatever happens here, training goes on
                self._warn("event", type(error).__name__)

    def _deliver(self, event: Mapping[str, Any], left_out: int) -> None:
        about = {
            **event,
            "run": self.folder.resolve().name,
            "folder": str(self.folder),
            "host": socket.gethostname(),
        }
        text = message(about, left_out)
        # At once, so that one that hangs doesn't take the other's time at the end of a run.
        posting = threading.Thread(
            target=self._post,
            args=({"text": _for_slack(text), "event": about},),
            daemon=True,
        )
        posting.start()
        if self.config.command:
            try:
                self.command.run(about | {"text": text})
            except DeliveryError as error:
                self._warn(f"command {self.config.command[0]}", str(error))
        posting.join()

    def _post(self, body: Mapping[str, Any]) -> None:
        name = self.config.webhook_env
        try:
            if url := name and os.environ.get(name):
                post(url, body, self.config.timeout_seconds)
        except Exception as error:  # the text of any but ours may hold the URL
            known = isinstance(error, DeliveryError)
            self._warn(f"webhook in {name}", str(error) if known else type(error).__name__)

    def _warn(self, what: str, problem: str) -> None:
        if what not in self._warned:
            logger.warning(
                f"notifications: {what}: {problem}. The run continues; this is said once"
            )
        self._warned.add(what)


def message(about: Mapping[str, Any], left_out: int) -> str:
    """An event in one line."""
    at = "" if about.get("step") is None else f" at step {about['step']:,}"
    lead = "" if about["kind"] in _SAYS_ALL else f"{about['kind']}{at}: "
    more = f" ({left_out:,} more since the last message)" if left_out else ""
    return f"{about['run']}: {lead}{cut(' '.join(str(about['message']).split()), 1000)}{more}"


def _for_slack(text: str) -> str:
    """Slack reads these as markup: `<!channel>` would notify everyone."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class RateLimit:
    """Which events to send. What was sent stands in a file, because a run that fails and restarts
    in a loop is many processes, and because several ranks or nodes may report the same failure.
    """

    def __init__(self, path: Path, config: Notifications):
        self.path = path
        self.config = config

    def admit(self, event: Mapping[str, Any]) -> int | None:
        """How many events of this kind were left out since the last message; None if this one is
        left out, too.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                return self._admit(event, file)
        except OSError:  # a full disk is worth a message
            return 0

    def _admit(self, event: Mapping[str, Any], file: IO[bytes]) -> int | None:
        now = time.time()
        kind = _ALIAS.get(event["kind"], event["kind"])
        earlier = _entries(file)
        last = -math.inf
        left_out = 0
        for entry in earlier:
            if entry["kind"] == kind:
                last, left_out = (entry["time"], 0) if entry["sent"] else (last, left_out + 1)
        interval = 0 if kind == "finished" else self.config.interval_seconds
        if kind == "failed":
            interval = max(interval, _SAME_FAILURE_SECONDS)
        sent = sum(entry["sent"] and now - entry["time"] < 3600 for entry in earlier)
        admitted = now - last >= interval and (
            sent < self.config.max_per_hour or kind in _NEVER_LEFT_OUT
        )
        entry = {
            "time": now,
            "kind": kind,
            "step": event.get("step"),
            "message": str(event["message"])[:500],
        }
        file.write(json.dumps(entry | {"sent": admitted}).encode() + b"\n")
        return left_out if admitted else None


def _entries(file: IO[bytes]) -> list[dict[str, Any]]:
    """The last lines of the file that can be read."""
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _TAIL))
    found = []
    for line in file.read().splitlines():
        with suppress(ValueError, TypeError, LookupError):
            entry = json.loads(line)
            found.append(
                {
                    "time": float(entry["time"]),
                    "kind": str(entry["kind"]),
                    "sent": bool(entry["sent"]),
                }
            )
    return found


# ---- who sends what


def start_notifier(config: Config) -> Notifier | None:
    """Sends the events of rank 0; None if nobody is to be told."""
    wanted = config.notifications
    if not wanted.webhook_env and not wanted.command:
        return None
    return Notifier(wanted, Path(config.job.dump_folder))


def report_failure(config: Config, cause: str) -> None:
    """Send that the run failed, once, however many ranks and launchers call this."""
    if "failed" not in config.notifications.events or (notifier := start_notifier(config)) is None:
        return
    step = _last_step(Path(config.job.dump_folder))
    notifier.send(
        {
            "time": time.time(),
            "kind": "failed",
            "step": step,
            "message": cause,
        }
    )
    notifier.close(FAILURE_SECONDS)


def report_error(config: Config, error: BaseException) -> None:
    """Send that this rank failed, unless its launcher will, which also knows of ranks that were
    killed.
    """
    if launcher_reports() or not isinstance(error, Exception):
        return
    if from_another_rank(error):
        if rank_and_world()[0] != 0:
            return
        time.sleep(_CAUSE_FIRST_SECONDS)
    report_failure(config, str(error).strip() or type(error).__name__)


def _last_step(folder: Path) -> int | None:
    with suppress(OSError, ValueError, LookupError, TypeError):
        return int(json.loads((folder / "run.json").read_text())["starts"][-1]["step"])
    return None
