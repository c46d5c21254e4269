"""Storage reader and writer for `torch.distributed.checkpoint` (DCP): folders and URLs, checksums,
commits, retries.
"""

import io
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.checkpoint.commit import (
    begin,
    commit,
    damage,
    discard,
    temporary_folder,
    write_file,
)
from torchtitan.checkpoint.index import INDEX, Place, read_index, render_index
from torchtitan.checkpoint.manifest import MANIFEST, Manifest, render
from torchtitan.checkpoint.planning import UnsentMetadata
from torchtitan.checkpoint.sums import SummedFile, SummedPart
from torchtitan.parallel.agree import from_all
from torchtitan.utils.errors import DamageError, UserError
from torchtitan.utils.files import open_regular
from torchtitan.utils.formats import load_tensor
from torchtitan.utils.storage import is_remote, make_folder, patiently
from torchtitan.utils.torch_compat import record_places

_REQUEST = 1 << 25
"""Bytes of small parts that are fetched from remote storage at once."""


class _Files(FileSystemBase):
    """DCP's access to files, by path or by URL. Keeps the checksums of written files."""

    def __init__(self) -> None:
        self.written: dict[str, SummedFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with path.open(mode) if "w" in mode else open_regular(path) as file:
            stream = SummedFile(file) if "w" in mode else file
            yield stream
        if isinstance(stream, SummedFile):
            self.written[path.name] = stream

    def sums(self, name: str) -> dict[str, int]:
        """What the manifest says about a written file."""
        return {"bytes": self.written[name].bytes, "crc32": self.written[name].crc32}

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.written[new_path.name] = self.written.pop(path.name)

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        """Nothing: DCP asks every rank while the coordinator may still be deleting what was there
        before.
        """

    def exists(self, path: Any) -> bool:
        return path.exists()

    def rm_file(self, path: Any) -> None:
        path.unlink()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@dataclass(frozen=True)
class _Written(WriteResult):
    """Where a tensor was written, as every rank reports it to DCP's coordinator."""

    crc32: int
    """Of the tensor's bytes."""
    file: dict[str, int]
    """Size and checksum of its file."""


class CommittingWriter(FileSystemWriter):
    """Every rank checksums its files; once all are done, the coordinator writes the manifest and
    commits.
    """

    def __init__(
        self,
        final: Path,
        manifest: dict[str, Any],
        confirm: Callable[[], object] = lambda: None,
        committed: Callable[[], None] = lambda: None,
        *,
        beside: Mapping[str, bytes] | None = None,
        file_per_tensor: bool = False,
    ):
        """
        Args:
            final: the checkpoint's folder.
            manifest: what its manifest says beside its files.
            confirm: called by the coordinator before it writes and before it commits; may raise.
            committed: called by the coordinator afterwards.
            beside: further files, by name.
        """
        self.final = final
        self.manifest = manifest
        self.confirm = confirm
        self.committed = committed
        self.beside = beside or {}
        super().__init__(
            str(final), single_file_per_rank=not file_per_tensor, sync_files=not is_remote(final)
        )
        self.fs = _Files()
        self.path = temporary_folder(final)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:  # the others write only once they have its plan
            self.confirm()
            begin(self.final)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            make_folder(self.path)
            results = patiently(
                self.final, lambda: super(CommittingWriter, self).write_data(plan, planner).wait()
            )
        except Exception as error:
            # DCP sends the exception to the other ranks by pickle, which drops its cause.
            raise root_cause(error) from None
        future: Future[list[WriteResult]] = Future()
        future.set_result([self._summed(result) for result in results])
        return future

    def _summed(self, result: WriteResult) -> _Written:
        place = result.storage_data
        crc32 = self.fs.written[place.relative_path].crc32_of(place.offset, place.length)
        return _Written(
            result.index, result.size_in_bytes, place, crc32, self.fs.sums(place.relative_path)
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if isinstance(metadata, UnsentMetadata):
            metadata = metadata.plain()
        patiently(self.final, lambda: super(CommittingWriter, self).finish(metadata, results))
        record_places(metadata, results)
        written = [result for rank in results for result in rank if isinstance(result, _Written)]
        files = {result.storage_data.relative_path: result.file for result in written}
        files[".metadata"] = self.fs.sums(".metadata")
        index = render_index(metadata, {result.index: result.crc32 for result in written})
        for name, content in {**self.beside, INDEX: index}.items():
            write_file(self.path / name, content)
            files[name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
        self.confirm()  # at a URL, the manifest commits
        about = {
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.manifest,
            **_measure(metadata),
        }
        write_file(self.path / MANIFEST, render(about | {"files": dict(sorted(files.items()))}))
        commit(self.final)
        self.committed()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(
            save_id=self.save_id
        )  # without the path, which DCP would pickle as an object


class _LazyPlanner(DefaultSavePlanner):
    """Plans a save with tensors on the meta device, and makes each real one only when it is
    written.
    """

    def __init__(self, make: Callable[[str], Tensor]):
        super().__init__()
        self.make = make

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.make(write_item.index.fqn)


def write_streamed(
    final: Path,
    manifest: dict[str, Any],
    state: dict[str, Any],
    make: Callable[[str], Tensor],
) -> None:
    """Write a checkpoint in one process, with one tensor in memory at a time. Leaves nothing behind
    if it fails.

    Args:
        final: its folder.
        manifest: what its manifest says beside its files.
        state: the tensors, on the meta device.
        make: returns a tensor by its key.
    """
    # DCP holds all tensors of a file until it is complete, hence one file per tensor.
    writer = CommittingWriter(final, manifest, file_per_tensor=True)
    try:
        with alone(), unwrapped():
            dcp.save(
                state,
                storage_writer=writer,
                planner=_LazyPlanner(make),
                no_dist=True,
            )
    except BaseException:
        with suppress(Exception):
            discard(final)
        raise


def _measure(metadata: Metadata) -> dict[str, Any]:
    """What the manifest says about the tensors: how many weights, and bytes by part and dtype."""
    parameters = 0
    parts = dict[str, dict[str, int]]()
    for key, about in metadata.state_dict_metadata.items():
        part = key.split(".")[0]
        dtype = about.properties.dtype
        sizes = parts.setdefault(part, {})
        name = str(dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + about.size.numel() * dtype.itemsize
        parameters += about.size.numel() if part == "model" else 0
    return {"parameters": parameters, "tensor_bytes": parts}


class Reader(FileSystemReader):
    """Reads each part that is needed once, in the order of the file, and compares its checksum
    before it is used.

    The index is read only once, however often the reader loads, and `.metadata` never.
    """

    def __init__(self, path: Path, metadata: Metadata | None = None):
        """
        Args:
            metadata: from `read_index`, if it was read already.
        """
        super().__init__(str(path))
        self.fs = _Files()
        self.path = path
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """
        Raises:
            DamageError: the manifest or the index is damaged.
        """
        if self._metadata is None:
            self._metadata = read_index(self.path)
        return self._metadata

    def check_files(self, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
        """Check what reading won't: the sizes of all files and, if an earlier version wrote them,
        their checksums.

        Args:
            part: check only every `parts`-th file, beginning with this one.

        Raises:
            DamageError: a file isn't as the manifest says.
        """
        summed = all(
            place.crc32 is not None for place in self.read_metadata().storage_data.values()
        )
        for problem in damage(self.path, manifest, part, parts, contents=not summed):
            raise DamageError(f"{self.path} is damaged: {problem}")

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
        """The parts of a tensor, as they were written."""
        return list(self.read_metadata().state_dict_metadata[key].chunks)

    def read_box(self, key: str, box: ChunkStorageMetadata) -> Tensor:
        """A box of a tensor. Beside it, one part of the tensor is in memory at a time.

        Raises:
            DamageError: it can't be read.
        """
        about = self.read_metadata().state_dict_metadata[key]
        self.storage_data = self.read_metadata().storage_data
        out = torch.empty(box.sizes, dtype=about.properties.dtype)

        def fill(item: ReadItem, value: Tensor) -> None:
            narrow_tensor_by_index(out, item.dest_offsets, item.lengths).copy_(value)

        try:
            self._read(create_read_items_for_chunk_list(key, about, [box]), fill)
        except (UserError, MemoryError):
            raise
        except Exception as error:
            raise DamageError(f"{self.path} can't be read: {describe(error)}") from error
        return out

    def _read(self, wanted: Sequence[ReadItem], fill: Callable[[ReadItem, Tensor], None]) -> None:
        """Read what is wanted and pass it on."""
        items: dict[tuple[str, int], list[ReadItem]] = {}
        for item in wanted:
            place = self.storage_data[item.storage_index]
            items.setdefault((place.relative_path, place.offset), []).append(item)
        places = (self.storage_data[items[key][0].storage_index] for key in sorted(items))
        for name, of_file in groupby(places, key=lambda place: place.relative_path):
            for place, part in self._parts(name, list(of_file)):
                tensor = self._tensor(place, part)
                for item in items[name, place.offset]:
                    fill(item, narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
                del tensor  # before the next one needs memory

    def _parts(self, name: str, places: list[Place]) -> Iterator[tuple[Place, SummedPart]]:
        """The parts in a file, in its order. From remote storage, small ones next to each other
        come in one request.
        """
        path: Any = self.path / name
        if not is_remote(path):
            with open_regular(path, buffered=False) as file:
                for place in places:
                    yield place, SummedPart(file, place.offset, place.length)
            return
        while places:
            start = places[0].offset
            end = places[0].offset + places[0].length
            count = 1
            while count < len(places) and places[count].offset == end and end - start < _REQUEST:
                end = end + places[count].length
                count = count + 1
            span = io.BytesIO(
                patiently(path, partial(path.fs.cat_file, path.path, start=start, end=end))
            )
            for place in places[:count]:
                yield place, SummedPart(span, place.offset - start, place.length)
            places = places[count:]

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
            error = problem
        if place.crc32 is not None and part.crc32() != place.crc32:
            where = f"in bytes {place.offset:,} to {place.offset + place.length:,}"
            raise DamageError(
                f"{self.path} is damaged: {place.relative_path} has a wrong checksum {where}"
            )
        if error is not None:
            raise error
        if not isinstance(tensor, Tensor):
            raise DamageError(
                f"{self.path} is damaged: {place.relative_path} holds no tensor at {place.offset:,}"
            )
        return tensor


def read_tensor(reader: StorageReader, key: str, dtype: torch.dtype | None = None) -> Tensor:
    """One whole tensor of a checkpoint, in its stored dtype or in `dtype`."""
    about = reader.read_metadata().state_dict_metadata[key]
    out = torch.empty(about.size, dtype=dtype or about.properties.dtype)
    with alone():
        load({key: out}, reader, no_dist=True)
    return out


def load(state: dict[str, Any], reader: StorageReader, *, no_dist: bool = False) -> None:
    """Fill the tensors of `state` in place, on all ranks together unless `no_dist`.

    Each rank reads what it needs. DCP would send every rank's plan of that to rank 0, which has
    nothing to add.

    Raises:
        DamageError: a tensor can't be read. On every rank, if it failed on any.
    """
    cause = None
    try:
        with alone():
            dcp.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # derives from BaseException
        cause = root_cause(next(iter(error.failures.values()))[0])
    causes = [cause] if no_dist or not dist.is_initialized() else from_all(cause)
    for kind in (MemoryError, torch.OutOfMemoryError, DamageError):
        if found := [known for known in causes if isinstance(known, kind)]:
            raise found[0]
    for rank, problem in enumerate(causes):
        if problem is not None:
            raise DamageError(
                f"{reader.checkpoint_id} can't be read: rank {rank}: {describe(problem)}"
            ) from problem


def describe(error: BaseException) -> str:
    """Rank and reason of a failed save or load: DCP wraps the ranks' exceptions."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = sorted(failures.items())[0]
        return f"rank {rank}: {describe(cause)}"
    cause = root_cause(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def root_cause(error: BaseException) -> BaseException:
    """The error that says most: our own, or the operating system's that torch's writer wrapped in
    another.
    """
    chain = [error]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    return next((e for e in chain if isinstance(e, (UserError, OSError))), chain[-1])


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the cause of the `CheckpointException`, which is no `Exception`, that DCP makes of
    every error.
    """
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


@contextmanager
def alone() -> Iterator[None]:
    """Silence DCP's warning that `no_dist=True` means one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is")
        yield
