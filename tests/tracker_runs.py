"""Starts of a run that has trackers, and what their packages have kept of them."""

import json
import socket
import struct
import time

from torchtitan.config.registry import Custom
from torchtitan.config.sections.metrics import Metrics as Config
from torchtitan.config.sections.schema import Job
from torchtitan.telemetry.run_record import RunRecord
from torchtitan.telemetry.tracker_set import Trackers


class Start:
    """One start of a run in `folder`."""

    def __init__(self, folder, *sinks, step=0, end="completed", **keys):
        self.ledger = RunRecord(
            folder, {}, step=step, resumable=True, writes=True, began=time.time()
        )
        config = Config(sinks=list(sinks), **keys)
        job = Job(dump_folder=str(folder))
        self.trackers = Trackers(
            config, job, {"a": {"b": 3}}, self.ledger, start_step=step, custom=Custom()
        )
        self.trackers.call("rewind", step)  # as training begins
        self.step = step
        self.reason = end

    def log(self, *steps):
        for step in steps:
            self.trackers.call(
                "log",
                {
                    "step": step,
                    "loss": 3.0 / step,
                    "tokens_per_second": 9.0,
                    "time": 100.0 + step + self.step,
                },
            )
        return self

    def close(self):
        error = RuntimeError("cause") if self.reason.startswith("failed") else None
        self.ledger.end(self.step, 10**6 if self.reason == "preempted" else 0, error)
        self.trackers.close(self.reason)
        self.ledger.save_trackers()


def recorded(folder):
    return json.loads((folder / "run.json").read_text())["trackers"]


def wandb_records(folder):
    """What the files of W&B hold, oldest first, once its process has written their ends."""
    deadline = time.monotonic() + 60
    while True:
        files = [read_wandb(path) for path in sorted(folder.glob("wandb/*run-*/*.wandb"))]
        if all(any(record.HasField("exit") for record in records) for records in files):
            return files
        assert time.monotonic() < deadline, "a file without an end"
        time.sleep(0.1)


def read_wandb(path):
    """The records of a log in LevelDB's format, of protocol buffers, as far as it is written."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at = 7
    fragments = b""
    records = []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            break
        fragments += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            records.append(Record.FromString(fragments))
            fragments = b""
    return records


def history(records):
    """What was logged, as dictionaries."""
    kept = [record.history for record in records if record.HasField("history")]
    return [
        {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in one.item}
        for one in kept
    ]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
