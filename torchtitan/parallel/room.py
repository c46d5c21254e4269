"""Room for experts' rows in exchanges of a fixed size. Imports no torch."""

import math
from typing import NamedTuple

_PARTS = 16
"""Sizes are rounded up to this many parts of a power of two, so that they rarely change."""


class Room(NamedTuple):
    """The rows that the exchange of a layer has room for."""

    pair: int
    """From one rank to another."""
    rank: int
    """For the experts of one rank, from all."""

    def within(self, rows: int, ranks: int) -> "Room":
        """No more than could ever be needed if each rank has this many rows."""
        pair = max(1, min(self.pair, rows))
        return Room(pair, max(1, min(self.rank, ranks * pair)))


def room_for(rows: float, headroom: float) -> int:
    """Rows to make room for if lately at most this many were needed."""
    wanted = math.ceil(rows * headroom)
    part = max(1, 2 ** (max(1, wanted).bit_length() - 1) // _PARTS)
    return -(-wanted // part) * part


def equal_room(rows: int, ranks: int, headroom: float) -> Room:
    """Room for equal loads, of `rows` from each rank."""
    return Room(room_for(rows / ranks, headroom), room_for(rows, headroom))
