"""Writing a checkpoint by `torch.distributed.checkpoint` (DCP): plans, copies and the commit."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.checkpoint.commit import begin, commit, temporary_folder, write_file
from torchtitan.checkpoint.index import INDEX, render_index
from torchtitan.checkpoint.load import root_cause
from torchtitan.checkpoint.manifest import MANIFEST, render
from torchtitan.checkpoint.sums import SummedFile
from torchtitan.utils.storage import is_remote, make_folder, patiently
from torchtitan.utils.torch_compat import record_places

_NUMBERS = count()
"""Numbers the runs of this process, see `Plans`."""


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

    def sums(self, name: str) -> dict[str, int]:
        """The manifest's entry for a written file."""
        file = self.written[name]
        return {"bytes": file.bytes, "crc32": file.crc32}

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


@dataclass(frozen=True)
class _Written(WriteResult):
    """Where a tensor was written, as every rank reports it to DCP's coordinator."""

    crc32: int
    """The CRC-32 of the tensor's bytes."""
    file: dict[str, int]
    """Size and checksum of its file."""


class CommittingWriter(FileSystemWriter):
    """Every rank checksums its files; then the coordinator writes the manifest and commits."""

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
        self.file_per_tensor = file_per_tensor
        super().__init__(
            str(final),
            sync_files=not is_remote(final),
        )
        self.fs = _Files()
        self.path = temporary_folder(final)

    def set_up_storage_writer(
        self,
        is_coordinator: bool,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:  # the others write only once they have its plan
            self.confirm()
            begin(self.final)

    def write_data(
        self,
        plan: SavePlan,
        planner: SavePlanner,
    ) -> Future[list[WriteResult]]:
        write = super().write_data
        results: list[WriteResult] = []
        try:
            make_folder(self.path)
            for part in self._files_of(plan):
                results += patiently(self.final, partial(_wait, write, part, planner))
        except Exception as error:
            # DCP sends the exception to the other ranks by pickle, which drops its cause.
            raise root_cause(error) from None
        future: Future[list[WriteResult]] = Future()
        future.set_result([self._summed(result) for result in results])
        return future

    def _files_of(self, plan: SavePlan) -> Iterator[SavePlan]:
        """The plan of each file."""
        if not self.file_per_tensor:
            yield plan
            return
        tensors: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            tensors.setdefault(item.index.fqn, []).append(item)
        prefix = plan.storage_data.prefix
        for i, items in enumerate(tensors.values()):
            place = replace(plan.storage_data, prefix=f"{prefix}{i}_")
            yield replace(plan, items=items, storage_data=place)

    def _summed(self, result: WriteResult) -> _Written:
        place = result.storage_data
        name = place.relative_path
        crc32 = self.fs.written[name].crc32_of(place.offset, place.length)
        file = self.fs.sums(name)
        return _Written(result.index, result.size_in_bytes, place, crc32, file)

    def finish(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
    ) -> None:
        if isinstance(metadata, UnsentMetadata):
            metadata = metadata.plain()
        finish = super().finish
        patiently(self.final, lambda: finish(metadata, results))
        record_places(metadata, results)
        written = [result for rank in results for result in rank if isinstance(result, _Written)]
        files = {result.storage_data.relative_path: result.file for result in written}
        files[".metadata"] = self.fs.sums(".metadata")
        index = render_index(metadata, {result.index: result.crc32 for result in written})
        for name, content in {**self.beside, INDEX: index}.items():
            write_file(self.path / name, content)
            files[name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
        self.confirm()  # at a URL, the manifest commits
        content = render(
            {
                "saved": datetime.now(UTC).isoformat(timespec="seconds"),
                **self.manifest,
                **_measure(metadata),
                "files": dict(sorted(files.items())),
            }
        )
        write_file(self.path / MANIFEST, content)
        commit(self.final)
        self.committed()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # DCP would pickle the path as an object


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
        name = str(dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + elements * dtype.itemsize
    return {"parameters": parameters, "tensor_bytes": parts}


def _wait(
    write: Callable[[SavePlan, SavePlanner], Future[list[WriteResult]]],
    plan: SavePlan,
    planner: SavePlanner,
) -> list[WriteResult]:
    return write(plan, planner).wait()


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the cause of DCP's `CheckpointException`, which isn't an `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


# ---- plans


class UnsentMetadata(Metadata):
    """DCP broadcasts the metadata after each save; it is large, and no rank needs it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, ({},)

    @classmethod
    def of(cls, metadata: Metadata) -> "UnsentMetadata":
        return cls(**vars(metadata))

    def plain(self) -> Metadata:
        """The same, as it is written to disk."""
        return Metadata(**vars(self))


class Plans:
    """The plans of one run's saves.

    A rank sends its plan to rank 0, and receives it back, only when it has changed. DCP keeps plans
    in class attributes by a key, and compares names, shapes and places of the tensors, but not
    their types. So each run has keys of its own, one for each kind of checkpoint. All ranks must
    use and forget plans together: rank 0 reuses the plan it knows of a rank that sent none.
    """

    def __init__(self) -> None:
        self._number = next(_NUMBERS)
        self._keys: set[str] = set()

    def planner(self, kind: str) -> "CachingPlanner":
        """The planner for one save of this kind."""
        key = f"run {self._number}, {kind}"
        self._keys.add(key)
        return CachingPlanner(key)

    def forget(self) -> None:
        """Let the next save send all plans. A failed save may leave ranks with different ones."""
        for name, cache in vars(SavePlanner).items():
            if name.startswith("_cached_") and isinstance(cache, dict):
                for key in self._keys:
                    cache.pop(key, None)


class CachingPlanner(DefaultSavePlanner):
    """Reuses the previous save's plan where it is still valid."""

    def __init__(self, key: str):
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key

    def create_global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(list(all_plans))
        return plans, UnsentMetadata.of(metadata)


# ---- copies for saves in the background


def build_stager(async_mode: str) -> "Stager | None":
    """The stager of `checkpoint.async_mode`; None for `disabled`."""
    if async_mode == "disabled":
        return None
    overlap = async_mode == "async_with_pinned_mem"
    pinned = overlap and torch.cuda.is_available()
    return Stager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=overlap,
            use_non_blocking_copy=pinned,
        )
    )


class Stager(DefaultStager):
    """DCP's stager, with workarounds for three faults of torch 2.11 to 2.15. Ends with `release`,
    not `close`.

    1. Before 2.13, DCP's `close` after each save drops the buffers, so every save allocates them
       again. Remove `close`, `release` and `_drop_buffers` with support for 2.12.
    2. Copies run on a stream of their own without waiting for the current one, on which the
       optimizer's step was only enqueued. Remove `stage` once torch waits.
    3. The staging thread uses the first GPU, whichever the rank uses, and creates a context there.
       Remove `_stage` once the thread takes over the rank's device.
    """

    def __init__(self, options: StagingOptions):
        super().__init__(options)
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._drop_buffers = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None

    def stage(
        self,
        state_dict: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        if self._staging_stream is not None:
            self._staging_stream.wait_stream(torch.accelerator.current_stream())
        return super().stage(state_dict, **kwargs)

    def _stage(
        self,
        state_dict: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        return super()._stage(state_dict, **kwargs)

    def close(self) -> None: ...

    def release(self) -> None:
        """Stop the thread and free the buffers."""
        super().close()
        self._drop_buffers()
