"""The choice of ranks to rehearse, of the one that represents each other rank, and of the values
that they read of their own data.

Ranks at one place of the pipeline run the same stages, so they can differ only in their coordinates
along the other axes: the first rank does a root's and the log's work, the last has the remainder of
uneven shards. At each place of the pipeline, the ranks that are first and last along all other axes
are rehearsed; at the first place also the ranks that are last, or in the middle, along one axis
only.
"""

from collections.abc import Collection, Mapping

VALUES = (1, 9240, 9242)
"""Values that the host reads of a rank's own tensors. Their differences are primes (9239, 9241 and
2), so they differ modulo any other number, and all three are equal modulo no number. Only 9240 is
a multiple of 3, 4, 5, 6, 7, 8, 10, 11 and 12.
"""


def coordinates(rank: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """A rank's index along each mesh axis.

    Args:
        degrees: degree of each axis, from outer to inner.
    """
    indexes = {}
    for axis, degree in reversed(list(degrees.items())):
        rank, indexes[axis] = divmod(rank, degree)
    return {axis: indexes[axis] for axis in degrees}


def rank_at(position: Mapping[str, int], degrees: Mapping[str, int]) -> int:
    """The inverse of `coordinates`; axes that `position` lacks are at 0."""
    rank = 0
    for axis, degree in degrees.items():
        rank = rank * degree + position.get(axis, 0)
    return rank


def corners(degrees: Mapping[str, int]) -> list[int]:
    """The ranks to rehearse, in order."""
    last = {axis: degree - 1 for axis, degree in degrees.items() if degree > 1 and axis != "pp"}
    positions = [{axis: coordinate} for axis, coordinate in last.items()]
    positions += [{axis: degrees[axis] // 2} for axis in last]
    for stage in range(degrees["pp"]):
        positions += [{"pp": stage}, {**last, "pp": stage}]
    return sorted({rank_at(position, degrees) for position in positions})


class RankSample:
    """The rehearsed ranks, and which of them represents each rank."""

    def __init__(self, ranks: Collection[int], degrees: Mapping[str, int]):
        self.ranks = set(ranks)
        self.degrees = degrees
        self._stand_ins: dict[tuple[int, ...], int] = {}
        self._kinds = {rank: self._kind(rank) for rank in sorted(ranks)}

    def _kind(self, rank: int) -> tuple[int, ...]:
        """The place in the pipeline, then for each axis 0 (first), 1 (between) or 2 (last)."""
        kind = []
        for axis, index in coordinates(rank, self.degrees).items():
            if axis == "pp" or index == 0:
                kind.append(index)
            else:
                kind.append(2 if index == self.degrees[axis] - 1 else 1)
        return tuple(kind)

    def stand_in(self, rank: int) -> int:
        """The rehearsed rank that represents `rank`, which may be itself.

        It is at the same place of the pipeline, first along most of the axes along which `rank` is
        first, then last along most.
        """
        if rank in self.ranks:
            return rank
        kind = self._kind(rank)
        if kind not in self._stand_ins:
            candidates = [other for other, its in self._kinds.items() if its[0] == kind[0]]
            self._stand_ins[kind] = max(
                candidates, key=lambda other: _likeness(kind, self._kinds[other])
            )
        return self._stand_ins[kind]

    def values(self, rank: int) -> int:
        """Index of the made-up values that the rank reads of its own tensors.

        The value of a stage's first rank is far from the values of the stage's other ranks, and of
        the adjacent stages' first ranks. Where three ranks are in a line, all values occur.
        """
        position = coordinates(rank, self.degrees)
        stage = position.pop("pp", 0)
        steps = sum(position.values())
        if stage % 2:
            return int(steps == 0)
        return 2 - steps % 2 if steps else 0


def _likeness(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int]:
    """Number of axes on which two kinds of ranks agree about being first, and are equal."""
    pairs = list(zip(a, b, strict=True))
    return sum((x > 0) == (y > 0) for x, y in pairs), sum(x == y for x, y in pairs)
