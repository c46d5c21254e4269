"""Reads token files into a `Tally`. A document ends with end-of-text, or with its file."""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.encode.tokenizer import PLAIN, UNPREDICTED
from torchtitan.data.read.files import REPORT
from torchtitan.data.spec import DataSpec
from torchtitan.data.tokens.token_files import TokenFiles
from torchtitan.tools.corpus.columns import Drawn
from torchtitan.tools.corpus.sampling import WHOLE_BELOW, draw_positions
from torchtitan.tools.corpus.tally import Reading, ReadOptions, Tally
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import read_regular
from torchtitan.utils.limits import JSON_BYTES
from torchtitan.utils.wording import plural

_WINDOW = 2**20
"""Number of tokens read at once from a token file."""
_STEP = 2**12
"""Number of tokens read at once when searching for a document's ends."""
_REACH = 2**17
"""Maximum tokens of a document before and after a position; a longer one is cut."""


def read_tokens(
    spec: DataSpec, options: ReadOptions, paths: list[Path], key: str, tally: Tally
) -> Reading:
    """Read token files into a tally.

    Args:
        key: name of the files in errors.

    Raises:
        UserError: the files are damaged, packed, or from another tokenizer.
    """
    files = TokenFiles(paths, _WINDOW, spec.tokenizer, key)
    if files.packed is not None:
        raise UserError(
            f"{key}: these token files are packed: they hold padding and pieces of documents. Name "
            "the text, or token files written without --best-fit"
        )
    counts = [tokens for *_, tokens in files.files]
    sizes = spec.tokenizer.byte_lengths()
    eos = spec.tokenizer.eos_id
    if options.sample and sum(counts) > WHOLE_BELOW * options.sample:
        documents = _Documents(files.in_windows_of(_STEP), counts, eos)
        draws = draw_positions(counts, options.sample, np.random.default_rng(options.seed))
        for unit, (file_index, offset) in enumerate(draws):
            ids = documents.document_at(file_index, offset)
            weight = sum(counts) / options.sample / len(ids)
            drawn = Drawn(weight, len(ids), unit, "places")
            tally.add_drawn(ids, int(sizes[ids].sum()), [drawn])
    else:
        _whole_tokens(files, counts, sizes, eos, tally=tally)
    size = sum(stamp.size for stamp, *_ in files.files)
    return Reading(
        tally, plural(len(paths), "token file"), size, sum(counts), report=_report_of(paths)
    )


def _whole_tokens(
    files: TokenFiles, counts: list[int], sizes: NDArray[Any], eos: int | None, tally: Tally
) -> None:
    """Add all documents of whole files."""
    index = 0
    for count in counts:
        pending = np.empty(0, np.int64)
        windows = -(-(count - 1) // files.width)
        for i in range(windows):
            ids = files.window(index + i) & ~UNPREDICTED
            pending = np.concatenate([pending, ids if i == 0 else ids[1:]])
            ends = np.flatnonzero(pending == eos) + 1
            if i == windows - 1 and (not len(ends) or ends[-1] < len(pending)):
                ends = np.append(ends, len(pending))
            if not len(ends):
                continue
            complete, pending = pending[: ends[-1]] & PLAIN, pending[ends[-1] :]
            lengths = np.diff(ends, prepend=0)
            bytes_of_each = np.add.reduceat(sizes[complete].astype(np.int64), ends - lengths)
            tally.add(complete, lengths, bytes_of_each)
        index += windows


@dataclass(frozen=True)
class _Documents:
    """Finds documents around positions in token files."""

    files: TokenFiles
    counts: list[int]
    """Number of tokens of each file."""
    eos: int | None

    def document_at(self, file_index: int, offset: int) -> NDArray[np.int64]:
        """The document around a token of a file; a long one is cut."""
        width = self.files.width
        first_window = int(self.files.ends[file_index - 1]) if file_index else 0
        count = self.counts[file_index]
        last = (count - 2) // width
        number = min(offset // width, last)

        def window(i: int) -> NDArray[np.int64]:
            """A window without the token that it shares with the next one."""
            ids = self.files.window(first_window + i) & ~UNPREDICTED
            return ids if i == last else ids[:width]

        ids_at_offset = window(number)
        inside = offset - number * width
        before = [ids_at_offset[:inside]]
        after = [ids_at_offset[inside:]]
        first = number
        while not (before[0] == self.eos).any() and first and (number - first) * width < _REACH:
            first -= 1
            before.insert(0, window(first))
        final = number
        while not (after[-1] == self.eos).any() and final < last:
            if (final - number) * width >= _REACH:
                break
            final += 1
            after.append(window(final))
        head = np.concatenate(before)
        tail = np.concatenate(after)
        starts = np.flatnonzero(head == self.eos)
        ends = np.flatnonzero(tail == self.eos)
        begin = starts[-1] + 1 if len(starts) else 0
        end = ends[0] + 1 if len(ends) else len(tail)
        return np.concatenate([head[begin:], tail[:end]]) & PLAIN


def _report_of(paths: list[Path]) -> dict[str, Any] | None:
    """Duplicates and bad documents, from the reports of `torchtitan tokenize` beside the files."""
    folders = {file.parent for file in paths}
    reports = sorted(report for folder in folders for report in folder.glob(f"*{REPORT}"))
    read: list[Any] = []
    for file in reports:
        with suppress(OSError, ValueError):
            read.append(json.loads(read_regular(file, JSON_BYTES)))
    sums = {"documents": 0, "bytes": 0}
    skipped = Counter[str]()
    with suppress(AttributeError, KeyError, TypeError):
        for content in read:
            for name in sums:
                sums[name] += content["duplicates"][name]
            for kind, number in content["skipped"].items():
                skipped[kind] += number
        return {"duplicates": sums, "skipped": skipped} if read else None
    return None
