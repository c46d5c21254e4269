"""Limits on untrusted input, far above any honest use. Larger input is refused early.

Sizes are in bytes unless the comment has another unit.
"""

# checkpoint

CONFIG_TABLE_LEVELS = 8
"""Levels of nested tables in a manifest's configuration."""

# config
TOML_BYTES = 2**17
"""All files of a configuration."""
TOML_VALUES = 10_000
"""Values of a configuration, or words of a command line."""
TOML_DEPTH = 16
"""Levels of nested tables, or of files that extend files."""
KEY_LENGTH = 200
NEAR_FILES = 1000
"""Files compared with a misspelt name."""
PIPELINE_SCHEDULE_BYTES = 2**22
FILE_NAME_BYTES = 255
"""The name of a file, on all common file systems."""
RANKS_PER_NODE = 1024
NODES = 100_000
NODE_RANGE = 2000
"""Numbers of nodes for which a configuration is checked before an elastic run."""

# data
SEARCHED_FILES = 1_000_000
"""Files and folders to search for data below a path, which takes some seconds."""
SEARCHED_AT_CHECK = 50_000
"""The same while a configuration is checked, which takes half a second."""
RECORD_BYTES = 1000 * 2**20
"""A JSON line, which is held in memory."""
CACHE_RECORD_BYTES = 2**32
"""A record in the cache folder; the record of a million files is smaller."""
TOKEN_IDS = 1 << 24
"""Ids of a tokenizer; counts are held in memory for each."""
SPECIAL_TOKENS = 1 << 16
"""Special tokens of a tokenizer's file, which are made one by one."""
LONGER_TEXT = 100
"""Factor by which a tokenizer may lengthen a text before splitting it."""
CONVERSATION_CHARACTERS = 10_000_000
"""A conversation, which is encoded as a whole. A character needs about 0.6 KB."""
MESSAGE_LEVELS = 100
"""Levels of lists and objects in a message; templates and encoders recurse."""
CHAT_TEMPLATE_BYTES = 2**20
STATE_LEVELS = 100
"""Levels of lists and objects in a stream's state; pydantic's parser accepts about 200."""

# health
MOST_RANKS = 2**20
"""Number of ranks in the reports of a hang."""

# tools

RUN_FILE_BYTES = 16 * 2**20
"""A run's run.json or config.toml."""
EVENTS_TAIL_BYTES = 4 * 2**20
"""Size of the end of a run's events to read."""
LOG_TAIL_BYTES = 2**14
"""Size of the end of a run's log to read."""
METRICS_LINE_BYTES = 2**20
"""Longer lines of metrics.jsonl are skipped."""
METRICS_TAIL_BYTES = 2**18
"""Size of the end of a run's metrics in which to look for the last record."""
RUNS_FILE_BYTES = 2**20
"""A file for `submit --runs`."""
SAMPLES_READ_BYTES = 16 * 2**20
"""Size of the end of a run's samples.jsonl or evals.jsonl to read."""

# utils

JSON_BYTES = 2**28
"""A JSON file; a manifest of 100,000 ranks or a list of a million data files is smaller."""
LOCK_BYTES = 4096
PROBLEM_CHARACTERS = 1000
"""One problem in an error message."""
PENDING_LOG_LINES = 10_000
"""Lines logged before the log file is opened."""
