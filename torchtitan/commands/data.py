"""Show the first rows that training reads: their text, ids, documents and predicted tokens.

    torchtitan data my.toml
    torchtitan data corpus/ --model.hf_assets_path assets/hf/Llama-3.1-8B

Opens the sources as a run does. A table has the size of each and, of the first rows, the bytes of
text per predicted token.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.config import resolve
from torchtitan.config.load.command_line import split_args
from torchtitan.config.registry import tokenizers
from torchtitan.data.encode.tokenizer import PLAIN, UNPREDICTED, Tokenizer, build_tokenizer
from torchtitan.data.order.rows import Row
from torchtitan.data.read.documents import show_bad_documents
from torchtitan.data.spec import data_spec
from torchtitan.utils.argument_types import command_parser, count, path_or_url
from torchtitan.utils.assets import shipped_configs
from torchtitan.utils.errors import show_warnings
from torchtitan.utils.wording import aligned, escaped, listed, plural, show_tokens

_TOKENS = 2**18
"""Minimum number of tokens from which bytes per token are measured."""


def parser() -> argparse.ArgumentParser:
    parser = command_parser("data", __doc__, epilog="--section.key value overrides a key.")
    parser.add_argument(
        "data",
        type=path_or_url,
        metavar="CONFIG|PATH",
        help="a configuration; or what training.dataset_path names, or demo",
    )
    parser.add_argument(
        "--rows", type=count, default=2, metavar="N", help="number of rows to print (2)"
    )
    parser.add_argument(
        "--world",
        type=count,
        default=os.environ.get("WORLD_SIZE", "1"),
        metavar="N",
        help="number of ranks of the run (WORLD_SIZE, else 1)",
    )
    return parser


def main(argv: list[str]) -> int:
    words, flags = split_args(argv)
    options = parser().parse_args(words)
    resolved = resolve([f"--{_key(options.data)}={options.data}", *flags], options.world)
    show_warnings(resolved.warnings)
    config = resolved.config
    model = config.model
    custom = tokenizers.maker(model.tokenizer, config.custom)
    tokenizer = build_tokenizer(
        model.hf_assets_path, custom, model.end_of_document, model.chat_template
    )
    for note in (*tokenizer.notes, tokenizer.describe()):
        print(note, file=sys.stderr)

    from torchtitan.data.loader import build_loader  # imports torch
    from torchtitan.data.reader import StepReader

    spec = data_spec(config, "training", tokenizer)
    number = max(options.rows, -(-_TOKENS // spec.seq_len))
    loader = build_loader(spec, dp_degree=max(1, spec.rows_per_step // number))
    reader = StepReader(spec, loader.sources, loader.share, loader.start)
    rows: list[tuple[str, Row]] = []
    for step in islice(reader.steps(), config.training.steps):
        names = (spec.sources[index].name for index in step.sources)
        rows += zip(names, step.rows, strict=True)
        if len(rows) >= number:
            break
    print(
        _table(
            {name: source.in_words() for name, source in loader.sources.items()}, rows, tokenizer
        )
    )
    if skip_counts := loader.skip_counts(reader.position()):
        print(f"Skipped: {show_bad_documents(skip_counts)}")
    for index, (name, row) in enumerate(rows[: options.rows], 1):
        print(f"\nRow {index}, of {name}: {plural(len(row) - 1, 'token')} after the first")
        for span in _spans(row, tokenizer.eos_id):
            ids = (span.ids[span.ids >= 0] & PLAIN).tolist()
            columns = f"{span.first}-{span.first + len(span.ids) - 1}"
            head = f"[{columns}, document {span.document}, {span.state}] {listed(ids, 10)}"
            print(f"{head.rstrip()}\n{escaped(tokenizer.decode(ids))}")
    return 0


def _key(data: str) -> str:
    """The key that names a configuration, files or the demo text."""
    is_shipped = data in shipped_configs() and not os.path.exists(data)
    if data.endswith(".toml") or is_shipped:
        return "job.config_file"
    return "training.dataset" if data in ("demo", "demo_validation") else "training.dataset_path"


def _table(sizes: dict[str, str], rows: Sequence[tuple[str, Row]], tokenizer: Tokenizer) -> str:
    """The size of each source, and figures of the rows read from it."""
    lengths = tokenizer.byte_lengths()
    table = [["source", "holds", "rows read", "tokens", "predicted", "bytes/token"]]
    for name, size in sizes.items():
        source_rows = [row[1:] for source, row in rows if source == name]
        ids = np.concatenate([np.empty(0, np.int64), *source_rows])
        labels = ids[_is_predicted(ids)] & PLAIN
        share = len(labels) / max(len(ids), 1)
        ratio = lengths[labels].sum() / max(len(labels), 1)
        figures = [f"{len(source_rows):,}", show_tokens(len(ids)), f"{share:.1%}", f"{ratio:.3f}"]
        table.append([name, size, *figures])
    return aligned(table)


def _is_predicted(ids: Row) -> NDArray[np.bool_]:
    return (ids >= 0) & (ids & UNPREDICTED == 0)


class _Span(NamedTuple):
    """Consecutive ids of a row in one document and one state."""

    state: str
    document: int
    """Number of the document in the row."""
    first: int
    """Index of the first id in the row."""
    ids: Row


def _spans(row: Row, eos: int | None) -> Iterator[_Span]:
    has_label = _is_predicted(row)
    has_label[0] = False  # no token of the row comes before it
    ends = (row & ~UNPREDICTED) == eos  # an end-of-text within its document has another flag
    padding = (row < 0) | (ends & ~has_label & np.append(False, ends[:-1]))
    states = np.where(padding, "padding", np.where(has_label, "predicted", "read only"))
    ends &= ~padding
    documents = np.cumsum(ends) - ends + 1
    changes = (states[1:] != states[:-1]) | (documents[1:] != documents[:-1])
    firsts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    for first, ids in zip(firsts, np.split(row, firsts[1:]), strict=True):
        yield _Span(str(states[first]), int(documents[first]), first, ids)
