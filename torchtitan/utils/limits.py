"""Limits on what is read from outside, far above any honest use: more is refused early.

Sizes are bytes unless the comment says otherwise. A constant is named by what it limits.
"""

# checkpoint

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
