"""A rehearsal in words, and as data."""

from dataclasses import asdict
from typing import Any

from torchtitan.config.derive import layout_degrees, layout_name
from torchtitan.health.collectives import name_ranks
from torchtitan.tools.rehearsal.coverage import omissions
from torchtitan.tools.rehearsal.events import RankRecord
from torchtitan.tools.rehearsal.rehearsal import Rehearsal
from torchtitan.utils.wording import aligned, plural, show_gib


def as_text(rehearsal: Rehearsal) -> str:
    """A summary of the checks, and the verdict."""
    counts = rehearsal.counts
    model = rehearsal.config.model
    layout = layout_name(layout_degrees(rehearsal.config.parallelism))
    layers = "all layers"
    if rehearsal.layers is not None:
        layers = f"up to {plural(rehearsal.layers, 'layer')} of each stage"
    seconds = sum(record.cpu_seconds for record in rehearsal.records.values())
    memory = max(record.memory for record in rehearsal.records.values()) / 2**30
    local_reads = "; ".join(sorted({at for at, shared in _reads(rehearsal) if not shared}))
    lines = [
        f"{model.label} on {plural(rehearsal.world, 'rank')}: {layout}",
        f"Rehearsed {_ranks(rehearsal)}; {layers}; {', '.join(_phases(rehearsal))}",
        "",
        aligned(_table(rehearsal.records[0])),
        "",
        f"Compared {plural(counts.groups, 'group')} of several ranks, "
        f"{plural(counts.collectives, 'collective')}, {plural(counts.messages, 'send')} and "
        f"{plural(counts.exchanges, 'split')} of experts' rows; {show_gib(counts.bytes / 2**30)} "
        "of messages",
        f"It took {seconds:,.0f} CPU seconds, and at most {show_gib(memory)} in each process",
        f"Values that a rank reads of its own data, which changed nothing: {local_reads or 'none'}",
        f"Not rehearsed: {'; '.join(omissions(rehearsal.config))}",
        "",
    ]
    lines += [f"FAULT ({fault.kind}): {fault.text}" for fault in rehearsal.faults]
    if not rehearsal.faults:
        lines.append(_verdict(rehearsal))
    return "\n".join(lines)


def _has_all_ranks(rehearsal: Rehearsal) -> bool:
    return len(rehearsal.records) == rehearsal.world


def _ranks(rehearsal: Rehearsal) -> str:
    """The ranks that ran, and the reason for the choice."""
    if _has_all_ranks(rehearsal):
        return "every rank"
    return (
        f"{name_ranks(rehearsal.records)}: at each place of the pipeline the first and "
        "the last rank, and along each axis one at its end and one in its middle"
    )


def _verdict(rehearsal: Rehearsal) -> str:
    agree = "groups, collectives, messages and their order agree"
    if _has_all_ranks(rehearsal):
        return f"No rank can wait for another forever: {agree}"
    others = plural(rehearsal.world - len(rehearsal.records), "other rank")
    return (
        f"None of these ranks can wait for another forever, nor can the {others} if each does what "
        f"the rank that stands for it does: {agree}. Code that singles out one of the others is "
        "not seen; --ranks and --every-rank rehearse more"
    )


def _phases(rehearsal: Rehearsal) -> list[str]:
    return list(dict.fromkeys(event.during for event in rehearsal.records[0].collectives))


def _reads(rehearsal: Rehearsal) -> set[tuple[str, bool]]:
    """Places where the host reads values, and whether all ranks read the same there."""
    records = rehearsal.records.values()
    return {(read.at, read.shared) for record in records for read in record.reads}


def _table(record: RankRecord) -> list[list[str]]:
    """Rank 0's groups, and what it does in them."""
    table = [["rank 0's group", "ranks", "collectives", "sends", "MiB", "made at"]]
    for slot, group in enumerate(record.groups):
        if len(group.ranks) == 1:
            continue
        entries = [event for event in record.collectives if event.slot == slot]
        posts = [post for post in record.posts if post.slot == slot]
        sends = [message for post in posts for message in post.messages if message.sends]
        size = sum(event.bytes for event in entries) + sum(message.bytes for message in sends)
        table.append(
            [
                group.description,
                str(len(group.ranks)),
                f"{len(entries):,}",
                f"{len(sends):,}",
                f"{size / 2**20:,.1f}",
                group.at,
            ]
        )
    return table


def as_data(rehearsal: Rehearsal) -> dict[str, Any]:
    """The result as JSON values."""
    return {
        "world": rehearsal.world,
        "layout": layout_degrees(rehearsal.config.parallelism),
        "layers": rehearsal.layers,
        "rehearsed": sorted(rehearsal.records),
        "parts": _phases(rehearsal),
        "not_rehearsed": omissions(rehearsal.config),
        "checked": asdict(rehearsal.counts),
        "reads": [{"at": at, "shared": shared} for at, shared in sorted(_reads(rehearsal))],
        "ranks": [_rank(rank, record) for rank, record in rehearsal.records.items()],
        "faults": [fault._asdict() for fault in rehearsal.faults],
    }


def _rank(rank: int, record: RankRecord) -> dict[str, Any]:
    return {
        "rank": rank,
        "groups": [
            {"name": group.description, "ranks": list(group.ranks), "at": group.at}
            for group in record.groups
        ],
        "collectives": len(record.collectives),
        "posts": len(record.posts),
        "cpu_seconds": record.cpu_seconds,
        "memory": record.memory,
    }
