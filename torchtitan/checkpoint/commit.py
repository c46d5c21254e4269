"""The layout of a folder of checkpoints, and atomic saves and deletions.

In a local folder, a checkpoint is written under a hidden name, checksummed, fsynced and renamed.

    .step-100.tmp/   being written; readers ignore it
    step-100/        complete: DCP's files, indexes and checksums, and `manifest.json`
    .step-90.old/    being deleted

Object storage can't rename. There, a checkpoint is written under its own name, and `manifest.json`
last; without it, it is not a checkpoint. Deletion removes the manifest first. `.incomplete` marks
a checkpoint being written or deleted.

A run that goes back to an earlier step abandons the later ones: a file `abandoned` in their folders
keeps every start from resuming them. A save of the same step replaces it with its folder. While a
run writes these files, `going-back` in the folder above names its step.

`writer.py` commits from DCP's storage writer, so saves in the background commit in the same way.
"""

import json
import os
import platform
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

import torchtitan
from torchtitan.checkpoint.format.index import file_entries
from torchtitan.checkpoint.format.manifest import MANIFEST, FileEntry, Manifest, read_manifest
from torchtitan.checkpoint.format.sums import crc32
from torchtitan.utils.errors import CheckpointError, DamageError
from torchtitan.utils.files import read_regular
from torchtitan.utils.logging import event, logger
from torchtitan.utils.storage import delete_tree, is_remote, make_folder, patiently
from torchtitan.utils.wording import listed

MARK = ".incomplete"
"""Name of the file that marks a checkpoint at a URL as being written or deleted."""
ABANDONED = "abandoned"
"""Name of the file that marks a checkpoint as abandoned. Holds the step that the run went back to.
"""
_GOING_BACK = "going-back"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def committed_steps(folder: Path, *, abandoned: bool = False) -> list[int]:
    """Steps with a committed checkpoint that the run can continue from, oldest first.

    Args:
        abandoned: return the abandoned steps instead.
    """

    def look() -> list[int]:
        return [
            step
            for step, path in _steps(folder)
            if (path / MANIFEST).is_file() and (path / ABANDONED).is_file() == abandoned
        ]

    return sorted(patiently(folder, look))


def checkpoints_at(path: Path, *, abandoned: bool = False) -> list[Path]:
    """The checkpoint at `path`, or all checkpoints in the folder `path`, oldest first.

    Args:
        abandoned: include abandoned checkpoints.

    Raises:
        CheckpointError: no checkpoint exists there.
    """
    if patiently(path, lambda: (path / MANIFEST).is_file()):
        return [path]
    steps = committed_steps(path)
    if abandoned:
        steps = sorted([*steps, *committed_steps(path, abandoned=True)])
    if steps:
        return [step_folder(path, step) for step in steps]
    kind = "holds no complete checkpoint" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path} {kind}; give a step-N folder, or a folder of them")


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in paths:
        if match := _STEP.fullmatch(path.name):
            yield int(match[1]), path


def fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and fsync it."""
    patiently(path, lambda: path.write_bytes(content))
    if not is_remote(path):
        fsync(path)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file and fsync it."""
    write_file(path, json.dumps(value, indent=1).encode())


def temporary_folder(final: Path) -> Path:
    """The folder in which to write `final`: a hidden one beside it, or at a URL `final` itself."""
    return final if is_remote(final) else final.with_name(f".{final.name}.tmp")


def begin(final: Path) -> None:
    """Prepare to write `final`. At a URL, this deletes the previous checkpoint of that name."""
    if not is_remote(final):
        delete_tree(temporary_folder(final))
        return
    remove(final)
    patiently(final, lambda: (final / MARK).touch())


def commit(final: Path) -> None:
    """Give a completely written folder its final name, replacing the previous checkpoint."""
    if is_remote(final):
        patiently(final, lambda: (final / MARK).unlink(missing_ok=True))
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
    """Delete the remains of a failed save of `final`, never a complete checkpoint."""
    if not (is_remote(final) and (final / MANIFEST).is_file()):
        delete_tree(temporary_folder(final))


