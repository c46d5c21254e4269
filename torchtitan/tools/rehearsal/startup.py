"""What a start, a save and a resume cost beside training, as it grows with the number of ranks.
Imports no torch.
"""

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from torchtitan.config.derive import axis_degrees
from torchtitan.tools.rehearsal.mismatches import all_groups
from torchtitan.tools.rehearsal.rank_sample import coordinates
from torchtitan.tools.rehearsal.rehearsal import Rehearsal

_GATHERED = ("gather_object", "scatter_object_list")
"""Rank 0 receives or sends the objects of all members."""


@dataclass(frozen=True)
class Startup:
    """Numbers of one cluster size."""

    groups: int
    """Process groups that rank 0 is a member of."""
    calls: int
    """That create groups, on each rank, with gloo alone: one for each group of the cluster."""
    splits: int
    """The same with NCCL: one for each axis."""
    connections: int
    """Between rank 0 and others, if gloo connects all pairs of each group when it is created."""
    store: int
    """Operations on the key-value store, of all ranks together, with which gloo does so."""
    lazy_store: int
    """The same if gloo connects pairs that communicate, before they do."""
    start_objects: int
    """Bytes of objects that a rank receives from others until the first step."""
    save_objects: int
    """The same of rank 0 in each save, and those that it sends to others."""
    resume_objects: int
    parts: int
    """Of tensors in a checkpoint."""
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
    return Startup(
        groups=len(own),
        calls=len(record.creations),
        splits=sum(1 for _ in groupby(record.creations, key=lambda c: (c.description, c.at))),
        connections=sum(len(ranks) - 1 for ranks in own),
        store=sum(n * (2 * n + 1) for n in sizes),
        lazy_store=sum(sizes),
        start_objects=_objects(rehearsal, "start"),
        save_objects=_objects(rehearsal, "save"),
        resume_objects=_objects(rehearsal, "resume"),
        parts=(parts := _parts(rehearsal)),
        metadata=round(parts * record.metadata),
    )


def _objects(rehearsal: Rehearsal, during: str) -> int:
    """Bytes of objects that rank 0 exchanges with the others during a part of the rehearsal."""
    record = rehearsal.records[0]
    total = 0.0
    run, of = record.layers
    for event in record.collectives:
        if event.during == during and event.tensors == "object":
            members = len(record.groups[event.slot].ranks)
            per_layer = event.op in _GATHERED and event.bytes > 1000  # a plan
            factor = 1 if event.op.startswith("broadcast") else members
            total += event.bytes * factor * (of / run if per_layer and run else 1)
    return round(total)


def _parts(rehearsal: Rehearsal) -> int:
    degrees = axis_degrees(rehearsal.config.parallelism)
    total = 0.0
    for rank, record in rehearsal.records.items():
        if not any(at for axis, at in coordinates(rank, degrees).items() if axis != "pp"):
            run, of = record.layers
            total += record.parts[0] * (of / run if run else 1) + record.parts[1]
    return round(total)


def rows(found: Startup) -> list[tuple[str, str]]:
    """In words."""
    mib = 2**20
    return [
        ("process groups of rank 0", f"{found.groups:,}"),
        ("calls that create groups (gloo; NCCL)", f"{found.calls:,}; {found.splits:,}"),
        ("connections of rank 0, if gloo makes all at once", f"{found.connections:,}"),
        (
            "store operations (all at once; as needed)",
            f"{found.store:,}; {found.lazy_store:,} and more",
        ),
        ("objects received by a rank at the start", f"{found.start_objects / mib:,.1f} MiB"),
        ("objects through rank 0 in a save", f"{found.save_objects / mib:,.1f} MiB"),
        ("objects through rank 0 in a resume", f"{found.resume_objects / mib:,.1f} MiB"),
        (
            "parts of tensors in a checkpoint, and their metadata",
            f"{found.parts:,}; {found.metadata / mib:,.1f} MiB",
        ),
    ]


def as_data(found: Startup) -> dict[str, Any]:
    return asdict(found)
