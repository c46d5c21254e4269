"""A rehearsal in words."""

from torchtitan.config.derive import layout_degrees, layout_name
from torchtitan.health.collectives import name_ranks
from torchtitan.tools.rehearsal.coverage import omissions
from torchtitan.tools.rehearsal.events import RankRecord
from torchtitan.tools.rehearsal.rehearsal import Rehearsal
from torchtitan.utils.wording import aligned, plural


def as_text(rehearsal: Rehearsal) -> str:
    """A summary of the checks, and the verdict."""
    counts = rehearsal.counts
    model = rehearsal.config.model
    layout = layout_name(layout_degrees(rehearsal.config.parallelism))
    layers = f"up to {plural(rehearsal.layers, 'layer')} of each stage"
    records = rehearsal.records
    phases = dict.fromkeys(event.during for event in records[0].collectives)
    local_reads = {at for record in records.values() for _, at in record.local_reads}
    lines = [
        f"{model.label} on {plural(rehearsal.world, 'rank')}: {layout}",
        f"Rehearsed {_ranks(rehearsal)}; {layers}; {', '.join(phases)}",
        "",
        aligned(_table(records[0])),
        "",
        f"Compared {plural(counts.groups, 'group')} of several ranks, "
        f"{plural(counts.collectives, 'collective')}, {plural(counts.messages, 'send')} and "
        f"{plural(counts.exchanges, 'split')} of experts' rows",
        "Values that a rank reads of its own data, which changed nothing: "
        f"{'; '.join(sorted(local_reads)) or 'none'}",
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
