"""Limits on what is read from outside, far above any honest use: more is refused early.

Sizes are bytes unless the comment says otherwise. A constant is named by what it limits.
"""

# checkpoint

CONFIG_TABLE_LEVELS = 8
"""Nested tables in the configuration that a manifest holds."""

# config

# data

# health

# inference

# telemetry

# tools

RUN_FILE_BYTES = 16 * 2**20
"""A run's run.json or config.toml."""
EVENTS_TAIL_BYTES = 4 * 2**20
"""The end of a run's events that is read, or of what was appended to its metrics."""
METRICS_LINE_BYTES = 2**20
"""Longer lines of metrics.jsonl are skipped."""
METRICS_READ_BYTES = 64 * 2**20
"""Read of one metrics.jsonl."""
GRID_FILE_BYTES = 2**20
"""A file for `submit --runs`."""
QUERY_FIELDS = 8
"""Of a request to `torchtitan watch`."""

# utils

JSON_BYTES = 2**28
"""A JSON file; a manifest of 100,000 ranks or a list of a million data files is smaller."""
LOCK_BYTES = 4096
PROBLEM_CHARACTERS = 1000
"""Of one problem in an error message."""
PENDING_LOG_LINES = 10_000
"""Lines logged before the log file is known."""
