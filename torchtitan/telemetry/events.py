"""Events of a run, in `<dump_folder>/events.jsonl`: starts, saves, spikes, rewinds, failures.

An event is a line of the log that is marked with `torchtitan.utils.logging.event`. The file is only
ever appended to: unlike in `metrics.jsonl`, events of steps that were rewound stay.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.utils.logging import EVENT, event, logger
from torchtitan.utils.run_files import RunFile

FILE = "events.jsonl"
Event = Mapping[str, Any]
"""A line of the file: time, kind, step, message, and details of the kind."""
Listener = Callable[[Event], None]
"""Called with each event, in the thread that logged it: it must neither block nor raise."""
_KIND = {"completed": "finished", "preempted": "preempted", "interrupted": "preempted"}


class Events(logging.Handler):
    """Writes the events in this rank's log, and passes them to a listener."""

    def __init__(
        self, folder: Path, *, writes: bool, continues: bool, listener: Listener | None = None
    ):
        """
        Args:
            writes: this is rank 0. The log of other ranks isn't recorded.
            continues: the run has earlier starts. Otherwise an existing file is another run's, and
                is set aside.
        """
        super().__init__()
        self.file = RunFile(folder / FILE)
        self.listener = listener
        self.writes = writes
        if not writes:
            return
        if not continues and self.file.path.exists():
            self.file.set_aside()
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, EVENT, None)
        if fields is None:
            return
        entry = {"time": record.created, **fields, "message": record.getMessage()}
        self.file.append(json.dumps(entry))
        if self.listener is not None:
            self.listener(entry)

    def end(self, step: int, reason: str, loss: str | None = None) -> None:
        """Record the end of this start.

        Args:
            reason: the reason in `run.json`.
            loss: the loss of the last steps, if this start trained any.
        """
        if self.writes:
            kind = _KIND.get(reason, "failed")
            message = reason.removeprefix("failed: ")
            if kind != "failed":
                message = f"{reason.capitalize()} after step {step:,}"
                if loss is not None:
                    message += f", loss {loss}"
            # the log has it already
            self.handle(logging.makeLogRecord({"msg": message, **event(kind, step)}))
        logger.removeHandler(self)
        self.close()
