"""Reading and verifying a checkpoint's tensors by `torch.distributed.checkpoint` (DCP)."""

import io
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
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
from torchtitan.checkpoint.format.index import Index, Place
from torchtitan.checkpoint.format.manifest import Manifest
from torchtitan.checkpoint.format.sums import SummedPart
from torchtitan.parallel import agree
from torchtitan.utils.errors import DamageError, UserError
from torchtitan.utils.files import open_regular
from torchtitan.utils.formats import load_tensor
from torchtitan.utils.storage import is_remote, patiently

_REQUEST = 1 << 25
"""Bytes of small parts that are fetched from remote storage at once."""


class Reader(FileSystemReader):
    """Reads each part once, in the order of the file, and verifies its checksum before use.

    The index is read only once, however often the reader loads, and `.metadata` never.
    """

    def __init__(self, path: Path, index: Index | None = None):
        """
        Args:
            index: of the checkpoint, if it was read already.
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
        """The tensors, and those of their parts that were located.

        Raises:
            DamageError: the manifest or the index is damaged.
        """
        return self.index.metadata

    def locate(self, state: dict[str, Any]) -> None:
        """Find the parts that hold this rank's shards of the tensors in `state`.

        Raises:
            DamageError: they can't be found.
        """
        for key, value in flatten_state_dict(state)[0].items():
            for box in _create_chunk_list(value):
                self.index.locate(key, box)

    def check_files(self, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
        """Check what reading won't: the sizes of all files.

        Args:
            part: check only every `parts`-th file, beginning with this one.

        Raises:
            DamageError: a file isn't as the manifest says.
        """
        for problem in damage(self.path, manifest, part, parts, contents=False):
            raise DamageError(f"{self.path} is damaged: {problem}")

    def fill(self, state: dict[str, Any]) -> None:
        """Read this rank's shards of the tensors in `state`, in place. Communicates nothing.

        Raises:
            DamageError: they can't be found.
            CheckpointException: DCP's, around the cause: they can't be read.
        """
        self.locate(state)
        with alone():
            dcp.load(state, storage_reader=self, no_dist=True)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def fill(item: ReadItem, value: Tensor) -> None:
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)

        self._read(plan.items, fill)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def boxes(self, key: str) -> list[ChunkStorageMetadata]:
        """The parts of a tensor, as they were written.

        Raises:
            DamageError: they can't be found.
        """
        self.index.locate(key)
        return list(self.read_metadata().state_dict_metadata[key].chunks)

    def read_box(self, key: str, box: ChunkStorageMetadata) -> Tensor:
        """A box of a tensor. Beside it, one part of the tensor is in memory at a time.

        Raises:
            DamageError: it can't be read.
        """
        self.index.locate(key, box)
        about = self.read_metadata().state_dict_metadata[key]
        self.storage_data = self.read_metadata().storage_data
        out = torch.empty(box.sizes, dtype=about.properties.dtype)

        def fill(item: ReadItem, value: Tensor) -> None:
            narrow_tensor_by_index(out, item.dest_offsets, item.lengths).copy_(value)

        with self._explained():
            self._read(create_read_items_for_chunk_list(key, about, [box]), fill)
        return out

    def read_part(self, index: MetadataIndex) -> Tensor:
        """A part of a tensor, as it was written.

        Raises:
            DamageError: it can't be read.
        """
        place = self.read_metadata().storage_data[index]
        with self._explained():
            parts = self._parts(place.relative_path, [place])
            return next(self._tensor(place, part) for _, part in parts)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise a `DamageError` instead of what isn't the user's or the machine's."""
        try:
            yield
        except (UserError, MemoryError):
            raise
        except Exception as error:
            raise DamageError(f"{self.path} can't be read: {describe(error)}") from error

    def _read(self, wanted: Sequence[ReadItem], fill: Callable[[ReadItem, Tensor], None]) -> None:
        """Read the parts that items are in, each once, and pass the items' slices to `fill`."""
        files: dict[str, dict[int, Place]] = defaultdict(dict)
        items: dict[tuple[str, int], list[ReadItem]] = defaultdict(list)
        for item in wanted:
            place = self.storage_data[item.storage_index]
            files[place.relative_path][place.offset] = place
            items[place.relative_path, place.offset].append(item)
        for name, places in sorted(files.items()):
            in_order = [places[offset] for offset in sorted(places)]
            for place, part in self._parts(name, in_order):
                tensor = self._tensor(place, part)
                for item in items[name, place.offset]:
                    fill(item, narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
                del tensor  # before the next one needs memory

    def _parts(self, name: str, places: list[Place]) -> Iterator[tuple[Place, SummedPart]]:
        """The parts in a file, in its order. Small neighbours share one remote request."""
        path: Any = self.path / name
        if not is_remote(path):
            with open_regular(path, buffered=False) as file:
                for place in places:
                    yield place, SummedPart(file, place.offset, place.length)
            return
        while places:
            start = places[0].offset
            end = start
            together: list[Place] = []
            for place in places:
                if together and (place.offset != end or end - start >= _REQUEST):
                    break
                together.append(place)
                end += place.length
            content = patiently(path, partial(path.fs.cat_file, path.path, start=start, end=end))
            span = io.BytesIO(content)
            for place in together:
                yield place, SummedPart(span, place.offset - start, place.length)
            places = places[len(together) :]

    def _tensor(self, place: Place, part: SummedPart) -> Tensor:
        """The tensor in a part.

        Raises:
            DamageError: its checksum is wrong.
        """
        tensor = None
        error = None
        try:
            tensor = load_tensor(part)
        except Exception as problem:
            error = problem  # a wrong checksum explains it better
        start = place.offset
        end = start + place.length
        file = f"{self.path} is damaged: {place.relative_path}"
        if part.crc32() != place.crc32:
            raise DamageError(f"{file} has a wrong checksum in bytes {start:,} to {end:,}")
        if error is not None:
            raise error
        if not isinstance(tensor, Tensor):
            raise DamageError(f"{file} holds no tensor at {start:,}")
        return tensor


def read_tensor(reader: Reader, key: str, dtype: torch.dtype | None = None) -> Tensor:
    """One whole tensor of a checkpoint, in its stored dtype or in `dtype`."""
    about = reader.read_metadata().state_dict_metadata[key]
    out = torch.empty(about.size, dtype=dtype or about.properties.dtype)
    load({key: out}, reader, no_dist=True)
    return out


def load(state: dict[str, Any], reader: Reader, *, no_dist: bool = False) -> None:
    """Fill the tensors of `state` in place, on all ranks together unless `no_dist`.

    Each rank reads what it needs. DCP would send every rank's plan to rank 0, to no use.

    Raises:
        DamageError: a tensor can't be read. On every rank, if it failed on any.
    """
    cause: BaseException | None = None
    try:
        reader.fill(state)
    except CheckpointException as error:  # derives from BaseException
        cause = root_cause(next(iter(error.failures.values()))[0])
    except DamageError as error:
        cause = error
    causes = [cause] if no_dist or not dist.is_initialized() else agree.found(cause)
    for kind in (MemoryError, torch.OutOfMemoryError, DamageError):
        if found := [known for known in causes if isinstance(known, kind)]:
            raise found[0]
    for rank, problem in enumerate(causes):
        if problem is not None:
            raise DamageError(
                f"{reader.path} can't be read: rank {rank}: {describe(problem)}"
            ) from problem


class RankError(Exception):
    """A save failed on some rank; the message names it and the reason."""


def describe(error: BaseException) -> str:
    """Rank and reason of a failed save or load: DCP wraps the ranks' exceptions."""
    if isinstance(error, RankError):
        return str(error)
    if failures := getattr(error, "failures", None):
        rank = min(failures)
        return f"rank {rank}: {describe(failures[rank][0])}"
    cause = root_cause(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def root_cause(error: BaseException) -> BaseException:
    """The most specific error: our own, or the operating system's that torch has wrapped."""
    chain = [error]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    return next((e for e in chain if isinstance(e, (UserError, OSError))), chain[-1])


@contextmanager
def alone() -> Iterator[None]:
    """Silence DCP's warning that `no_dist=True` means one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is")
        yield


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the cause of DCP's `CheckpointException`, which isn't an `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class BoxReader:
    """Reads tensors box by box, each element once.

    A part of a tensor, as it was written, is read whole, because its checksum is of all of it. It
    stays in memory until all its elements were asked for: so boxes in the order of the parts take
    one part, and other boxes at most the tensor.
    """

    def __init__(self, reader: Reader):
        self.reader = reader
        self._parts: dict[MetadataIndex, Tensor] = {}
        self._left: dict[MetadataIndex, int] = {}
        """Elements of each part that were not asked for."""

    def forget(self, besides: Collection[str] = ()) -> None:
        """Free the parts of all tensors but those of the keys `besides`."""
        for index in [index for index in self._parts if index.fqn not in besides]:
            del self._parts[index], self._left[index]

    def read(self, key: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor, in its stored dtype; a view of a part where it is in a single one.

        Raises:
            DamageError: it can't be read.
        """
        offsets = torch.Size(part.start for part in box)
        sizes = torch.Size(part.stop - part.start for part in box)
        chunk = ChunkStorageMetadata(offsets, sizes)
        self.reader.index.locate(key, chunk)
        about = self.reader.read_metadata().state_dict_metadata[key]
        items = create_read_items_for_chunk_list(key, about, [chunk])
        out = None
        for item in items:
            index = item.storage_index
            if index not in self._parts:
                self._parts[index] = self.reader.read_part(index)
                self._left[index] = self._parts[index].numel()
            value = _narrowed(self._parts[index], item.storage_offsets, item.lengths)
            self._left[index] -= value.numel()
            if not self._left[index]:
                del self._parts[index], self._left[index]
            if len(items) == 1:
                return value
            out = torch.empty(sizes, dtype=value.dtype) if out is None else out
            _narrowed(out, item.dest_offsets, item.lengths).copy_(value)
        assert out is not None or not sizes.numel(), f"{key} has no {box}"
        return torch.empty(sizes, dtype=about.properties.dtype) if out is None else out


def _narrowed(tensor: Tensor, offsets: torch.Size, sizes: torch.Size) -> Tensor:
    ends = zip(offsets, sizes, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in ends)]
