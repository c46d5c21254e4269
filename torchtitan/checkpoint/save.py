"""Writing a checkpoint with the planner and writer of `torch.distributed.checkpoint` (DCP), without
its collectives: through them, the plans of all ranks would pass through rank 0.
"""

import concurrent.futures
import secrets
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemBase, _StoragePrefix
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from torchtitan.checkpoint.commit import begin, commit, temporary_folder, write_file
from torchtitan.checkpoint.exchange import Exchange
from torchtitan.checkpoint.index import (
    INDEX,
    TensorPlaces,
    add_written,
    dtype_name,
    render_index,
)
from torchtitan.checkpoint.layout import Layout, shares
from torchtitan.checkpoint.manifest import MANIFEST, FileEntry, Written, render
from torchtitan.checkpoint.parts import (
    Part,
    RankFile,
    WrittenTensor,
    name_of,
    once_visible,
    read_rank,
    render_rank,
)
from torchtitan.checkpoint.sums import SummedFile
from torchtitan.data.positions import DataPosition, DataState, completed
from torchtitan.utils.errors import CheckpointError, DamageError, FormatBugError
from torchtitan.utils.storage import is_remote, make_folder, patiently

_REQUESTS = 32
"""Files that rank 0 reads from object storage at once."""

# ---- writing


class _Files(FileSystemBase):
    """DCP's writing of files, by path or by URL. Keeps the checksums of what was written."""

    def __init__(self) -> None:
        self.written: dict[str, SummedFile] = {}

    @contextmanager
    def create_stream(
        self,
        path: Any,
        mode: str,
    ) -> Iterator[Any]:
        with path.open(mode) as file:
            stream = SummedFile(file)
            yield stream
        self.written[path.name] = stream

    def sums(self, name: str) -> FileEntry:
        """Size and checksum of a written file."""
        file = self.written[name]
        return FileEntry(bytes=file.bytes, crc32=file.crc32)

    def rename(
        self,
        path: Any,
        new_path: Any,
    ) -> None:
        path.rename(new_path)
        self.written[new_path.name] = self.written.pop(path.name)

    def concat_path(
        self,
        path: Any,
        suffix: str,
    ) -> Any:
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
    """Every rank writes its files and what is in them; then rank 0 writes the manifest and
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
            confirm: called by rank 0 before it writes and before it commits; may raise.
            committed: called by rank 0 afterwards.
            beside: further files, by name.
        """
        self.final = final
        self.manifest = manifest
        self.confirm = confirm
        self.committed = committed
        self.beside = beside or {}
        self.file_per_tensor = file_per_tensor
        super().__init__(
            str(final),
            sync_files=not is_remote(final),
        )
        self.fs = _Files()
        self.path = temporary_folder(final)

    def begin(self) -> int:
        """Prepare the folder, on rank 0; returns the number of the save, of 62 bits."""
        self.confirm()
        begin(self.final)
        return secrets.randbits(62)

    def write_data(
        self,
        plan: SavePlan,
        planner: SavePlanner,
    ) -> Future[list[WriteResult]]:
        write = super().write_data
        results: list[WriteResult] = []
        make_folder(self.path)
        for part in self._files_of(plan):
            results += patiently(self.final, partial(_wait, write, part, planner))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _files_of(self, plan: SavePlan) -> Iterator[SavePlan]:
        """The plan of each file."""
        if not self.file_per_tensor:
            if plan.items:
                yield plan
            return
        tensors: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            tensors.setdefault(item.index.fqn, []).append(item)
        prefix = plan.storage_data.prefix
        for i, items in enumerate(tensors.values()):
            place = replace(plan.storage_data, prefix=f"{prefix}{i}_")
            yield replace(plan, items=items, storage_data=place)

    def describe(
        self,
        save: str,
        rank: int,
        plan: SavePlan,
        layouts: Mapping[str, Layout | None],
        results: Sequence[WriteResult],
    ) -> tuple[int, int]:
        """Write what this rank has written; number and bytes of its files.

        Args:
            save: the save's number.
        """
        places = {result.index: result.storage_data for result in results}
        tensors: dict[str, WrittenTensor] = {}
        for item in plan.items:
            key = item.index.fqn
            about = item.tensor_data
            assert about is not None, f"{key} is not a tensor"
            place = places[item.index]
            part = Part(
                offsets=tuple(about.chunk.offsets),
                sizes=tuple(about.chunk.sizes),
                file=place.relative_path,
                start=place.offset,
                length=place.length,
                crc32=self.fs.written[place.relative_path].crc32_of(place.offset, place.length),
            )
            if key not in tensors:
                tensors[key] = WrittenTensor(
                    dtype=dtype_name(about.properties.dtype),
                    size=tuple(about.size),
                    layout=layouts[key],
                    parts=[],
                )
            tensors[key].parts.append(part)
        files = {name: self.fs.sums(name) for name in self.fs.written}
        about = RankFile(save=save, rank=rank, data=self._lanes(), files=files, tensors=tensors)
        content = render_rank(about)
        write_file(self.path / name_of(rank), content)
        return len(files) + 1, len(content) + sum(file.bytes for file in files.values())

    def _lanes(self) -> DataPosition | None:
        """This rank's lanes of the data, of which the manifest has all."""
        data = (self.manifest["train_state"] or {}).get("data")
        if not isinstance(data, DataState) or not any(x.lanes for x in data.sources.values()):
            return None
        return DataPosition(step=data.step, shares=data.shares, sources=data.sources)

    def _state(self, lanes: Sequence[DataPosition]) -> dict[str, Any] | None:
        """The state of the run, with the lanes of all ranks."""
        state = self.manifest["train_state"]
        if state is None or not isinstance(state["data"], DataState):
            return state
        return state | {"data": completed(state["data"], lanes or [state["data"]])}

    def finish(self, save: str, written: Written) -> None:
        """Write what all ranks have in common, and commit; on rank 0.

        Raises:
            FormatBugError: the ranks have not written all of every tensor.
        """
        tensors, metadata, results, lanes = gathered(self.path, save, written.ranks)
        finish = super().finish
        patiently(self.final, lambda: finish(metadata, [results]))
        files = {".metadata": self.fs.sums(".metadata")}
        for name, content in {**self.beside, INDEX: render_index(tensors)}.items():
            write_file(self.path / name, content)
            files[name] = FileEntry(bytes=len(content), crc32=zlib.crc32(content))
        self.confirm()  # at a URL, the manifest commits
        content = render(
            {
                "saved": datetime.now(UTC).isoformat(timespec="seconds"),
                **self.manifest,
                "train_state": self._state(lanes),
                **_measure(metadata),
                "files": dict(sorted(files.items())),
                "save": save,
                "written": written,
            }
        )
        write_file(self.path / MANIFEST, content)
        commit(self.final)
        self.committed()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # DCP would pickle the path as an object


