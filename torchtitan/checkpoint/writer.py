"""The writing of a checkpoint. Each rank writes its tensors with DCP's writer, and a file that
lists them; then rank 0 writes the common files and the manifest, which commits the checkpoint.
"""

import concurrent.futures
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.filesystem import FileSystemBase, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from torchtitan.checkpoint.commit import begin, commit, temporary_folder, write_file
from torchtitan.checkpoint.format.index import (
    INDEX,
    IndexedTensor,
    RankFile,
    StoredChunk,
    WrittenTensor,
    add_chunks,
    dtype_name,
    rank_file_name,
    read_rank,
    render_index,
    render_rank,
)
from torchtitan.checkpoint.format.layout import Layout, fill, shares
from torchtitan.checkpoint.format.manifest import (
    FORMAT,
    MANIFEST,
    CheckpointInfo,
    FileEntry,
    Manifest,
    RankTotals,
    TrainState,
    render,
    validate,
)
from torchtitan.checkpoint.format.sums import SummedFile
from torchtitan.data.read.positions import DataPosition, complete_state
from torchtitan.utils.errors import CheckpointError, DamageError, FormatBugError
from torchtitan.utils.storage import is_remote, make_folder, patiently

VISIBLE_WITHIN = 60.0
"""Seconds within which a rank must see files of another rank; by default NFS caches a folder's
names this long.
"""
_REQUESTS = 32
"""Files that rank 0 reads from object storage at once."""


