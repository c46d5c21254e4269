"""Which ranks are rehearsed, and which of them stands for each of the others.

Ranks at one place of the pipeline run the same stages, so what they do can differ in their
coordinates along the other axes alone: the first has the root's or the log's work, the last has
what uneven shards leave. Rehearsed are, at each place of the pipeline, the rank that is first along
all other axes and the one that is last; at the first place also those that are last, or in the
middle, along one axis only.
"""

import math
from collections.abc import Collection, Mapping


def coordinates(rank: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """A rank's place along each mesh axis.

    Args:
        degrees: of the axes, from outer to inner.
    """
    place = {}
    for axis, degree in reversed(list(degrees.items())):
        rank, place[axis] = divmod(rank, degree)
    return {axis: place[axis] for axis in degrees}


def rank_at(place: Mapping[str, int], degrees: Mapping[str, int]) -> int:
    """The rank at a place: the inverse of `coordinates`."""
    rank = 0
    for axis, degree in degrees.items():
        rank = rank * degree + place.get(axis, 0)
    return rank


def corners(degrees: Mapping[str, int]) -> list[int]:
    """The ranks to rehearse, in order."""
    last = {axis: degree - 1 for axis, degree in degrees.items() if degree > 1 and axis != "pp"}
    places = [{axis: coordinate} for axis, coordinate in last.items()]
    places += [{axis: degrees[axis] // 2} for axis in last]
    for stage in range(degrees["pp"]):
        places += [{"pp": stage}, {**last, "pp": stage}]
    return sorted({rank_at(place, degrees) for place in places})


def every(degrees: Mapping[str, int]) -> list[int]:
    return list(range(math.prod(degrees.values())))


def _likeness(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int]:
    """On how many axes two kinds of ranks agree about being first, and are equal."""
    pairs = list(zip(a, b, strict=True))
    return sum((x > 0) == (y > 0) for x, y in pairs), sum(x == y for x, y in pairs)


class Cast:
    """Who stands for whom."""

    def __init__(self, rehearsed: Collection[int], degrees: Mapping[str, int]):
        self.rehearsed = set(rehearsed)
        self.degrees = degrees
        self._known: dict[tuple[int, ...], int] = {}
        self._kinds = {rank: self._kind(rank) for rank in sorted(rehearsed)}

    def _kind(self, rank: int) -> tuple[int, ...]:
        """The place in the pipeline; along each other axis 0 for the first rank, 2 for the last, 1
        between them.
        """
        kind = []
        for axis, at in coordinates(rank, self.degrees).items():
            is_last = at == self.degrees[axis] - 1
            kind.append(at if axis == "pp" or at == 0 else 2 if is_last else 1)
        return tuple(kind)

    def stands_for(self, rank: int) -> int:
        """The rehearsed rank at the same place of the pipeline that is most like `rank`: first
        along most of the axes along which `rank` is, then last along most. A rehearsed rank itself.
        """
        if rank in self.rehearsed:
            return rank
        kind = self._kind(rank)
        if kind not in self._known:
            own = [other for other, its in self._kinds.items() if its[0] == kind[0]]
            self._known[kind] = max(own, key=lambda other: _likeness(kind, self._kinds[other]))
        return self._known[kind]

    def large(self, rank: int) -> bool:
        """Whether what the rank reads of its own tensors is large: its neighbours in the comparison
        get the other.
        """
        place = coordinates(rank, self.degrees)
        return sum(at > 0 if axis != "pp" else at for axis, at in place.items()) % 2 == 1
