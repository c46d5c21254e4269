"""Reads the folders of runs: how each run goes, and how runs differ."""
