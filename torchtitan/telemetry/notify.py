"""Tells people about events of the run: through a webhook, and by running a command.

Nothing here can stop or delay training: events wait in a short queue for a thread that limits their
rate and gives up on a receiver that doesn't answer.
"""

import fcntl
import json
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from torchtitan.config.sections.metrics import Notifications
from torchtitan.config.sections.schema import Config
from torchtitan.telemetry.delivery import Command, DeliveryError, post
from torchtitan.telemetry.events import Event
from torchtitan.utils.errors import failure_of
from torchtitan.utils.limits import NOTIFICATIONS_TAIL
from torchtitan.utils.logging import logger
from torchtitan.utils.process import launcher_reports, rank_and_world
from torchtitan.utils.wording import cut

FILE = "notifications.jsonl"
FLUSH_SECONDS = 5.0
"""Time to send waiting messages at the end of a run."""
FAILURE_SECONDS = 15.0
"""Time to send the message about a failure, which matters most."""
_QUEUED = 100
_SAME_FAILURE_SECONDS = 60
"""Failures of several ranks or nodes within this time are one."""
_CAUSE_FIRST_SECONDS = 3.0
"""Rank 0 waits this long for the rank that knows the cause to report it."""
_ALIAS = {"rewound": "spike"}
"""Events that count as another kind here."""
_NEVER_LEFT_OUT = ("failed", "finished")
_COMPLETE = ("finished", "preempted")
"""Kinds whose messages begin with kind and step."""


class Notifier:
    """Sends the chosen events from a thread."""

    def __init__(self, config: Notifications, folder: Path):
        self.config = config
        self.folder = folder
        self.limit = RateLimit(folder / FILE, config)
        self.command = Command(config.command, config.timeout_seconds)
        self._events: queue.Queue[Event | None] = queue.Queue(_QUEUED)
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
        self._thread.start()

    def listen(self, event: Event) -> None:
        """Send an event of the log; failures come from `report_failure`, which knows the cause."""
        kind = _kind(event)
        if kind in self.config.events and kind != "failed":
            self.send(event)

    def send(self, event: Event) -> None:
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
            self._try("event", self._deliver, event)

    def _deliver(self, event: Event) -> None:
        left_out = self.limit.admit(event)
        if left_out is None:
            return
        described = {
            **event,
            "run": self.folder.resolve().name,
            "folder": str(self.folder),
            "host": socket.gethostname(),
        }
        text = message(described, left_out)
        # At once, so that one that hangs doesn't take the other's time at the end of a run.
        posting = threading.Thread(target=self._post, args=(text, described), daemon=True)
        posting.start()
        if self.config.command:
            receiver = f"command {self.config.command[0]}"
            self._try(receiver, self.command.run, described | {"text": text})
        posting.join()

    def _post(self, text: str, details: Event) -> None:
        name = self.config.webhook_env
        url = os.environ.get(name) if name else None
        if url:
            body = {"text": _for_slack(text), "event": details}
            self._try(f"webhook in {name}", post, url, body, self.config.timeout_seconds)

    def _try(self, receiver: str, action: Callable[..., None], *arguments: Any) -> None:
        """Whatever fails here, training goes on; the first failure of a receiver is a warning."""
        try:
            action(*arguments)
        except Exception as error:
            if receiver in self._warned:
                return
            self._warned.add(receiver)
            # the text of any other error may hold the URL, which is a secret
            problem = str(error) if isinstance(error, DeliveryError) else type(error).__name__
            logger.warning(
                f"notifications: {receiver}: {problem}. The run continues; further failures are "
                "not reported"
            )


def _kind(event: Event) -> str:
    kind: str = event["kind"]
    return _ALIAS.get(kind, kind)


def message(details: Event, left_out: int) -> str:
    """An event in one line."""
    lead = ""
    if details["kind"] not in _COMPLETE:
        at = "" if details.get("step") is None else f" at step {details['step']:,}"
        lead = f"{details['kind']}{at}: "
    more = f" ({left_out:,} more since the last message)" if left_out else ""
    text = " ".join(str(details["message"]).split())
    return f"{details['run']}: {lead}{cut(text, 1000)}{more}"


def _for_slack(text: str) -> str:
    """Escape Slack's markup: `<!channel>` would notify everyone."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class RateLimit:
    """Decides which events to send, by a file of what was sent.

    The file is shared: a run that fails and restarts in a loop is many processes, and several ranks
    or nodes may report the same failure.
    """

    def __init__(self, path: Path, config: Notifications):
        self.path = path
        self.config = config

    def admit(self, event: Event) -> int | None:
        """The number of events of this kind that were suppressed since its last message; None to
        suppress this one, too.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                return self._admit(event, file)
        except OSError:  # a full disk is worth a message
            return 0

    def _admit(self, event: Event, file: IO[bytes]) -> int | None:
        now = time.time()
        kind = _kind(event)
        last = -math.inf
        left_out = 0
        in_last_hour = 0
        for at, earlier, sent in _entries(file):
            in_last_hour += sent and now - at < 3600
            if earlier == kind and sent:
                last = at
                left_out = 0
            elif earlier == kind:
                left_out += 1
        interval = 0 if kind == "finished" else self.config.interval_seconds
        if kind == "failed":
            interval = max(interval, _SAME_FAILURE_SECONDS)
        free = in_last_hour < self.config.max_per_hour or kind in _NEVER_LEFT_OUT
        admitted = free and now - last >= interval
        entry = {
            "time": now,
            "kind": kind,
            "step": event.get("step"),
            "message": str(event["message"])[:500],
            "sent": admitted,
        }
        file.write(json.dumps(entry).encode() + b"\n")
        return left_out if admitted else None


def _entries(file: IO[bytes]) -> list[tuple[float, str, bool]]:
    """Time, kind, and whether it was sent, of the last readable lines of the file."""
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - NOTIFICATIONS_TAIL))
    entries = []
    for line in file.read().splitlines():
        with suppress(ValueError, TypeError, LookupError):
            entry = json.loads(line)
            entries.append((float(entry["time"]), str(entry["kind"]), bool(entry["sent"])))
    return entries


# ---- who sends what


def start_notifier(config: Config) -> Notifier | None:
    """Sends the events of rank 0; None without a receiver."""
    settings = config.notifications
    if not settings.webhook_env and not settings.command:
        return None
    return Notifier(settings, Path(config.job.dump_folder))


def report_failure(config: Config, cause: str) -> None:
    """Send that the run failed, once, however many ranks and launchers call this."""
    notifier = start_notifier(config) if "failed" in config.notifications.events else None
    if notifier is None:
        return
    step = _last_step(Path(config.job.dump_folder))
    notifier.send({"time": time.time(), "kind": "failed", "step": step, "message": cause})
    notifier.close(FAILURE_SECONDS)


def report_error(config: Config, error: BaseException) -> None:
    """Send that this rank failed, unless its launcher will, which also knows of killed ranks."""
    if launcher_reports() or not isinstance(error, Exception):
        return
    failure = failure_of(error)
    if failure.elsewhere:
        if rank_and_world()[0] != 0:
            return
        time.sleep(_CAUSE_FIRST_SECONDS)
    report_failure(config, failure.message)


def _last_step(folder: Path) -> int | None:
    with suppress(OSError, ValueError, LookupError, TypeError):
        return int(json.loads((folder / "run.json").read_bytes())["starts"][-1]["step"])
    return None
