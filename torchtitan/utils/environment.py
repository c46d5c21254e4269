"""What the launcher says in environment variables. Imports no torch."""

import os

from torchtitan.utils.errors import ConfigError


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun sets them; (0, 1) without it.

    Raises:
        ConfigError: they are no such numbers.
    """
    rank = os.environ.get("RANK", "0")
    world = os.environ.get("WORLD_SIZE", "1")
    if not (_is_number(rank) and _is_number(world) and int(rank) < int(world)):
        raise ConfigError(
            [
                f"RANK={rank[:20]!r} and WORLD_SIZE={world[:20]!r}: torchrun sets them "
                "to numbers; unset them without it"
            ]
        )
    return int(rank), int(world)


def reporting_rank() -> int:
    """This process's rank, to decide which process reports an error; 0 if it has none."""
    rank = os.environ.get("RANK", "0")
    return int(rank) if _is_number(rank) else 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 8
