"""Starts runs: new projects, the launcher of ranks, and jobs of Slurm."""