def gathered(
    path: Path,
    save: str,
    ranks: int,
) -> tuple[dict[str, TensorPlaces], Metadata, list[WriteResult], list[DataPosition]]:
    """What all ranks have written: for the index, for DCP's metadata, and for the manifest.

    Raises:
        FormatBugError: it is not all of every tensor.
    """
    tensors: dict[str, TensorPlaces] = {}
    metadata = Metadata({}, planner_data={})
    results: list[WriteResult] = []
    lanes = []
    for content in _read_all(path, save, ranks):
        lanes += [] if content.data is None else [content.data]
        for key, found in content.tensors.items():
            if key not in tensors:
                tensors[key] = TensorPlaces(dtype=found.dtype, size=found.size, layout=found.layout)
            known = tensors[key]
            if None not in (known.layout, found.layout) and known.layout != found.layout:
                continue  # another place of the pipeline has it, too
            if found.layout is None:
                tensors[key] = known.model_copy(update={"layout": None})
            results += add_written(metadata, key, found)
    for key, about in metadata.state_dict_metadata.items():
        filled = sum(chunk.sizes.numel() for chunk in about.chunks)
        if filled != about.size.numel():
            raise FormatBugError(
                f"{key}: the ranks wrote {filled} elements of {about.size.numel()}: this is a bug "
                "in torchtitan, please report it with this line"
            )
    return tensors, metadata, results, lanes


def _read_all(
    path: Path,
    save: str,
    ranks: int,
) -> Iterator[RankFile]:
    """What each rank has written. Object storage takes long to answer, so it is asked for many."""
    read = partial(_read, path, save)
    if not is_remote(path):
        yield from map(read, range(ranks))
        return
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
        for start in range(0, ranks, _REQUESTS):
            yield from pool.map(read, range(start, min(start + _REQUESTS, ranks)))


def _read(
    path: Path,
    save: str,
    rank: int,
) -> RankFile:
    try:
        return once_visible(lambda: read_rank(path, save, rank)[0], path)
    except DamageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise CheckpointError(
            f"{socket.gethostname()} doesn't see {path / name_of(rank)}, which rank {rank} has "
            "written; checkpoint.folder must be in a folder that all nodes share, or at a URL"
        ) from error


