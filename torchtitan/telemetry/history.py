"""The history of a run, which its records follow as its checkpoints do.

Each start or rewind that trains begins a branch. A record names its branch, and a checkpoint the
branches that lead to it. So the records of abandoned steps can be told from the ones that replace
them, and come back if the run returns to an abandoned checkpoint.
"""

import secrets

ABANDONED = "abandoned-"
"""Prefix of the files that hold the records of abandoned branches."""


class History:
    """The branches that lead to the run's current step."""

    def __init__(self) -> None:
        self.branches: dict[str, int] = {}
        """The first step of each branch, by its random name, oldest first."""

    def begin(self, step: int) -> None:
        """Begin a branch after `step`."""
        self.branches = {name: first for name, first in self.branches.items() if first <= step}
        self.branches[secrets.token_hex(4)] = step + 1

    def branch_of(self, step: int) -> str | None:
        """The branch of `step`; None for a step of a version that recorded none."""
        branches = reversed(self.branches.items())
        return next((name for name, first in branches if first <= step), None)
