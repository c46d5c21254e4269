"""Limits on what is read from outside, far above any honest use: more is refused early.

Sizes are bytes unless the comment says otherwise. A constant is named by what it limits.
"""

# checkpoint

CONFIG_TABLE_LEVELS = 8
"""Nested tables in the configuration that a manifest holds."""

# config

# data

# health
MOST_RANKS = 2**20
"""Number of ranks in the reports of a hang."""

# inference

# telemetry
NOTIFICATIONS_TAIL = 256 * 1024

# tools

# utils

JSON_BYTES = 2**28
"""A JSON file; a manifest of 100,000 ranks or a list of a million data files is smaller."""
LOCK_BYTES = 4096
PROBLEM_CHARACTERS = 1000
"""Of one problem in an error message."""
PENDING_LOG_LINES = 10_000
"""Lines logged before the log file is known."""
