"""What a start, a save and a resume cost as the number of ranks grows. Imports no torch."""

from dataclasses import dataclass
from itertools import groupby

from torchtitan.config.derive import axis_degrees
from torchtitan.tools.rehearsal.events import Record
from torchtitan.tools.rehearsal.mismatches import all_groups
from torchtitan.tools.rehearsal.rank_sample import coordinates
from torchtitan.tools.rehearsal.rehearsal import Rehearsal

_GATHERED = ("gather_object", "scatter_object_list")
"""Rank 0 receives or sends the objects of all members."""


@dataclass(frozen=True)
class Startup:
    """Numbers of one cluster size."""

    groups: int
    """Number of process groups that rank 0 is a member of."""
    calls: int
    """Calls that create groups, on each rank, with gloo: one for each group of the cluster."""
    splits: int
    """Calls that create groups with NCCL: one for each axis."""
    connections: int
    """Connections of rank 0, if gloo connects all pairs of a group when it is created."""
    store: int
    """Operations on the key-value store, over all ranks, for these connections."""
    lazy_store: int
    """Operations on the store if gloo connects only pairs that communicate."""
    start_objects: int
    """Bytes of objects that a rank receives from others until the first step."""
    save_objects: int
    """Bytes of objects that rank 0 receives and sends in each save."""
    resume_objects: int
    parts: int
    """Number of parts of tensors in a checkpoint."""
    metadata: int
    """Bytes of `.metadata` and `tensors.json`."""


def startup(rehearsal: Rehearsal) -> Startup:
    """Count from the records; what depends on layers that did not run is scaled by their number.

    gloo's operations on the store were counted on real groups: of n members, each sets one key, and
    waits for and gets n. With `TORCH_GLOO_LAZY_INIT`, each only sets one.
    """
    record = rehearsal.records[0]
    own = [group.ranks for group in record.groups if len(group.ranks) > 1]
    sizes = [len(ranks) for ranks, _ in all_groups(record)]
    parts = _parts(rehearsal)
    return Startup(
        groups=len(own),
        calls=len(record.creations),
        splits=sum(1 for _ in groupby(record.creations, key=lambda c: (c.description, c.at))),
        connections=sum(len(ranks) - 1 for ranks in own),
        store=sum(n * (2 * n + 1) for n in sizes),
        lazy_store=sum(sizes),
        start_objects=_objects(record, "start"),
        save_objects=_objects(record, "save"),
        resume_objects=_objects(record, "resume"),
        parts=parts,
        metadata=round(parts * record.metadata),
    )


def _objects(record: Record, during: str) -> int:
    """Bytes of objects that rank 0 exchanges with the others during a part of the rehearsal."""
    total = 0.0
    for event in record.collectives:
        if event.during == during and event.tensors == "object":
            size: float = event.bytes
            if not event.op.startswith("broadcast"):
                size *= len(event.group.ranks)
            if event.op in _GATHERED and event.bytes > 1000:  # a plan
                size *= _scale(record)
            total += size
    return round(total)


def _scale(record: Record) -> float:
    """Number of a rank's layers, relative to those that ran."""
    run, of = record.layers
    return of / run if run else 1.0


def _parts(rehearsal: Rehearsal) -> int:
    degrees = axis_degrees(rehearsal.config.parallelism)
    total = 0.0
    for rank, record in rehearsal.records.items():
        if not any(at for axis, at in coordinates(rank, degrees).items() if axis != "pp"):
            total += record.parts[0] * _scale(record) + record.parts[1]
    return round(total)


def rows(found: Startup) -> list[tuple[str, str]]:
    """The numbers in words."""

    def mib(size: int) -> str:
        return f"{size / 2**20:,.1f} MiB"

    store = f"{found.store:,}; {found.lazy_store:,} and more"
    parts = f"{found.parts:,}; {mib(found.metadata)}"
    return [
        ("process groups of rank 0", f"{found.groups:,}"),
        ("calls that create groups (gloo; NCCL)", f"{found.calls:,}; {found.splits:,}"),
        ("connections of rank 0, if gloo makes all at once", f"{found.connections:,}"),
        ("store operations (all at once; as needed)", store),
        ("objects received by a rank at the start", mib(found.start_objects)),
        ("objects through rank 0 in a save", mib(found.save_objects)),
        ("objects through rank 0 in a resume", mib(found.resume_objects)),
        ("parts of tensors in a checkpoint, and their metadata", parts),
    ]
