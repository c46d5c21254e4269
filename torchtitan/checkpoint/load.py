"""Reading and verifying a checkpoint's tensors with `torch.distributed.checkpoint` (DCP)."""

import io
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import (
    _create_chunk_list,
    create_read_items_for_chunk_list,
)
from torch.futures import Future

from torchtitan.checkpoint.commit import damage
from torchtitan.checkpoint.format.index import ChunkLocation, Index
from torchtitan.checkpoint.format.manifest import Manifest
from torchtitan.checkpoint.format.sums import SummedRange
from torchtitan.parallel import agree
from torchtitan.utils.errors import DamageError, UserError
from torchtitan.utils.files import open_regular
from torchtitan.utils.formats import load_tensor
from torchtitan.utils.storage import is_remote, patiently

_REQUEST = 1 << 25
"""Bytes of small chunks that are fetched from remote storage at once."""


class Reader(FileSystemReader):
    """Reads each chunk once, in the order of the file, and verifies its checksum before use.

    The index is read only once for any number of loads, and `.metadata` never.
    """

    def __init__(self, path: Path, index: Index | None = None):
        """
        Args:
            index: the checkpoint's, if it was read already.
        """
        super().__init__(str(path))
        self.path = path
        self._index = index

    @property
    def index(self) -> Index:
        """
        Raises:
            DamageError: the manifest or the index is damaged.
        """
        if self._index is None:
            self._index = Index(self.path)
        return self._index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors, with the chunks that `locate` has added.

        Raises:
            DamageError: the manifest or the index is damaged.
        """
        return self.index.metadata

    def locate(self, state: dict[str, Any]) -> None:
        """Locate the chunks that hold this rank's shards of the tensors in `state`.

        Raises:
            DamageError: a chunk is missing, or the index is damaged.
        """
        for key, value in flatten_state_dict(state)[0].items():
            for box in _create_chunk_list(value):
                self.index.locate(key, box)

    def check_files(self, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
        """Check the sizes of all files; reading checks only the chunks it needs.

        Args:
            share: check only every `shares`-th file, beginning with this one.

        Raises:
            DamageError: a file doesn't match the manifest.
        """
        for problem in damage(self.path, manifest, share, shares, contents=False):
            raise DamageError(f"{self.path} is damaged: {problem}")

    def fill(self, state: dict[str, Any]) -> None:
        """Read this rank's shards of the tensors in `state`, in place. Without communication.

        Raises:
            DamageError: a chunk is missing, or the index is damaged.
            CheckpointException: DCP's error for a chunk that can't be read, with its cause.
        """
        self.locate(state)
        with without_dist_warning():
            dcp.load(state, storage_reader=self, no_dist=True)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the chunks that hold the plan's items, each once."""
        locations_by_file: dict[str, dict[int, ChunkLocation]] = defaultdict(dict)
        items_by_chunk: dict[tuple[str, int], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            location = self.storage_data[item.storage_index]
            locations_by_file[location.relative_path][location.offset] = location
            items_by_chunk[location.relative_path, location.offset].append(item)
        for name, locations in sorted(locations_by_file.items()):
            ascending = [locations[offset] for offset in sorted(locations)]
            for location, content in self._open_chunks(name, ascending):
                tensor = self._tensor(location, content)
                for item in items_by_chunk[name, location.offset]:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
                del tensor  # before the next chunk needs memory
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_chunk(self, index: MetadataIndex) -> Tensor:
        """A chunk of a tensor, as it was written.

        Raises:
            DamageError: it can't be read.
        """
        location = self.read_metadata().storage_data[index]
        try:
            chunks = self._open_chunks(location.relative_path, [location])
            return next(self._tensor(location, chunk) for _, chunk in chunks)
        except (UserError, MemoryError):
            raise
        except Exception as error:
            raise DamageError(f"{self.path} can't be read: {describe(error)}") from error

    def _open_chunks(
        self, name: str, locations: list[ChunkLocation]
    ) -> Iterator[tuple[ChunkLocation, SummedRange]]:
        """The chunks in a file, in its order. Small neighbors share one remote request."""
        path: Any = self.path / name
        if not is_remote(path):
            with open_regular(path, buffered=False) as file:
                for location in locations:
                    yield location, SummedRange(file, location.offset, location.length)
            return
        while locations:
            start = locations[0].offset
            end = start
            together: list[ChunkLocation] = []
            for location in locations:
                if together and (location.offset != end or end - start >= _REQUEST):
                    break
                together.append(location)
                end += location.length
            content = patiently(path, partial(path.fs.cat_file, path.path, start=start, end=end))
            span = io.BytesIO(content)
            for location in together:
                yield location, SummedRange(span, location.offset - start, location.length)
            locations = locations[len(together) :]

    def _tensor(self, location: ChunkLocation, content: SummedRange) -> Tensor:
        """The tensor in a chunk.

        Raises:
            DamageError: its checksum is wrong.
        """
        tensor = None
        error = None
        try:
            tensor = load_tensor(content)
        except Exception as problem:
            error = problem  # a wrong checksum is the better explanation
        start = location.offset
        end = start + location.length
        file = f"{self.path} is damaged: {location.relative_path}"
        if content.crc32() != location.crc32:
            raise DamageError(f"{file} has a wrong checksum in bytes {start:,} to {end:,}")
        if error is not None:
            raise error
        if not isinstance(tensor, Tensor):
            raise DamageError(f"{file} holds no tensor at {start:,}")
        return tensor


def read_tensor(reader: Reader, key: str, dtype: torch.dtype | None = None) -> Tensor:
    """One whole tensor of a checkpoint, in its stored dtype or in `dtype`."""
    tensor = reader.read_metadata().state_dict_metadata[key]
    out = torch.empty(tensor.size, dtype=dtype or tensor.properties.dtype)
    load({key: out}, reader, no_dist=True)
    return out


def load(state: dict[str, Any], reader: Reader, *, no_dist: bool = False) -> None:
    """Fill the tensors of `state` in place, on all ranks together unless `no_dist`.

    Each rank reads the chunks it needs; DCP would needlessly send every rank's plan to rank 0.

    Raises:
        DamageError: a tensor can't be read; every rank raises it if any rank does.
    """
    cause: BaseException | None = None
    try:
        reader.fill(state)
    except CheckpointException as error:  # derives from BaseException
        cause = root_cause(next(iter(error.failures.values()))[0])
    except DamageError as error:
        cause = error
    causes = [cause] if no_dist or not dist.is_initialized() else agree.problems_from_all(cause)
    for kind in (MemoryError, torch.OutOfMemoryError, DamageError):
        if matching := [error for error in causes if isinstance(error, kind)]:
            raise matching[0]
    for rank, problem in enumerate(causes):
        if problem is not None:
            raise DamageError(
                f"{reader.path} can't be read: rank {rank}: {describe(problem)}"
            ) from problem


class PhaseError(Exception):
    """A phase of a save or export failed on some rank; the message names rank and reason."""


def describe(error: BaseException) -> str:
    """Rank and reason of a failed save or load: DCP wraps the ranks' exceptions."""
    if isinstance(error, PhaseError):
        return str(error)
    if failures := getattr(error, "failures", None):
        rank = min(failures)
        return f"rank {rank}: {describe(failures[rank][0])}"
    cause = root_cause(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def root_cause(error: BaseException) -> BaseException:
    """The first error from this project or the operating system in the chain; else the last one."""
    chain = [error]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    return next((e for e in chain if isinstance(e, (UserError, OSError))), chain[-1])


@contextmanager
def without_dist_warning() -> Iterator[None]:
    """Silence DCP's warning that `no_dist=True` means one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is")
        yield


@contextmanager
def unwrap_errors() -> Iterator[None]:
    """Raise the cause of DCP's `CheckpointException`, which isn't an `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class BoxReader:
    """Reads tensors box by box, each element once.

    A whole chunk is read, because its checksum covers all of it. It stays in memory until all its
    elements have been read, so boxes in the order of the chunks need the memory of one chunk, and
    other boxes at most the memory of the tensor.
    """

    def __init__(self, reader: Reader):
        self.reader = reader
        self._chunks: dict[MetadataIndex, Tensor] = {}
        self._remaining: dict[MetadataIndex, int] = {}
        """Number of elements of each chunk that are still to be read."""

    def forget(self, besides: Collection[str] = ()) -> None:
        """Free the chunks of all tensors except `besides`."""
        for index in [index for index in self._chunks if index.fqn not in besides]:
            del self._chunks[index], self._remaining[index]

    def read(self, key: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor, in its stored dtype; a view of the chunk if it lies in a single one.

        Raises:
            DamageError: it can't be read.
        """
        offsets = torch.Size(interval.start for interval in box)
        sizes = torch.Size(interval.stop - interval.start for interval in box)
        chunk = ChunkStorageMetadata(offsets, sizes)
        self.reader.index.locate(key, chunk)
        tensor = self.reader.read_metadata().state_dict_metadata[key]
        items = create_read_items_for_chunk_list(key, tensor, [chunk])
        out = None
        for item in items:
            index = item.storage_index
            if index not in self._chunks:
                self._chunks[index] = self.reader.read_chunk(index)
                self._remaining[index] = self._chunks[index].numel()
            value = narrow_tensor_by_index(self._chunks[index], item.storage_offsets, item.lengths)
            self._remaining[index] -= value.numel()
            if not self._remaining[index]:
                del self._chunks[index], self._remaining[index]
            if len(items) == 1:
                return value
            out = torch.empty(sizes, dtype=value.dtype) if out is None else out
            narrow_tensor_by_index(out, item.dest_offsets, item.lengths).copy_(value)
        assert out is not None or not sizes.numel(), f"{key} has no {box}"
        return torch.empty(sizes, dtype=tensor.properties.dtype) if out is None else out
