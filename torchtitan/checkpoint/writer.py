"""What a save writes: each rank its files through DCP's writer, then rank 0 the index and the
manifest, which commit it.
"""

import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.checkpoint.commit import begin, commit, temporary_folder, write_file
from torchtitan.checkpoint.gather import gathered
from torchtitan.checkpoint.index import INDEX, dtype_name, render_index
from torchtitan.checkpoint.layout import Layout
from torchtitan.checkpoint.manifest import MANIFEST, FileEntry, Written, render
from torchtitan.checkpoint.parts import Part, RankFile, WrittenTensor, name_of, render_rank
from torchtitan.checkpoint.sums import SummedFile
from torchtitan.data.positions import DataPosition, DataState, completed
from torchtitan.utils.storage import is_remote, make_folder, patiently


class _Files(FileSystemBase):
    """DCP's writing of files, by path or by URL. Keeps the checksums of what was written."""

    def __init__(self) -> None:
        self.written: dict[str, SummedFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with path.open(mode) as file:
            stream = SummedFile(file)
            yield stream
        self.written[path.name] = stream

    def sums(self, name: str) -> FileEntry:
        """Size and checksum of a written file."""
        file = self.written[name]
        return FileEntry(bytes=file.bytes, crc32=file.crc32)

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.written[new_path.name] = self.written.pop(path.name)

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
        super().__init__(str(final), sync_files=not is_remote(final))
        self.fs = _Files()
        self.path = temporary_folder(final)

    def begin(self) -> int:
        """Prepare the folder, on rank 0; returns the number of the save, of 62 bits."""
        self.confirm()
        begin(self.final)
        return secrets.randbits(62)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
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
