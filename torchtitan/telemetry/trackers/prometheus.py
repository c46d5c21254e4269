"""Prometheus: the newest values, served on a port and written to a file for `node_exporter`."""

import errno
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.sections.metrics import Prometheus
from torchtitan.telemetry.trackers.base import Record, TrackedRun, scalars
from torchtitan.utils.logging import logger

_LABELS = {"val": "set", "sources": "source"}
"""The label for the third component of a name, by group."""


class PrometheusSink:
    """Serves the newest value of every metric as `torchtitan_<group>_<name>`, with the run as a
    label.
    """

    def __init__(self, run: TrackedRun, config: Prometheus):
        from prometheus_client import CollectorRegistry

        self.run = run
        self.config = config
        self.values: dict[str, float] = {}
        self.events: Counter[str] = Counter()
        self.running = 1.0
        self.last = time.time()
        self.server: Any = None
        self._warned = False
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._publish()

    def log(self, record: Record) -> None:
        self.values = self.values | {"train/step": record["step"]} | scalars(record)
        self.last = record.get("time", time.time())
        self._publish()

    def event(self, event: Mapping[str, Any]) -> None:
        """Count an event of the run."""
        self.events[event["kind"]] += 1

    def close(self) -> None:
        self.running = 0.0
        self._publish()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def collect(self) -> Iterator[Any]:
        """The metrics of a scrape. Called in the server's thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        run_name = self.run.name
        account = self.run.account()
        events = dict(self.events)
        times = "last_record_timestamp_seconds"
        gauges = (
            ("running", "1 until the process ends", self.running),
            (times, "Time of the newest record", self.last),
            ("goodput_percent", "Time in steps that are kept, of all starts", account["goodput"]),
        )
        for name, help_text, value in gauges:
            family: Any = GaugeMetricFamily(f"torchtitan_{name}", help_text, labels=["run"])
            family.add_metric([run_name], value)
            yield family
        help_text = "Starts of the run after its first"
        family = CounterMetricFamily("torchtitan_restarts", help_text, labels=["run"])
        family.add_metric([run_name], account["restarts"])
        yield family
        family = CounterMetricFamily(
            "torchtitan_events", "Events since this start", labels=["run", "kind"]
        )
        for kind_of_event, number in events.items():
            family.add_metric([run_name, kind_of_event], number)
        yield family
        families: dict[str, Any] = {}
        for key, value in self.values.items():
            name, labels = _name_and_labels(key)
            family = families.setdefault(
                name, GaugeMetricFamily(name, key, labels=["run", *labels])
            )
            family.add_metric([run_name, *labels.values()], value)
        yield from families.values()

    def _publish(self) -> None:
        """Write the file, and try to listen until it succeeds: a run that is just ending may occupy
        the port.
        """
        from prometheus_client import start_http_server, write_to_textfile

        if self.config.textfile:
            Path(self.config.textfile).parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(self.config.textfile, self.registry)  # atomic
        if self.server is not None or not self.config.port or not self.running:
            return
        try:
            self.server, _ = start_http_server(self.config.port, self.config.host, self.registry)
            logger.info(f"Prometheus: http://{self.config.host}:{self.config.port}/metrics")
        except OSError as error:
            reason = f"can't be served: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                reason = "is in use; set another port"
            if not self._warned:
                address = f"{self.config.port} on {self.config.host}"
                logger.warning(f"metrics.prometheus.port: {address} {reason}")
            self._warned = True


def _name_and_labels(key: str) -> tuple[str, dict[str, str]]:
    """The Prometheus name of a metric, and its labels: `val/loss/books` is
    `torchtitan_val_loss{set="books"}`.
    """
    group, _, name = key.partition("/")
    labels = {}
    if group == "eval":
        name, labels = "", {"metric": name}
    elif group in _LABELS and "/" in name:
        name, _, value = name.partition("/")
        labels = {_LABELS[group]: value}
    return re.sub(r"[^a-zA-Z0-9_]", "_", f"torchtitan_{group}_{name}").rstrip("_"), labels
