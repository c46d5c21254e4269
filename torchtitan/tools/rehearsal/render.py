"""A rehearsal in words, and as data."""

from typing import Any

from torchtitan.config.derive import layout_degrees, layout_name
from torchtitan.health.rank_dumps import name_ranks
from torchtitan.tools.rehearsal.rehearsal import Rehearsal
from torchtitan.tools.rehearsal.startup import as_data as startup_data
from torchtitan.tools.rehearsal.startup import rows, startup
from torchtitan.utils.text import aligned, plural, show_gib


def as_text(rehearsal: Rehearsal) -> str:
    """What was checked, and the verdict."""
    counts = rehearsal.counts
    records = rehearsal.records
    model = rehearsal.config.model
    layers = (
        "all layers"
        if rehearsal.layers is None
        else f"up to {plural(rehearsal.layers, 'layer')} of each stage"
    )
    lines = [
        f"{model.name} {model.flavor} on {plural(rehearsal.world, 'rank')}: "
        f"{layout_name(layout_degrees(rehearsal.config.parallelism))}",
        f"Rehearsed {_who(rehearsal)}; {layers}; {', '.join(_parts(rehearsal))}",
        "",
        aligned(_table(rehearsal)),
        "",
        f"Compared {plural(counts.groups, 'group')} of several ranks, "
        f"{plural(counts.collectives, 'collective')}, "
        f"{plural(counts.messages, 'send')} and {plural(counts.exchanges, 'split')} of "
        "experts' rows; "
        f"{show_gib(counts.bytes / 2**30)} of messages",
        f"It took {sum(r.cpu_seconds for r in records.values()):,.0f} CPU seconds, and at most "
        f"{show_gib(max(r.memory for r in records.values()) / 2**30)} in each process",
        f"Values that a rank reads of its own data, which changed nothing: {_own(rehearsal)}",
        "",
        aligned([("start-up and checkpoints", "on this many ranks"), *rows(startup(rehearsal))]),
        "",
    ]
    if rehearsal.faults:
        lines += [f"FAULT ({fault.kind}): {fault.text}" for fault in rehearsal.faults]
    else:
        lines.append(_verdict(rehearsal))
    return "\n".join(lines)


def _is_whole(rehearsal: Rehearsal) -> bool:
    return len(rehearsal.records) == rehearsal.world


def _who(rehearsal: Rehearsal) -> str:
    """Which ranks ran, and why these."""
    if _is_whole(rehearsal):
        return "every rank"
    return (
        f"{name_ranks(rehearsal.records)}: at each place of the pipeline the first and "
        "the last rank, and along each "
        "axis one at its end and one in its middle"
    )


def _verdict(rehearsal: Rehearsal) -> str:
    agree = "groups, collectives, messages and their order agree"
    if _is_whole(rehearsal):
        return f"No rank can wait for another forever: {agree}"
    others = plural(rehearsal.world - len(rehearsal.records), "other rank")
    return (
        f"None of these ranks can wait for another forever, nor can the {others} if each "
        "does what the rank that "
        f"stands for it does: {agree}. Code that singles out one of the others is not "
        "seen; --ranks and --every-rank "
        "rehearse more"
    )


def _parts(rehearsal: Rehearsal) -> list[str]:
    return list(dict.fromkeys(event.during for event in rehearsal.records[0].collectives))


def _table(rehearsal: Rehearsal) -> list[list[str]]:
    """Rank 0's groups, and what it does in them."""
    record = rehearsal.records[0]
    rows = [["rank 0's group", "ranks", "collectives", "sends", "MiB", "made at"]]
    for slot, group in enumerate(record.groups):
        if len(group.ranks) == 1:
            continue
        entered = [event for event in record.collectives if event.slot == slot]
        sent = [m for post in record.posts if post.slot == slot for m in post.messages if m.sends]
        size = sum(event.bytes for event in entered) + sum(message.bytes for message in sent)
        row = [
            group.description,
            len(group.ranks),
            f"{len(entered):,}",
            f"{len(sent):,}",
            f"{size / 2**20:,.1f}",
        ]
        rows.append([*map(str, row), group.at])
    return rows


def _own(rehearsal: Rehearsal) -> str:
    places = {
        read.at for record in rehearsal.records.values() for read in record.reads if not read.shared
    }
    return "; ".join(sorted(places)) or "none"


def as_data(rehearsal: Rehearsal) -> dict[str, Any]:
    counts = rehearsal.counts
    reads = {
        (read.at, read.shared) for record in rehearsal.records.values() for read in record.reads
    }
    return {
        "world": rehearsal.world,
        "layout": layout_degrees(rehearsal.config.parallelism),
        "layers": rehearsal.layers,
        "rehearsed": sorted(rehearsal.records),
        "parts": _parts(rehearsal),
        "checked": vars(counts),
        "reads": [{"at": at, "shared": shared} for at, shared in sorted(reads)],
        "ranks": [
            {
                "rank": rank,
                "groups": [
                    {
                        "name": g.description,
                        "ranks": list(g.ranks),
                        "at": g.at,
                    }
                    for g in record.groups
                ],
                "collectives": len(record.collectives),
                "posts": len(record.posts),
                "cpu_seconds": record.cpu_seconds,
                "memory": record.memory,
            }
            for rank, record in rehearsal.records.items()
        ],
        "startup": startup_data(startup(rehearsal)),
        "faults": [fault._asdict() for fault in rehearsal.faults],
    }
