"""Limits on what is read from outside, far above any honest use: more is refused early.

Sizes are bytes unless the comment says otherwise. A constant is named by what it limits.
"""

# checkpoint

# config

# data

# health

# inference

# telemetry

# tools

# utils