def _measure(metadata: Metadata) -> dict[str, Any]:
    """The manifest's `parameters` and `tensor_bytes`, by part and dtype."""
    parameters = 0
    parts: dict[str, dict[str, int]] = {}
    for key, about in metadata.state_dict_metadata.items():
        part = key.split(".")[0]
        dtype = about.properties.dtype
        elements = about.size.numel()
        if part == "model":
            parameters += elements
        sizes = parts.setdefault(part, {})
        name = dtype_name(dtype)
        sizes[name] = sizes.get(name, 0) + elements * dtype.itemsize
    return {"parameters": parameters, "tensor_bytes": parts}


def _wait(
    write: Callable[[SavePlan, SavePlanner], Future[list[WriteResult]]],
    plan: SavePlan,
    planner: SavePlanner,
) -> list[WriteResult]:
    return write(plan, planner).wait()


# ---- a save


def save(
    state: dict[str, Any] | concurrent.futures.Future[dict[str, Any]],
    writer: CommittingWriter,
    planner: DefaultSavePlanner | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    places: int = 1,
    alone: bool = False,
) -> None:
    """Save a checkpoint, on all ranks together.

    Each rank derives what it writes. Ranks exchange a few numbers three times: to begin, when all
    have written, and when rank 0 has committed.

    Args:
        state: the tensors by part and name, or what will be.
        group: of all ranks, with gloo; None: the default one.
        places: of the pipeline; ranks at one of them hold the same tensors, or shards of them.
        alone: this process saves by itself.

    Raises:
        RankError: it failed on some rank; on every rank the same.
    """
    exchange = Exchange(group, alone=alone)
    rank = exchange.rank
    planner = planner or DefaultSavePlanner()
    layouts: dict[str, Layout | None] = {}
    plan = SavePlan([])

    def prepare() -> tuple[int, int]:
        nonlocal plan
        tensors = state.result() if isinstance(state, concurrent.futures.Future) else state
        planner.set_up_planner(tensors, is_coordinator=rank == 0)
        plan, agreed = own_plan(planner, rank, exchange.world, places, layouts)
        return (writer.begin() if rank == 0 else 0), agreed

    def write() -> tuple[int, int]:
        results = writer.write_data(plan, planner).wait()
        return writer.describe(number, rank, plan, layouts, results)

    def finish() -> tuple[()]:
        if rank == 0:
            writer.finish(number, Written(ranks=exchange.world, files=files, bytes=size))
        return ()

    begun, differs = exchange.step(prepare)[:2]
    if differs:
        raise FormatBugError(
            "ranks hold different tensors: this is a bug in torchtitan, please report it"
        )
    number = f"{begun:016x}"
    files, size = exchange.step(write)[:2]
    exchange.step(finish)


def own_plan(
    planner: DefaultSavePlanner,
    rank: int,
    world: int,
    places: int,
    layouts: dict[str, Layout | None],
) -> tuple[SavePlan, int]:
    """What this rank writes.

    Args:
        layouts: receives that of each tensor.

    Returns:
        The plan, and a number whose sum over all ranks is 0 (modulo 2^64) if all ranks at each
        place of the pipeline hold the same tensors.
    """
    count = world // places
    holders = range(rank // count * count, (rank // count + 1) * count)
    found, digest = shares(planner.state_dict, rank, holders)
    items = []
    plan = planner.create_local_plan()
    for item in plan.items:
        share = found[item.index.fqn]
        about = item.tensor_data
        assert about is not None, f"{item.index.fqn} is not a tensor"
        layouts[item.index.fqn] = share.layout
        whole = item.type is WriteItemType.TENSOR or not isinstance(
            planner.state_dict[item.index.fqn], DTensor
        )
        if not share.writes or not (about.chunk.sizes.numel() or rank == share.layout.first):
            continue
        box = share.layout.box(tuple(about.size), rank)
        if not whole and box != (tuple(about.chunk.offsets), tuple(about.chunk.sizes)):
            layouts[item.index.fqn] = None
        items.append(item)
    place = _StoragePrefix(f"__{rank}_")
    leads = rank == holders.start
    agreed = digest * (count - 1) if leads else -digest
    return replace(plan, items=items, storage_data=place), _wrapped(agreed)


def _wrapped(number: int) -> int:
    """A number modulo 2^64, as an int64."""
    return (number + 2**63) % 2**64 - 2**63
