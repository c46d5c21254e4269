"""Pre-tokenized data: flat files of ids, each described by a JSON file.

    X.bin    token ids, document after document; written as uint16 or uint32, and as
             "uint32-flagged" if some are read but not predicted (`tokenizer.UNPREDICTED`)
    X.json   {"dtype", "tokens", "documents", "bytes", "vocab_size", "tokenizer", "hash", ...}

Token files of Megatron, which have an `.idx` file instead (`megatron.py`), and of llm.c and nanoGPT
(`raw.py`) are read as well.
"""

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from torchtitan.config.load.messages import explain_errors
from torchtitan.data.encode.tokenizer import PLAIN, UNPREDICTED, Tokenizer
from torchtitan.data.order.rows import Row, Share, SourceReader, local_rows, pad_row, permute
from torchtitan.data.order.windows import Piece, WindowOrder
from torchtitan.data.read.contents import Contents, sample_files
from torchtitan.data.read.files import is_undescribed
from torchtitan.data.read.opening import (
    DataError,
    EndOfFileError,
    FilePool,
    FileStamp,
    Retry,
    data_errors,
    data_handle,
)
from torchtitan.data.read.positions import SourcePosition
from torchtitan.data.tokens.megatron import read_index
from torchtitan.data.tokens.raw import read_raw
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.formats import read_json_object
from torchtitan.utils.logging import logger
from torchtitan.utils.wording import plural


class _Meta(BaseModel):
    """The fields of a token file's description that readers use."""

    model_config = {"strict": True}

    dtype: Literal[
        "uint16", "uint32", "uint32-flagged", "uint8", "uint64", "int8", "int16", "int32", "int64"
    ]
    tokens: int = Field(ge=0, lt=2**60)
    bytes: int | None = Field(None, ge=0, lt=2**62)
    tokenizer: str
    packed: int | None = Field(None, ge=2, lt=2**31)
    """Ids of each of the rows that documents were packed into; None: they follow one another."""
    end_of_document: int | None = None
    """The id that ends documents, if the writer recorded it."""
    stop_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field([], max_length=1000)
    """Ids that end an answer in conversations, beside the end of a document."""
    hash: str = Field("", pattern=r"^[0-9a-f]{0,64}$")
    """Hash of the token file, from its writer."""


def token_dtype(tokenizer: Tokenizer, flags: bool = False) -> np.dtype[Any]:
    """The type of ids in token files.

    Args:
        flags: ids may be flagged.
    """
    return np.dtype("uint16" if tokenizer.vocab_size <= 2**16 and not flags else "uint32")


def write_token_file(
    path: Path,
    documents: Iterable[Sequence[int] | NDArray[Any]],
    tokenizer: Tokenizer,
    entries: dict[str, Any],
    *,
    flags: bool = False,
) -> dict[str, Any]:
    """Write `path` (`X.bin`), then `X.json`, each atomically: if the JSON file exists, both are
    complete.

    Args:
        entries: further entries of the JSON file, read when `documents` is exhausted.
        flags: ids may be flagged.

    Returns:
        The contents of the JSON file.
    """
    dtype = token_dtype(tokenizer, flags)
    digest = hashlib.blake2b(digest_size=8)
    tokens = count = unpredicted = 0
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for ids in documents:
                content = np.ascontiguousarray(ids, dtype)
                file.write(content.data)
                digest.update(content.data)
                if flags:
                    unpredicted += int((content >= UNPREDICTED).sum())
                tokens += len(ids)
                count += 1
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    meta = {
        "dtype": f"{dtype.name}-flagged" if flags else dtype.name,
        "tokens": tokens,
        "documents": count,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "end_of_document": tokenizer.eos_id,
        "hash": digest.hexdigest(),
        **({"predicted": tokens - unpredicted} if flags else {}),
        **entries,
    }
    temporary.replace(path)
    write_whole(path.with_suffix(".json"), json.dumps(meta, indent=1).encode())
    return meta


