"""Limits on what is read from outside, far above any honest use: more is refused early.

Sizes are bytes unless the comment says otherwise. A constant is named by what it limits.
"""

# checkpoint

CONFIG_TABLE_LEVELS = 8
"""Nested tables in the configuration that a manifest holds."""

# config
TOML_BYTES = 2**17
"""A configuration's files together."""
TOML_VALUES = 10_000
"""Values of a configuration, or words of a command line."""
TOML_DEPTH = 16
"""Tables inside of tables, or files that extend files."""
KEY_LENGTH = 200
NEAR_FILES = 1000
"""Files compared with a misspelt name."""
PIPELINE_SCHEDULE_BYTES = 2**22
DATA_ENTRIES = 50_000
"""Files and folders looked at for data before a run. They take half a second."""

# data

# health

# inference

# telemetry

# tools

# utils

JSON_BYTES = 2**28
"""A JSON file; a manifest of 100,000 ranks or a list of a million data files is smaller."""
LOCK_BYTES = 4096
PROBLEM_CHARACTERS = 1000
"""Of one problem in an error message."""
PENDING_LOG_LINES = 10_000
"""Lines logged before the log file is known."""
