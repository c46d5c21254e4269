"""What the launcher says in environment variables. Imports no torch."""

import os


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun sets them; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
