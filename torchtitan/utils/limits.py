"""Limits on what is read from outside, far above any honest use: more is refused early.

Sizes are bytes unless the comment says otherwise. A constant is named by what it limits.
"""

# checkpoint

# config

# data
SEARCHED_FILES = 1_000_000
"""Files and folders that a path may search for data. They take some seconds."""
SEARCHED_AT_CHECK = 50_000
"""The same while a configuration is checked. They take half a second."""
RECORD_BYTES = 1000 * 2**20
"""A JSON line, array entry or CSV field. It is held in memory."""
CACHE_RECORD_BYTES = 2**32
"""A record in the cache folder; that of a million files is smaller."""
WHOLE_TEXT_CHARACTERS = 10_000_000
"""A text for a tokenizer that can't encode pieces. Each character takes about 0.6 KB."""
STATE_LEVELS = 100
"""Levels of lists and objects in a stream's state; pydantic's parser accepts about 200."""

# health

# inference

# telemetry

# tools

# utils