def remove(path: Path) -> None:
    """Delete a checkpoint if it exists. It is hidden first, so no reader sees half of it."""
    old = path
    if is_remote(path):
        if patiently(path, lambda: (path / MANIFEST).is_file()):
            patiently(path, lambda: (path / MARK).touch())
            patiently(path, lambda: (path / MANIFEST).unlink(missing_ok=True))
    else:
        old = path.with_name(f".{path.name}.old")
        with suppress(FileNotFoundError):  # another process deleted it
            path.rename(old)
    patiently(path, lambda: delete_tree(old))


def abandoned_at(path: Path) -> int | None:
    """The step that the run went back to when it abandoned the checkpoint `path`, 0 if a crash has
    cut the number off; None if the checkpoint is not abandoned.
    """
    return _step_in(path / ABANDONED)


def _step_in(mark: Path) -> int | None:
    """The step that a file holds, 0 if a crash has cut it off; None if there is no file."""
    if not patiently(mark, mark.is_file):
        return None
    text = patiently(mark, lambda: read_regular(mark, 20))
    return int(text) if text.isdigit() else 0


def go_back(folder: Path, step: int) -> None:
    """Abandon the checkpoints that a run doesn't continue when it goes on from `step`, and log
    them.

    These are the later checkpoints. If `step` itself was abandoned, they are the checkpoints since
    the run went back, and `step` is no longer abandoned. After a crash in between, `prepare`
    completes the change.
    """
    earlier = abandoned_at(step_folder(folder, step))
    fork = step if earlier is None else earlier
    later = [other for other in committed_steps(folder) if other > fork and other != step]
    abandoned = [
        other
        for other in committed_steps(folder, abandoned=True)
        if other != step and not 0 < (abandoned_at(step_folder(folder, other)) or 0) <= fork
    ]
    others = later + abandoned
    if not others and earlier is None:
        return
    write_file(folder / _GOING_BACK, str(step).encode())
    for other in others:
        write_file(step_folder(folder, other) / ABANDONED, str(fork).encode())
    for mark in (step_folder(folder, step) / ABANDONED, folder / _GOING_BACK):
        patiently(folder, partial(mark.unlink, missing_ok=True))
    if later:
        logger.warning(
            f"The run goes back to step {step}: {listed(f'step-{other}' for other in later)} in "
            f"{folder} {'is' if len(later) == 1 else 'are'} abandoned, as are exports of them. "
            "No start resumes an abandoned step, unless checkpoint.load_step names it",
            extra=event("abandoned", step, steps=later, folder=str(folder)),
        )


def leftovers(folder: Path) -> list[Path]:
    """Folders of saves and deletions that were interrupted or are in progress."""
    if is_remote(folder):
        return sorted(
            p for _, p in _steps(folder) if (p / MARK).is_file() and not (p / MANIFEST).is_file()
        )
    return sorted([*folder.glob(".step-*.tmp"), *folder.glob(".step-*.old")])


def unrecognized_folders(folder: Path) -> list[Path]:
    """Folders named like checkpoints that are damaged, or another program's."""
    names = (MANIFEST, MARK)
    return sorted(p for _, p in _steps(folder) if not any((p / name).is_file() for name in names))


def clean(folder: Path) -> list[str]:
    """Delete the remains of interrupted saves and deletions; returns their names.

    A complete checkpoint at a URL loses its `.incomplete`: the run was killed between its last two
    files, or as it began to delete it.
    """
    remains = leftovers(folder)
    for path in remains:
        patiently(path, partial(delete_tree, path))
    if is_remote(folder):
        for _, path in _steps(folder):
            if (path / MARK).is_file() and (path / MANIFEST).is_file():
                patiently(path, partial((path / MARK).unlink, missing_ok=True))
    return [path.name for path in remains]


