"""Limits on what is read from outside, far above any honest use: more is refused early.

Sizes are bytes unless the comment says otherwise. A constant is named by what it limits.
"""

# checkpoint

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
