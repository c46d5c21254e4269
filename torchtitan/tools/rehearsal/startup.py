"""Cost of a start, a save and a resume as the number of ranks grows. Imports no torch."""

import math
from dataclasses import dataclass

from torchtitan.config.derive import axis_degrees
from torchtitan.tools.rehearsal.events import RankRecord
from torchtitan.tools.rehearsal.mismatches import all_groups
from torchtitan.tools.rehearsal.rank_sample import coordinates
from torchtitan.tools.rehearsal.rehearsal import Rehearsal
from torchtitan.utils.process import CONNECTED_RANKS

_OPENS = " in _opened"
"""End of the line that broadcasts the index in a resume; the index has only layers that ran."""


@dataclass(frozen=True)
class Startup:
    """Numbers of one cluster size."""

    groups: int
    """Number of process groups that rank 0 is a member of."""
    calls: int
    """Calls that create groups, on each rank: one for each group of the cluster."""
    connections: int
    """Connections of rank 0, if gloo connects all pairs of a group when it is created."""
    store: int
    """Operations on the key-value store, over all ranks, for these connections."""
    lazy_store: int
    """Operations on the store if gloo connects only pairs that communicate."""
    requests: int
    """Keys of the store that a rank sets, adds to or reads until the first step, at most."""
    files: int
    """Files that a rank opens until the first step, without code and data, at most."""
    start_objects: int
    """Bytes of objects that rank 0 receives from others until the first step."""
    save: tuple[int, int]
    """Number of collectives that a rank enters in each save, and their bytes."""
    resume: tuple[int, int]
    parts: int
    """Number of parts of tensors in a checkpoint."""
    metadata: int
    """Bytes of `.metadata`, and of all ranks' `__N.json`."""


def at_once(members: int) -> int:
    """Requests of a member to the store: it sets its key, waits for all keys and gets them."""
    return 2 * members + 1


def lazily(members: int) -> int:
    """`at_once` with `TORCH_GLOO_LAZY_INIT`, once each collective has run.

    A barrier connects most pairs: in each of log2(n) rounds, it sends to one member and receives
    from another. A ring connects two neighbors, a tree up to log2(n) members.
    """
    return 4 * math.ceil(math.log2(members)) - 1


def startup(rehearsal: Rehearsal) -> Startup:
    """Count from the records; what depends on layers that did not run is scaled by their number.

    gloo's requests to the store were counted on real groups.
    """
    record = rehearsal.records[0]
    members = [group.ranks for group in record.groups if len(group.ranks) > 1]
    sizes = [len(ranks) for ranks, _ in all_groups(record)]
    parts = _count_pieces(rehearsal)
    records = rehearsal.records.values()
    lazy = rehearsal.world > CONNECTED_RANKS
    return Startup(
        groups=len(members),
        calls=len(record.creations),
        connections=sum(len(ranks) - 1 for ranks in members),
        store=sum(n * at_once(n) for n in sizes),
        lazy_store=sum(sizes),
        requests=max(rank_record.store_keys for rank_record in records)
        + sum((lazily if lazy else at_once)(len(ranks)) for ranks in members),
        files=max(rank_record.files for rank_record in records),
        start_objects=_objects(record, "start"),
        save=_exchange(record, "save"),
        resume=_exchange(record, "resume"),
        parts=parts,
        metadata=round(parts * record.metadata),
    )


def _objects(record: RankRecord, during: str) -> int:
    """Bytes of objects that rank 0 exchanges with the others during a part of the rehearsal."""
    total = 0
    for event in record.collectives:
        if event.during == during and event.tensors == "object":
            broadcast = event.op.startswith("broadcast")
            total += event.bytes * (1 if broadcast else len(event.group.ranks))
    return total


def _exchange(record: RankRecord, during: str) -> tuple[int, int]:
    """Collectives of rank 0 during a part of the rehearsal, and their bytes."""
    events = [event for event in record.collectives if event.during == during]
    indexes = sum(
        event.bytes
        for event in events
        if event.op.startswith("broadcast") and event.at.endswith(_OPENS)
    )
    others = sum(event.bytes for event in events) - indexes
    return len(events), round(others + indexes * _scale(record))


def _scale(record: RankRecord) -> float:
    """Number of a rank's layers, relative to the layers that ran."""
    run, of = record.layers
    return of / run if run else 1.0


def _count_pieces(rehearsal: Rehearsal) -> int:
    degrees = axis_degrees(rehearsal.config.parallelism)
    total = 0.0
    for rank, record in rehearsal.records.items():
        if not any(at for axis, at in coordinates(rank, degrees).items() if axis != "pp"):
            total += record.checkpoint_pieces[0] * _scale(record) + record.checkpoint_pieces[1]
    return round(total)


def rows(numbers: Startup) -> list[tuple[str, str]]:
    """The numbers in words."""

    def show_exchange(totals: tuple[int, int]) -> str:
        return f"{totals[0]:,}; {totals[1]:,} bytes"

    def mib(size: int) -> str:
        return f"{size / 2**20:,.1f} MiB"

    store = f"{numbers.store:,}; {numbers.lazy_store:,}"
    parts = f"{numbers.parts:,}; {mib(numbers.metadata)}"
    return [
        ("process groups of rank 0", f"{numbers.groups:,}"),
        ("calls that create groups", f"{numbers.calls:,}"),
        ("connections of rank 0, if gloo makes all at once", f"{numbers.connections:,}"),
        ("store requests of all ranks to connect groups (all at once; as needed)", store),
        ("store requests of a rank at the start", f"{numbers.requests:,}"),
        ("files opened by a rank at the start, besides data", f"{numbers.files:,}"),
        ("objects received by rank 0 at the start", mib(numbers.start_objects)),
        ("collectives of a rank in a save", show_exchange(numbers.save)),
        ("collectives of a rank in a resume", show_exchange(numbers.resume)),
        ("parts of tensors in a checkpoint, and their metadata", parts),
    ]
