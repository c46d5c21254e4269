"""Destinations of metrics: `metrics.jsonl` and the trackers in `metrics.sinks`, one file each.

Every tracker gets the same records under the same names (`base.py`), in a separate thread that
contains every failure (`background.py`).
"""

from torchtitan.telemetry.trackers.base import Record, Sink, TrackedRun

__all__ = ["Record", "Sink", "TrackedRun"]
