"""Where metrics go: `metrics.jsonl` and the trackers that `metrics.sinks` names, one file each.

Every tracker gets the same records, under the same grouped names (`names.py`), from a thread of its
own that no failure leaves (`background.py`).
"""

from torchtitan.telemetry.trackers.base import Record, Sink, Tracked

__all__ = ["Record", "Sink", "Tracked"]
