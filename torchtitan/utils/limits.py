"""Limits on what is read from outside: far above any honest use, so that broken or hostile input is refused early.

Sizes are bytes unless the comment says otherwise. A constant is named by what it limits.
"""  # noqa: E501

# checkpoint

# config

# data

# health

# inference

# telemetry

# tools

# utils