class _Files(FileSystemBase):
    """DCP's file operations, for paths and URLs. Keeps the checksums of written files."""

    def __init__(self) -> None:
        self.files: dict[str, SummedFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with path.open(mode) as file:
            stream = SummedFile(file)
            try:
                yield stream
            except Exception as error:
                if stream.error is None or isinstance(error, OSError):
                    raise
                raise stream.error from error
        self.files[path.name] = stream

    def entry(self, name: str) -> FileEntry:
        """Size and checksum of a file after it was written."""
        file = self.files[name]
        return FileEntry(bytes=file.bytes, crc32=file.crc32)

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.files[new_path.name] = self.files.pop(path.name)

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        """A no-op: DCP calls it on every rank, while the coordinator may delete an old save."""

    def exists(self, path: Any) -> bool:
        return path.exists()

    def rm_file(self, path: Any) -> None:
        path.unlink()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class CommittingWriter(FileSystemWriter):
    """Writes one checkpoint: every rank writes its files and their list; then rank 0 writes the
    manifest, and commits.
    """

    def __init__(
        self,
        final: Path,
        info: CheckpointInfo,
        confirm: Callable[[], object] = lambda: None,
        on_commit: Callable[[], None] = lambda: None,
        *,
        extra_files: Mapping[str, bytes] | None = None,
        staged: bool = False,
        file_per_tensor: bool = False,
    ):
        """
        Args:
            final: the checkpoint's folder.
            info: the contents of the manifest, without its files.
            confirm: called by rank 0 before it writes and before it commits; may raise.
            committed: called by rank 0 after it has committed.
            extra_files: further files, by name.
            staged: the tensors are on the host; DCP would create a stream on the first GPU.
        """
        self.final = final
        self.info = info
        self.confirm = confirm
        self.on_commit = on_commit
        self.extra_files = extra_files or {}
        self.file_per_tensor = file_per_tensor
        super().__init__(str(final), sync_files=not is_remote(final))
        if staged:
            self.per_thread_copy_ahead = 0
        self.fs = _Files()
        self.path = temporary_folder(final)

    def begin(self) -> int:
        """Prepare the folder, on rank 0; returns the number of the save, of 62 bits."""
        self.confirm()
        begin(self.final)
        return secrets.randbits(62)

    def plan(
        self, planner: DefaultSavePlanner, rank: int, world: int, pp_degree: int
    ) -> "LocalPlan":
        """Plan this rank's writes, see `local_plan`."""
        return local_plan(planner, rank, world, pp_degree)

    def write(
        self, save: str, rank: int, plan: "LocalPlan", planner: SavePlanner
    ) -> tuple[int, int]:
        """Write this rank's tensors and the list of them; returns number and bytes of its files.

        Args:
            save: the save's number.
        """
        results = self.write_data(plan.items, planner).wait()
        return self._describe(save, rank, plan, results)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        write = super().write_data
        results: list[WriteResult] = []
        make_folder(self.path)
        for file_plan in self._files_of(plan):
            results += patiently(self.final, partial(_wait, write, file_plan, planner))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _files_of(self, plan: SavePlan) -> Iterator[SavePlan]:
        """Split a plan into one for each file."""
        if not self.file_per_tensor:
            if plan.items:
                yield plan
            return
        tensors: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            tensors.setdefault(item.index.fqn, []).append(item)
        prefix = plan.storage_data.prefix
        for i, items in enumerate(tensors.values()):
            storage = replace(plan.storage_data, prefix=f"{prefix}{i}_")
            yield replace(plan, items=items, storage_data=storage)

    def _describe(
        self, save: str, rank: int, plan: "LocalPlan", results: Sequence[WriteResult]
    ) -> tuple[int, int]:
        """Write `__N.json`, the list of this rank's files and tensors."""
        locations = {result.index: result.storage_data for result in results}
        tensors: dict[str, WrittenTensor] = {}
        for item in plan.items.items:
            key = item.index.fqn
            tensor = item.tensor_data
            assert tensor is not None, f"{key} is not a tensor"
            location = locations[item.index]
            stored_chunk = StoredChunk(
                offsets=tuple(tensor.chunk.offsets),
                sizes=tuple(tensor.chunk.sizes),
                file=location.relative_path,
                start=location.offset,
                length=location.length,
                crc32=self.fs.files[location.relative_path].crc32_of(
                    location.offset, location.length
                ),
            )
            if key not in tensors:
                tensors[key] = WrittenTensor(
                    dtype=dtype_name(tensor.properties.dtype),
                    size=tuple(tensor.size),
                    layout=plan.layouts[key],
                    parts=[],
                )
            tensors[key].parts.append(stored_chunk)
        files = {name: self.fs.entry(name) for name in self.fs.files}
        record = RankFile(save=save, rank=rank, data=self._lanes(), files=files, tensors=tensors)
        content = render_rank(record)
        write_file(self.path / rank_file_name(rank), content)
        return len(files) + 1, len(content) + sum(file.bytes for file in files.values())

    def _lanes(self) -> DataPosition | None:
        """This rank's data lanes; the manifest has the lanes of all ranks."""
        if self.info.train_state is None:
            return None
        data = self.info.train_state.data
        if not any(source.lanes for source in data.sources.values()):
            return None
        return DataPosition(step=data.step, shares=data.shares, sources=data.sources)

    def _state(self, lanes: Sequence[DataPosition]) -> TrainState | None:
        """The state of the run, with the data lanes of all ranks."""
        state = self.info.train_state
        if state is None:
            return None
        return state.model_copy(update={"data": complete_state(state.data, lanes or [state.data])})

    def finish(self, save: str, totals: RankTotals) -> None:
        """Write the common files, and commit; on rank 0.

        Raises:
            FormatBugError: the ranks' chunks don't fill every tensor.
        """
        tensors, metadata, results, lanes = read_rank_files(self.path, save, totals.ranks)
        finish = super().finish
        patiently(self.final, lambda: finish(metadata, [results]))
        files = {".metadata": self.fs.entry(".metadata")}
        for name, content in {**self.extra_files, INDEX: render_index(tensors)}.items():
            write_file(self.path / name, content)
            files[name] = FileEntry(bytes=len(content), crc32=zlib.crc32(content))
        self.confirm()  # at a URL, the manifest commits
        sizes = {
            key: (tensor.size, tensor.properties.dtype)
            for key, tensor in metadata.state_dict_metadata.items()
        }
        manifest = {
            **dict(self.info),
            "format": FORMAT,
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "train_state": self._state(lanes),
            **measure(sizes),
            "files": dict(sorted(files.items())),
            "save": save,
            "written": totals,
        }
        write_file(self.path / MANIFEST, render(validate(Manifest, manifest)))
        commit(self.final)
        self.on_commit()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # DCP would pickle the path as an object


def measure(tensors: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Any]:
    """The manifest's `parameters`, and `tensor_bytes` by section and dtype."""
    parameters = 0
    tensor_bytes: dict[str, dict[str, int]] = {}
    for key, (size, dtype) in tensors.items():
        section = key.split(".")[0]
        if section == "model":
            parameters += size.numel()
        sizes = tensor_bytes.setdefault(section, {})
        name = dtype_name(dtype)
        sizes[name] = sizes.get(name, 0) + size.numel() * dtype.itemsize
    return {"parameters": parameters, "tensor_bytes": tensor_bytes}


def _wait(
    write: Callable[[SavePlan, SavePlanner], Future[list[WriteResult]]],
    plan: SavePlan,
    planner: SavePlanner,
) -> list[WriteResult]:
    return write(plan, planner).wait()


# ---- this rank's writes


class LocalPlan(NamedTuple):
    """The tensors that one rank writes."""

    items: SavePlan
    layouts: dict[str, Layout | None]
    """The layout of each tensor of the rank; None if the rank's box differs from the layout's."""
    agreement: int
    """A number whose sum over all ranks is 0 (modulo 2^64) if all ranks at the same position of the
    pipeline hold the same tensors.
    """


def local_plan(planner: DefaultSavePlanner, rank: int, world: int, pp_degree: int) -> LocalPlan:
    """Derive this rank's writes without a message; the plan of every rank follows from its rank.

    Args:
        pp_degree: pipeline-parallel degree.
    """
    count = world // pp_degree
    holders = range(rank // count * count, (rank // count + 1) * count)
    tensor_shares, digest = shares(planner.state_dict, rank, holders)
    layouts: dict[str, Layout | None] = {}
    items = []
    plan = planner.create_local_plan()
    for item in plan.items:
        key = item.index.fqn
        share = tensor_shares[key]
        tensor = item.tensor_data
        assert tensor is not None, f"{key} is not a tensor"
        layouts[key] = share.layout
        sharded = item.type is not WriteItemType.TENSOR and isinstance(
            planner.state_dict[key], DTensor
        )
        if not share.writes or not (tensor.chunk.sizes.numel() or rank == share.layout.first):
            continue
        box = share.layout.box(tuple(tensor.size), rank)
        if sharded and box != (tuple(tensor.chunk.offsets), tuple(tensor.chunk.sizes)):
            layouts[key] = None
        items.append(item)
    prefix = _StoragePrefix(f"__{rank}_")
    agreement = digest * (count - 1) if rank == holders.start else -digest
    return LocalPlan(replace(plan, items=items, storage_data=prefix), layouts, _as_int64(agreement))


def _as_int64(number: int) -> int:
    """`number` modulo 2^64, as an int64."""
    return (number + 2**63) % 2**64 - 2**63


# ---- all ranks' writes


def read_rank_files(
    path: Path, save: str, ranks: int
) -> tuple[dict[str, IndexedTensor], Metadata, list[WriteResult], list[DataPosition]]:
    """Read all ranks' `__N.json`: returns the index, DCP's metadata and results, and data lanes.

    Raises:
        FormatBugError: some elements of a tensor were not written, or written twice.
    """
    tensors: dict[str, IndexedTensor] = {}
    metadata = Metadata({}, planner_data={})
    results: list[WriteResult] = []
    lanes = []
    for content in _read_all(path, save, ranks):
        lanes += [] if content.data is None else [content.data]
        for key, tensor in content.tensors.items():
            if key not in tensors:
                tensors[key] = IndexedTensor(
                    dtype=tensor.dtype, size=tensor.size, layout=tensor.layout
                )
            entry = tensors[key]
            if None not in (entry.layout, tensor.layout) and entry.layout != tensor.layout:
                continue  # another pipeline-parallel rank wrote it, too
            if tensor.layout is None:
                tensors[key] = entry.model_copy(update={"layout": None})
            results += add_chunks(metadata, key, tensor)
    for key, total in metadata.state_dict_metadata.items():
        count = sum(chunk.sizes.numel() for chunk in total.chunks)
        if count != total.size.numel():
            raise FormatBugError(
                f"{key}: the ranks wrote {count} elements of {total.size.numel()}: this is a bug "
                "in torchtitan, please report it with this line"
            )
        full_box = ChunkStorageMetadata(torch.Size([0] * len(total.size)), total.size)
        if not fill(total.chunks, full_box):
            raise FormatBugError(
                f"{key}: the ranks wrote elements twice, and others not at all: this is a bug in "
                "torchtitan, please report it with this line"
            )
    return tensors, metadata, results, lanes


def _read_all(path: Path, save: str, ranks: int) -> Iterator[RankFile]:
    """The `__N.json` of each rank; many at once from object storage, as its latency is high."""
    read = partial(_read, path, save)
    if not is_remote(path):
        yield from map(read, range(ranks))
        return
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
        for start in range(0, ranks, _REQUESTS):
            yield from pool.map(read, range(start, min(start + _REQUESTS, ranks)))


def _read(path: Path, save: str, rank: int) -> RankFile:
    """The `__N.json` of `rank`. A network file system may show it late."""
    start = time.monotonic()
    pause = 0.05
    while True:
        try:
            return read_rank(path, save, rank)[0]
        except DamageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if time.monotonic() - start > VISIBLE_WITHIN:
                file = path / rank_file_name(rank)
                raise CheckpointError(
                    f"{socket.gethostname()} doesn't see {file}, which rank {rank} has written; "
                    "checkpoint.folder must be in a folder that all nodes share, or at a URL"
                ) from error
        if not is_remote(path):
            with suppress(OSError):
                os.listdir(path)  # makes NFS fetch the folder's names from the server
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
