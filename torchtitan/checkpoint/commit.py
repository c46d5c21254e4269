"""How a checkpoint becomes one, and what makes it whole.

In a folder: written under a hidden name, checksummed, fsynced, renamed.

    .step-100.tmp/   being written; no reader ever looks at it
    step-100/        complete: DCP's shards and `.metadata`, and `manifest.json` with the size and CRC-32 of each file
    .step-90.old/    being deleted

At a URL, where nothing can be renamed: written under its own name, `manifest.json` last; without that it is none. To
delete it, the manifest goes first. `.incomplete` marks what is being written or deleted.

`dcp_storage.py` does this inside DCP's storage writer, so that a save in a background thread commits in the same way.
"""

import json
import os
import platform
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import torchtitan
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.storage import delete_tree, is_remote, patiently

MANIFEST = "manifest.json"
_MARK = ".incomplete"
_STEP = re.compile(r"step-(\d+)")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def committed_steps(folder: Path) -> list[int]:
    """Steps with a committed checkpoint, oldest first."""
    return sorted(patiently(folder, lambda: [step for step, path in _steps(folder) if (path / MANIFEST).is_file()]))


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in paths:
        if match := _STEP.fullmatch(path.name):
            yield int(match[1]), path


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
    """Write a JSON file, and fsync it."""
    text = json.dumps(value, indent=1)
    patiently(path, lambda: path.write_text(text))
    if not is_remote(path):
        fsync(path)


def temporary_folder(final: Path) -> Path:
    """Where what becomes `final` is written: beside it under a hidden name, or at a URL already there."""
    return final if is_remote(final) else final.with_name(f".{final.name}.tmp")


def begin(final: Path) -> None:
    """Make room for what becomes `final`. At a URL, what is there under its name goes."""
    if not is_remote(final):
        delete_tree(temporary_folder(final))
        return
    remove(final)
    patiently(final, lambda: (final / _MARK).touch())


def commit(final: Path) -> None:
    """Give a completely written folder its name. Whatever had that name before goes away only afterwards."""
    if is_remote(final):
        patiently(final, lambda: (final / _MARK).unlink(missing_ok=True))
        return
    temporary = temporary_folder(final)
    fsync(temporary)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        delete_tree(old)
        final.rename(old)
    temporary.rename(final)
    fsync(final.parent)
    delete_tree(old)


def discard(final: Path) -> None:
    """Delete what a failed save of `final` left, and nothing complete."""
    if not (is_remote(final) and (final / MANIFEST).is_file()):
        delete_tree(temporary_folder(final))


def remove(path: Path) -> None:
    """Delete a checkpoint, if it is there, so that no reader sees half of it: out of sight first, then file by file."""
    old = path
    if is_remote(path):
        if patiently(path, lambda: (path / MANIFEST).is_file()):
            patiently(path, lambda: (path / _MARK).touch())
            patiently(path, lambda: (path / MANIFEST).unlink(missing_ok=True))
    else:
        old = path.with_name(f".{path.name}.old")
        with suppress(FileNotFoundError):  # another process was faster
            path.rename(old)
    patiently(path, lambda: delete_tree(old))


def leftovers(folder: Path) -> list[Path]:
    """What saves and deletions that were interrupted, or are still at work, have left."""
    if is_remote(folder):
        return sorted(p for _, p in _steps(folder) if (p / _MARK).is_file() and not (p / MANIFEST).is_file())
    return sorted([*folder.glob(".step-*.tmp"), *folder.glob(".step-*.old")])


def unknown(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint that this project never completed, nor began: somebody else's."""
    return sorted(p for _, p in _steps(folder) if not (p / MANIFEST).is_file() and not (p / _MARK).is_file())


def clean(folder: Path) -> list[str]:
    """Delete what an interrupted save or deletion left behind, and return its names."""
    found = leftovers(folder)
    for path in found:
        delete_tree(path)
    return [path.name for path in found]


def disposable(folder: Path, keep_latest: int, keep_every: int = 0) -> list[int]:
    """Steps to delete so that the newest `keep_latest` stay, and the multiples of `keep_every`.

    The newest checkpoint that can be resumed stays in any case.
    """
    steps = committed_steps(folder)
    resumable = (s for s in reversed(steps) if not read_manifest(step_folder(folder, s))["model_only"])
    kept = {*steps[max(len(steps) - keep_latest, 0) :], next(resumable, None)}
    return [s for s in steps if s not in kept and not (keep_every and s % keep_every == 0)]


def versions() -> dict[str, str]:
    """What wrote a checkpoint."""
    return {"torchtitan": torchtitan.__version__, "torch": torch.__version__, "python": platform.python_version()}


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint.

    Raises:
        CheckpointError: there is none, or it can't be read.
    """
    try:
        return json.loads(patiently(path, lambda: (path / MANIFEST).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {MANIFEST}: {error}") from None


def damage(path: Path, manifest: dict[str, Any], part: int = 0, parts: int = 1) -> Iterator[str]:
    """What is wrong with a checkpoint's files; rank `part` of `parts` reads every `parts`-th file."""
    for name, expected in list(manifest["files"].items())[part::parts]:
        try:
            size = patiently(path, lambda file=path / name: file.stat().st_size)  # type: ignore[misc]
            if size != expected["bytes"]:
                yield f"{name} has {size} bytes instead of {expected['bytes']}"
            elif patiently(path, lambda file=path / name: crc32(file)) != expected["crc32"]:  # type: ignore[misc]
                yield f"{name} has another checksum than when it was written"
        except OSError as error:
            yield f"{name}: {error.strerror or error}"