class TokenFiles:
    """Token files as a sequence of windows of `width + 1` ids that overlap by one."""

    def __init__(self, files: Sequence[Path], width: int, tokenizer: Tokenizer, key: str):
        self.files: list[tuple[FileStamp, int, np.dtype[Any], bool, int]] = []
        """(stamp when it was opened, first id's byte, dtype, whether ids may be flagged, number of
        tokens)"""
        self._open = FilePool()
        self.vocab_size = tokenizer.vocab_size
        stamps: list[FileStamp] = []
        hashes: list[str] = []
        dtypes: set[str] = set()
        file_of_length: dict[int | None, Path] = {}
        """A file for each length of packed rows."""
        for file in files:
            meta, start, stamp = describe(file, tokenizer, key)
            name, _, flags = meta.dtype.partition("-")
            stamps.append(stamp)
            hashes.append(meta.hash)
            dtypes.add(meta.dtype)
            file_of_length.setdefault(meta.packed, file)
            tokenizer.stop_ids += tuple(meta.stop_ids)
            if meta.tokens > 1:
                self.files.append((stamp, start, np.dtype(name), bool(flags), meta.tokens))
        if undescribed := sum(not file.with_suffix(".json").exists() for file in files):
            logger.info(
                f"{key}: {plural(undescribed, 'token file')} of a tokenizer that can't be checked "
                "(Megatron's, llm.c's or nanoGPT's): ids must be those of model.hf_assets_path, "
                f"and below {self.vocab_size}"
            )
        if len(file_of_length) > 1:
            few = ", ".join(f"{file} ({n or 'not packed'})" for n, file in file_of_length.items())
            raise UserError(
                f"{key}: token files that are packed for rows of different lengths can't be mixed "
                f"in one source: {few}"
            )
        self.packed_length = next(iter(file_of_length), None)
        """See `_Meta.packed`."""
        self._cut(width)
        if not len(self):
            raise UserError(no_tokens(files, key))
        self._check_has_text([tokenizer.bos_id, tokenizer.eos_id], key)
        data_files = sample_files(
            stamps, os.path.commonpath([file.parent for file in files]), hashes
        )
        self.contents = Contents.of(data_files, ", ".join(sorted(dtypes)))

    def _cut(self, width: int) -> None:
        self.width = width
        # Ceiling: the last window of a file may be short.
        self.ends = np.cumsum([-(-(tokens - 1) // width) for *_, tokens in self.files])

    def in_windows_of(self, width: int) -> "TokenFiles":
        """The same files in other windows."""
        other = copy.copy(self)
        other._cut(width)
        return other

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def _check_has_text(self, special: list[int | None], key: str) -> None:
        ids = [i for i in special if i is not None]
        with data_errors(key):
            for i in range(len(self)):  # seldom reads more than one
                if not np.isin(self.window(i) & PLAIN, ids).all():
                    return
        folder = Path(self.files[0][0].path).parent
        raise UserError(f"{key}: {folder} holds no tokens but begin-of-text and end-of-text")

    def window(self, index: int, first: int = 0, after: int | None = None) -> NDArray[np.int64]:
        """The `width + 1` ids of window `index`; fewer for the last of a file.

        Args:
            first, after: return only the predicted ids in this range, and the id before it; nothing
                if the window ends before it.

        Raises:
            OSError: the file can't be read, or has been truncated since it was opened.
            DataError: it has changed since it was opened, or holds ids that the tokenizer doesn't
            have.
        """
        which = int(np.searchsorted(self.ends, index, side="right"))
        start = (index - (int(self.ends[which - 1]) if which else 0)) * self.width
        stamp, begin, dtype, flags, tokens = self.files[which]
        after = min(self.width if after is None else after, tokens - start - 1)
        if first >= after:
            return np.empty(0, np.int64)
        start += first
        count = after - first + 1
        size = dtype.itemsize
        try:
            content = self._open.read(stamp.path, begin + start * size, count * size, stamp)
        except EndOfFileError:
            raise OSError(f"{stamp.path} ends before token {start + count} (truncated?)") from None
        ids = np.frombuffer(content, dtype).astype(np.int64)
        plain = ids & PLAIN if flags else ids
        if len(wrong := np.flatnonzero((plain < 0) | (plain >= self.vocab_size))):
            first = int(wrong[0])
            raise DataError(
                f"{stamp.path} has id {ids[first]} at token {start + first}, but the "
                f"tokenizer has only {self.vocab_size}"
            )
        return ids


class TokenReader(SourceReader):
    """Rows of token files."""

    def __init__(
        self, files: TokenFiles, share: Share, seed: int | None, order: WindowOrder, retry: Retry
    ):
        """
        Args:
            seed: shuffles the windows of each epoch; None keeps their order.
            order: of the windows of `files`.
        """
        self.files = files
        self.share = share
        self.seed = seed
        self.order = order
        self.retry = retry

    def read(self, step: int, count: int, slots: NDArray[np.int64], length: int) -> dict[int, Row]:
        local = local_rows(count, self.share)
        first, after = np.searchsorted(slots, [local.start, local.stop])
        pieces_of = self.order.take(len(slots), length, range(first, after))
        self.count_rows(len(slots), length)
        return {int(slots[i]): self._row(pieces, length) for i, pieces in pieces_of.items()}

    def _row(self, pieces: Sequence[Piece], length: int) -> Row:
        ids_of_pieces: list[Row] = []
        for piece in pieces:
            ids = self._ids(piece)
            # Of a later piece, only the predicted ids: the id before it may be in another row.
            ids_of_pieces.append(ids[1:] if any(map(len, ids_of_pieces)) else ids)
        return pad_row(np.concatenate(ids_of_pieces), length)

    def _ids(self, piece: Piece) -> Row:
        epoch, window = divmod(piece.window, len(self.files))
        if self.seed is not None:
            window = permute(window, len(self.files), self.seed, epoch)
        return self.retry(
            f"window {window}", lambda: self.files.window(window, piece.first, piece.after)
        )

    def remaining_rows(self, length: int) -> int | None:
        return self.order.remaining_rows(length)

    @property
    def epochs(self) -> float:
        return self.order.read / (len(self.files) * self.files.width)

    def position(self) -> SourcePosition:
        return SourcePosition(
            contents=self.files.contents.fingerprint,
            rows=self.rows,
            tokens=self.tokens,
            windows=self.order.position(),
        )

    def seek(self, position: SourcePosition) -> None:
        assert position.windows is not None
        self.rows = position.rows
        self.tokens = position.tokens
        self.order.seek(position.windows)


def no_tokens(files: Sequence[Path], key: str) -> str:
    """The problem of token files that hold none."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{key}: no tokens in {files[0]}{more}"


def describe(file: Path, tokenizer: Tokenizer, key: str) -> tuple[_Meta, int, FileStamp]:
    """The description of a token file, the first id's byte, and the file's stamp.

    Raises:
        UserError: it isn't one, is damaged, or was made with another tokenizer.
    """
    with data_errors(key):
        stamp = FileStamp.of(file)
        os.close(data_handle(file, stamp))
        foreign = _read_foreign(stamp, tokenizer)
    meta, start = foreign or (_read_meta(file, key), 0)
    if meta.tokenizer != tokenizer.fingerprint:
        raise UserError(
            f"{key}: {file} was made with another tokenizer than model.hf_assets_path; "
            "tokenize the text again, or set model.hf_assets_path to that tokenizer, and "
            "model.end_of_document to the token that ends documents"
        )
    if meta.end_of_document not in (None, tokenizer.eos_id):
        raise UserError(
            f"{key}: documents in {file} end with id {meta.end_of_document}, those of "
            f"model.hf_assets_path with {tokenizer.eos_id}; set model.end_of_document to that "
            "token, or tokenize the text again"
        )
    name, _, flags = meta.dtype.partition("-")
    if meta.packed is not None and (not flags or meta.tokens % meta.packed):
        raise UserError(
            f"{key}: {file.with_suffix('.json')} names packed rows of {meta.packed} "
            f"tokens, which {meta.tokens} of type {meta.dtype} are not; tokenize the text "
            "again"
        )
    size = start + np.dtype(name).itemsize * meta.tokens
    if stamp.size != size:
        raise UserError(
            f"{key}: {file} has {stamp.size} bytes instead of {size} (truncated?); "
            "tokenize the text again"
        )
    return meta, start, stamp


def _read_foreign(stamp: FileStamp, tokenizer: Tokenizer) -> tuple[_Meta, int] | None:
    """The description of a file of Megatron, llm.c or nanoGPT, which names no tokenizer; None if
    it has our own.
    """
    file = Path(stamp.path)
    start = 0
    if os.path.lexists(file.with_suffix(".idx")):
        dtype, tokens = read_index(stamp)
    elif is_undescribed(file) and (raw_format := read_raw(stamp)):
        dtype, tokens, start = raw_format
    else:
        return None
    fields = {"dtype": dtype, "tokens": tokens, "tokenizer": tokenizer.fingerprint}
    return _Meta.model_validate(fields), start


def _read_meta(file: Path, key: str) -> _Meta:
    description = file.with_suffix(".json")
    advice = (
        "write token files with torchtitan tokenize; of Megatron's, copy the .idx file, too; files "
        "of llm.c have a header, and of nanoGPT the name train.bin or val.bin"
    )
    try:
        return _Meta.model_validate(read_json_object(description))
    except ValidationError as error:
        problems = "; ".join(explain_errors(error, _Meta, lambda name: name))
        raise UserError(f"{key}: {description}: {problems}; {advice}") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key}: {file} has no complete description {description.name} beside it ({error}); "
            f"{advice}"
        ) from None