def prepare(folder: Path) -> str | None:
    """Create the folder of a run that saves, and clean up after an interrupted save.

    Returns:
        The reason why the run can't save there; None if it can.
    """
    try:
        make_folder(folder)
        if is_remote(folder):
            probe = folder / ".writable"
            patiently(probe, probe.touch)
            patiently(probe, probe.unlink)
        mark = folder / _GOING_BACK
        if step := _step_in(mark):
            go_back(folder, step)
        # After a crash it may be cut off, or remain although nothing else is left to do.
        patiently(mark, partial(mark.unlink, missing_ok=True))
        if remains := clean(folder):
            logger.info(f"Removed the remains of an interrupted save: {', '.join(remains)}")
        if strays := [path.name for path in unrecognized_folders(folder)]:
            text = f"{', '.join(strays)} in {folder} without {MANIFEST}"
            logger.warning(f"Not a checkpoint of this project, or a damaged one: {text}")
            if not committed_steps(folder):
                return (
                    f"checkpoint.folder: {text}, and no checkpoint that can be resumed. The run "
                    "would start from scratch and eventually replace them; move them away, or "
                    "choose another folder"
                )
    except OSError as error:
        return f"checkpoint.folder: can't write to {folder}: {error.strerror or error}"
    return None


def disposable(
    folder: Path, keep_latest: int, keep_every: int = 0, *, newest: int | None = None
) -> list[int]:
    """Steps to delete: not the newest `keep_latest`, nor multiples of `keep_every`.

    The newest checkpoint that can be resumed always stays. Abandoned checkpoints are treated as the
    oldest, and `keep_every` does not protect them.

    Args:
        newest: ignore later steps, which a run that went back has yet to reach.
    """
    steps, abandoned_steps = (
        [
            step
            for step in committed_steps(folder, abandoned=abandoned)
            if newest is None or step <= newest
        ]
        for abandoned in (False, True)
    )
    resumable = (step for step in reversed(steps) if _is_resumable(step_folder(folder, step)))
    by_age = [*abandoned_steps, *steps]
    keep = {*by_age[max(len(by_age) - keep_latest, 0) :], next(resumable, None)}
    if keep_every:
        keep |= {step for step in steps if step % keep_every == 0}
    return [step for step in by_age if step not in keep]


def purge(folder: Path, keep_latest: int, keep_every: int, newest: int) -> None:
    """Delete the steps that `disposable` returns, and log them. `keep_latest` 0 keeps all."""
    steps = disposable(folder, keep_latest, keep_every, newest=newest) if keep_latest else []
    if not steps:
        return
    for step in steps:
        remove(step_folder(folder, step))
    exceptions = f", and not multiples of {keep_every}" if keep_every else ""
    logger.info(
        f"Deleted {listed(f'step-{step}' for step in steps)} from {folder}: older than the newest "
        f"{keep_latest}{exceptions}",
        extra=event("deleted", newest, steps=steps, folder=str(folder)),
    )


def _is_resumable(path: Path) -> bool:
    try:
        return not read_manifest(path).model_only
    except DamageError:
        return False


def versions() -> dict[str, str]:
    """Versions of the software, for manifests."""
    return {
        "torchtitan": torchtitan.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def damage(
    path: Path, manifest: Manifest, share: int = 0, shares: int = 1, *, contents: bool = True
) -> Iterator[str]:
    """Problems with a checkpoint's files.

    Args:
        share: check only every `shares`-th file, beginning with this one.
        contents: also read the files and compare their checksums.
    """
    files = 0
    size = 0
    try:
        for name, expected in file_entries(path, manifest, share, shares):
            files += 1
            size += expected.bytes
            yield from _file_damage(path, name, expected, contents=contents)
    except DamageError as error:
        yield str(error).removeprefix(f"{path} is damaged: ")
        return
    if shares == 1 and (files, size) != (manifest.file_count(), manifest.file_bytes()):
        yield f"the ranks list {files} files of {size} bytes, and {MANIFEST} others"


def _file_damage(path: Path, name: str, expected: FileEntry, *, contents: bool) -> Iterator[str]:
    file = path / name
    try:
        status = patiently(path, file.stat if is_remote(path) else file.lstat)
        if not is_remote(path) and not stat.S_ISREG(status.st_mode):
            yield f"{name} is not a regular file"
        elif status.st_size != expected.bytes:
            yield f"{name} has {status.st_size} bytes instead of {expected.bytes}"
        elif contents and patiently(path, lambda: crc32(file)) != expected.crc32:
            yield f"{name} has a wrong checksum"
    except OSError as error:
        yield f"{name}: {error.strerror or error}"
