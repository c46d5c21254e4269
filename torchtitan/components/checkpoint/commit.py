"""How a checkpoint becomes one: written under a hidden name, checksummed, fsynced, renamed.

    .step-100.tmp/   being written; no reader ever looks at it
    step-100/        complete: DCP's shards and `.metadata`, and `manifest.json` with the size and CRC-32 of each file
    .step-90.old/    being deleted

All of it happens inside DCP's storage writer, so that a save in a background thread commits in the very same way.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.utils.errors import CheckpointError

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d+)")
_SIDECAR = ".checksums-{}"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def committed_steps(folder: Path) -> list[int]:
    """Steps with a committed checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    found = (_STEP.fullmatch(path.name) for path in folder.iterdir() if (path / MANIFEST).is_file())
    return sorted(int(match[1]) for match in found if match)


def crc32(path: Path) -> int:
    """CRC-32 of a file's contents."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def fsync(path: Path) -> None:
    """Force a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write and fsync a JSON file."""
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def commit(temporary: Path, final: Path) -> None:
    """Give a completely written folder its name. Whatever had that name before goes away only afterwards."""
    fsync(temporary)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a checkpoint so that no reader sees half of it: rename away, then delete."""
    old = path.with_name(f".{path.name}.old")
    path.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def clean(folder: Path) -> list[str]:
    """Delete what an interrupted save or deletion left behind, and return its names."""
    leftovers = [*folder.glob(".step-*.tmp"), *folder.glob(".step-*.old")]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in leftovers)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint.

    Raises:
        CheckpointError: there is none, or it can't be read.
    """
    try:
        return json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {MANIFEST}: {error}") from None


def damage(path: Path, manifest: dict[str, Any], part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, or None; rank `part` of `parts` reads every `parts`-th file."""
    for name, expected in list(manifest["files"].items())[part::parts]:
        try:
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if crc32(path / name) != expected["crc32"]:
                return f"{name} has another checksum than when it was written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


class CommittingWriter(FileSystemWriter):
    """DCP storage writer whose `finish` commits the checkpoint.

    Every rank checksums the files it wrote; the coordinator, once all are done, collects these, writes the manifest,
    and renames.
    """

    def __init__(self, final: Path, manifest: dict[str, Any], committed: Callable[[], None]):
        self.final = final
        self.temporary = final.with_name(f".{final.name}.tmp")
        self.manifest = manifest
        self.committed = committed
        super().__init__(self.temporary, sync_files=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            future = super().write_data(plan, planner)
            names = {result.storage_data.relative_path for result in future.wait()}
        except Exception as error:
            # DCP pickles the exception to tell the other ranks, which loses what it was caused by.
            raise root_cause(error) from error
        if names:
            sums = {name: _file_entry(self.temporary / name) for name in sorted(names)}
            write_json(self.temporary / _SIDECAR.format(plan.storage_data.prefix.strip("_")), sums)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        files: dict[str, Any] = {}
        for sidecar in self.temporary.glob(_SIDECAR.format("*")):
            files |= json.loads(sidecar.read_text())
            sidecar.unlink()
        files[".metadata"] = _file_entry(self.temporary / ".metadata")
        write_json(self.temporary / MANIFEST, self.manifest | {"files": dict(sorted(files.items()))})
        commit(self.temporary, self.final)
        self.committed()


def root_cause(error: BaseException) -> BaseException:
    """The operating system's own error, where torch's writer wraps it in one about its internals."""
    chain = [error]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    return next((e for e in chain if isinstance(e, OSError)), chain[-1])


def _file_entry(path: Path) -> dict[str, int]:
    return {"bytes": path.stat().st_size, "crc32": crc32(path)}
