"""Starts runs: new projects, grids, the launcher of ranks, and jobs of schedulers."""
