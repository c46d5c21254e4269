"""What Prometheus scrapes: the newest values, on a port of one's own."""

import socket
import time
import urllib.request

import pytest

from tests.tracker_runs import Start, free_port
from torchtitan.config.sections.metrics import Prometheus

pytestmark = pytest.mark.usefixtures("one_rank", "working_folder")


def scraped(text):
    from prometheus_client.parser import text_string_to_metric_families

    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {
        (s.name, *(f"{k}={v}" for k, v in s.labels.items() if k != "run")): s.value for s in samples
    }


def fetch(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return scraped(answer.read().decode())


def eventually(check):
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prometheus_scrapes_the_newest_values(tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    file = tmp_path / "node/run.prom"
    start = Start(
        tmp_path / "mine", "prometheus", prometheus=Prometheus(port=port, textfile=str(file))
    )
    start.log(1, 2)
    for kind in ("saved", "saved", "spike"):
        start.trackers.call("event", {"kind": kind, "step": 2})
    validation = {
        "step": 2,
        "validation_loss/web": 1.25,
        "eval/arc/acc": 0.5,
        "loss/books": 2.0,
        "time": 101.0,
    }
    start.trackers.call("log", validation)
    eventually(
        lambda: file.exists() and ("torchtitan_val_loss", "set=web") in scraped(file.read_text())
    )
    values = fetch(port)
    expected = {
        ("torchtitan_train_step",): 2,
        ("torchtitan_train_loss",): 1.5,
        ("torchtitan_perf_tokens_per_second",): 9.0,
        ("torchtitan_val_loss", "set=web"): 1.25,
        ("torchtitan_eval", "metric=arc/acc"): 0.5,
        ("torchtitan_sources_loss", "source=books"): 2.0,
        ("torchtitan_running",): 1.0,
        ("torchtitan_restarts_total",): 0.0,
        ("torchtitan_events_total", "kind=saved"): 2.0,
        ("torchtitan_events_total", "kind=spike"): 1.0,
        ("torchtitan_last_record_timestamp_seconds",): 101.0,
        ("torchtitan_goodput_percent",): 0.0,
    }
    assert values == expected
    assert 'run="mine"' in file.read_text()
    start.close()
    assert scraped(file.read_text()) == expected | {("torchtitan_running",): 0.0}
    with pytest.raises(OSError, match="refused"):
        fetch(port)


def test_a_port_that_is_taken_is_a_warning_and_served_once_it_is_free(tmp_path, caplog):
    pytest.importorskip("prometheus_client")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        start = Start(tmp_path, "prometheus", prometheus=Prometheus(port=port)).log(1, 2)
        eventually(lambda: caplog.records)
    start.log(3)
    eventually(lambda: ("torchtitan_train_loss",) in reached(port))
    start.close()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning == f"metrics.prometheus.port: {port} on 127.0.0.1 is in use; set another port"


def reached(port):
    try:
        return fetch(port)
    except OSError:
        return {}
