"""A survey of data as text for a terminal."""

import json
from collections.abc import Iterator
from typing import Any

from torchtitan.utils.wording import aligned, cut, plural, printable, show_tokens

_BAR = 30
"""Length of a histogram's longest bar in characters."""
_LISTED = 10
"""Number of vocabulary entries that are listed."""


def as_text(content: dict[str, Any]) -> str:
    """A survey as text."""
    tokenizer = content["tokenizer"]
    head = f"Tokenizer {tokenizer['name']}: {tokenizer['entries']:,} entries"
    sections = [printable(head), _table(content)]
    sections += ["\n".join(_details(source, content["seq_len"])) for source in content["sources"]]
    if content["mixture"] is not None:
        sections.append(_mixture(content))
    return "\n\n".join(sections)


def _table(content: dict[str, Any]) -> str:
    length = f"> {content['seq_len']:,}"
    rows = [["source", "documents", "tokens", "bytes", "bytes/token", "median", "95%", length]]
    for source in content["sources"]:
        per_token = source["bytes_per_token"]
        lengths = source["lengths"]
        rows.append(
            [
                source["name"],
                amount(source["documents"]),
                amount(source["tokens"]),
                amount(source["bytes"]),
                _ratio(per_token) if per_token else "",
                f"{lengths['50']:,.0f}" if lengths else "",
                f"{lengths['95']:,.0f}" if lengths else "",
                percent(source["longer"]["documents"]),
            ]
        )
    return aligned(rows)


def amount(estimate: dict[str, float]) -> str:
    """A number of documents, tokens or bytes; with half its confidence interval unless exact."""
    value = estimate["value"]
    if not estimate["noise"]:
        return f"{value:,.0f}" if value < 1e6 else show_tokens(value)
    return f"{show_tokens(value)} ± {show_tokens(estimate['noise'])}"


def percent(share: float) -> str:
    """A share in percent."""
    if 0 < share < 1e-4:
        return "< 0.01%"
    return f"{100 * share:.2g}%" if share < 0.1 else f"{100 * share:.1f}%"


def _ratio(estimate: dict[str, float]) -> str:
    """Bytes per token; with half the confidence interval unless exact."""
    noise = f" ± {estimate['noise']:.3f}" if estimate["noise"] else ""
    return f"{estimate['value']:.3f}{noise}"


def _details(source: dict[str, Any], seq_len: int) -> Iterator[str]:
    read = source["read"]
    sampling = (
        f"; drawn at random: {plural(read['documents'], 'document')}" if source["drawn"] else ""
    )
    yield printable(f"{source['name']}: {source['path']}, {source['kind']}{sampling}")
    yield from _faults(source)
    if not source["lengths"]:
        yield "  no documents"
        return
    spread = source["of_documents"]
    yield (
        f"  bytes per token of documents: median {spread['50']:.2f}, {spread['5']:.2f} to "
        f"{spread['95']:.2f} in 90% of them"
    )
    lengths = source["lengths"]
    known = ", ".join(f"{key}% {lengths[key]:,.0f}" for key in ("5", "25", "50", "75", "95", "99"))
    yield f"  length in tokens: mean {lengths['mean']:,.0f}; {known}; longest {lengths['max']:,.0f}"
    longer = source["longer"]
    yield (
        f"  longer than {seq_len:,} tokens: {percent(longer['documents'])} of the documents, with "
        f"{percent(longer['tokens'])} of the tokens"
    )
    yield from _histogram(source["histogram"])
    yield from _vocabulary(source["vocabulary"], source["drawn"])


def _faults(source: dict[str, Any]) -> Iterator[str]:
    """Lines about bad documents and duplicates."""
    if source["bad"]:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in source["bad"].items())
        first = f"; the first is {cut(source['first_bad'], 200)}" if source["first_bad"] else ""
        yield printable(f"  bad documents: {kinds}{first}")
    if source["duplicates"] is not None:
        duplicates = source["duplicates"]
        number = f"{duplicates['documents']:,}, {duplicates['bytes']:,} bytes"
        yield f"  exact duplicates of other documents: {number}"


def _histogram(bins: list[dict[str, float]]) -> Iterator[str]:
    most = max(bin["documents"] for bin in bins)
    rows = [["tokens", "documents", "of the tokens", ""]]
    for bin in bins:
        bar = "#" * round(_BAR * bin["documents"] / most)
        label = f"{bin['from']:,} to {bin['to']:,}"
        rows.append([label, percent(bin["documents"]), percent(bin["tokens"]), bar])
    for line in aligned(rows).splitlines():
        yield f"    {line}"


def _vocabulary(use: dict[str, Any], drawn: bool) -> Iterator[str]:
    covering = ", ".join(f"{count:,} make {share}" for share, count in use["covering"].items())
    seen = f"{use['seen']:,} of {use['entries']:,} entries occur"
    yield f"  vocabulary: {seen}; {covering} of the tokens"
    frequent = (f"{quoted(entry)} {percent(entry['share'])}" for entry in use["frequent"][:_LISTED])
    yield f"    most frequent: {', '.join(frequent)}"
    if use["unseen"]:
        unseen = ", ".join(quoted(entry) for entry in use["unseen"][:_LISTED])
        number = use["entries"] - use["seen"]
        label = "not in what was read" if drawn else "never seen"
        yield f"    {label}: {number:,}, as {unseen}"
    fragments = use["parts"]
    yield (
        f"    bytes that are no whole character: {percent(fragments['tokens'])} of the tokens, for "
        f"{percent(fragments['bytes'])} of the bytes"
    )
    if use["unknown"]:
        lost = percent(use["unknown"])
        yield f"    unknown text, which the vocabulary can't encode: {lost} of the tokens"


def quoted(entry: dict[str, Any]) -> str:
    """An entry of the vocabulary, with its blanks visible."""
    if "\N{REPLACEMENT CHARACTER}" in entry["text"]:
        return f"bytes of id {entry['id']}"
    return printable(json.dumps(cut(entry["text"], 40), ensure_ascii=False))


def _mixture(content: dict[str, Any]) -> str:
    rows = [["source", "rows", "tokens", "share", "epochs"]]
    for source in content["mixture"]:
        epochs = "unknown" if source["epochs"] is None else f"{source['epochs']:.3g}"
        rows.append(
            [
                source["name"],
                f"{source['rows']:,}",
                show_tokens(source["tokens"]),
                percent(source["share"]),
                epochs,
            ]
        )
    return f"In {plural(content['steps'], 'step')} training reads\n{aligned(rows)}"
