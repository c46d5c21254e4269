"""Messages about a run to a webhook of Slack, Mattermost, Discord (with /slack) and the like.

    export TRAINING_WEBHOOK=https://hooks.slack.com/services/...
    PYTHONPATH=. torchtitan train CONFIG.toml --experimental.custom_import examples.notify \
        --training.callbacks notify
"""

import json
import logging
import os
import threading
import urllib.request
from collections.abc import Callable, Collection

import torch.distributed as dist

from torchtitan.config.registry import Section, callbacks
from torchtitan.train.callbacks import Callback, Run
from torchtitan.utils.logging import EVENT, logger


class Keys(Section):
    webhook_env: str = "TRAINING_WEBHOOK"
    """Environment variable with the URL, which is a secret: configurations are recorded."""
    events: list[str] = ["spike", "skipped", "rewound", "straggler"]
    """Kinds of events, as in `events.jsonl`. Start and end are always sent."""
    timeout_seconds: float = 10.0


class OnEvent(logging.Handler):
    """Passes on the lines of the log that are events."""

    def __init__(self, kinds: Collection[str], send: Callable[[str], None]):
        super().__init__()
        self.kinds = kinds
        self.send = send

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, EVENT, None)
        if event is not None and event["kind"] in self.kinds:
            self.send(record.getMessage())


@callbacks.register("notify", Keys)
class Notify(Callback):
    def __init__(self, keys: Keys):
        self.keys = keys
        self.handler = OnEvent(keys.events, self.send)
        self.run_name = ""

    def on_start(self, run: Run) -> None:
        if dist.get_rank() == 0:
            self.run_name = os.path.basename(run.config.job.dump_folder)
            self.send(f"started after step {run.progress.step:,}")
            logger.addHandler(self.handler)

    def on_end(self, run: Run, reason: str) -> None:
        if dist.get_rank() == 0:
            logger.removeHandler(self.handler)
            self.send(f"{reason} after step {run.progress.step:,}").join(self.keys.timeout_seconds)

    def send(self, text: str) -> threading.Thread:
        """Send it from a thread, since a webhook must not delay a step."""
        sending = threading.Thread(target=self._post, args=(text,), daemon=True)
        sending.start()
        return sending

    def _post(self, text: str) -> None:
        try:
            body = json.dumps({"text": f"{self.run_name}: {text}"}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(os.environ[self.keys.webhook_env], body, headers)
            urllib.request.urlopen(request, timeout=self.keys.timeout_seconds).close()
        except Exception as error:  # its text may hold the URL
            logger.warning(f"notify: {self.keys.webhook_env}: {type(error).__name__}")
