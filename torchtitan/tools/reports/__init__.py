"""Reads the folders of runs, and says how they go and how they differ."""

from torchtitan.tools.reports.collect import collect, window

__all__ = ["collect", "window"]
