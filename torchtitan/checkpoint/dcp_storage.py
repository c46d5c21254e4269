"""Reader and writer of `torch.distributed.checkpoint` (DCP) for folders and URLs: checksummed, committed, retried."""

import io
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.checkpoint.commit import MANIFEST, begin, commit, temporary_folder, write_json
from torchtitan.utils.storage import is_remote, make_folder, patiently


class _SummedStream:
    """A file being written, with the size and CRC-32 of what went into it."""

    def __init__(self, file: IO[bytes]):
        self.file, self.bytes, self.crc32 = file, 0, 0

    def write(self, data: Any) -> int:
        self.bytes += memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _Files(FileSystemBase):
    """DCP's access to files, by path or by URL. Keeps the checksums of what it wrote."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, int]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with path.open(mode) as file:
            stream = _SummedStream(file) if "w" in mode else file
            yield stream
        if isinstance(stream, _SummedStream):
            self.sums[path.name] = {"bytes": stream.bytes, "crc32": stream.crc32}

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.sums[new_path.name] = self.sums.pop(path.name)

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        make_folder(path)

    def exists(self, path: Any) -> bool:
        return path.exists()

    def rm_file(self, path: Any) -> None:
        path.unlink()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@dataclass(frozen=True)
class _Written(WriteResult):
    """Where a tensor went, as DCP's coordinator gets it from every rank; with the sums of the file it is in."""

    file: dict[str, int]


class CommittingWriter(FileSystemWriter):
    """DCP storage writer whose `finish` commits the checkpoint.

    Every rank checksums what it writes; the coordinator, once all are done, writes the manifest and commits.
    """

    def __init__(
        self,
        final: Path,
        manifest: dict[str, Any],
        committed: Callable[[], None] = lambda: None,
        *,
        file_per_tensor: bool = False,
    ):
        self.final, self.manifest, self.committed = final, manifest, committed
        super().__init__(str(final), single_file_per_rank=not file_per_tensor, sync_files=not is_remote(final))
        self.fs, self.path = _Files(), temporary_folder(final)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:  # the others write only after its plan has reached them
            begin(self.final)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = patiently(self.final, lambda: super(CommittingWriter, self).write_data(plan, planner).wait())
        except Exception as error:
            # DCP pickles the exception to tell the other ranks, which loses what it was caused by.
            raise root_cause(error) from None
        future: Future[list[WriteResult]] = Future()
        sums = self.fs.sums
        future.set_result(
            [_Written(r.index, r.size_in_bytes, r.storage_data, sums[r.storage_data.relative_path]) for r in results]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        patiently(self.final, lambda: super(CommittingWriter, self).finish(metadata, results))
        files = {r.storage_data.relative_path: r.file for rank in results for r in rank if isinstance(r, _Written)}
        files[".metadata"] = self.fs.sums[".metadata"]
        about = {"format": 1, "saved": datetime.now(UTC).isoformat(timespec="seconds")}
        write_json(self.path / MANIFEST, about | self.manifest | {"files": dict(sorted(files.items()))})
        commit(self.final)
        self.committed()


class Reader(FileSystemReader):
    """DCP storage reader of a path or URL that reads `.metadata` only once."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self.fs, self.path = _Files(), path
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            content = patiently(self.path, (self.path / ".metadata").read_bytes)
            self._metadata = pickle.loads(content)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return patiently(self.path, lambda: super(Reader, self).read_data(plan, planner))

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """One tensor's bytes. Fetched at once from remote storage, where each of many small reads is a request."""
        if not is_remote(self.path):
            return super()._slice_file(file, sinfo)
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))


def root_cause(error: BaseException) -> BaseException:
    """The operating system's own error, where torch's writer wraps it in one about its internals."""
    chain = [error]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    return next((e for e in chain if isinstance(e, OSError)), chain[-1])


@contextmanager
def alone() -> Iterator[None]:
    """Around DCP's calls with `no_dist=True`, which warn that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is")
        yield
