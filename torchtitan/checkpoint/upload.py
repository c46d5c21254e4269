"""Copies of a run's checkpoints in object storage (`checkpoint.upload_folder`), made in the
background.

The two folders alone tell what is left to do, so the next start continues an interrupted upload: a
copy without a manifest is incomplete, and a file without its full size is missing. Until the
manifest is there, `.incomplete` in the copy holds its SHA-256. What another save of the same step
has left there, such as one before the run was rewound, is deleted first.

Each rank sends its share of the files, by a thread that takes part in no collective. Rank 0 sends
the manifest last.
"""

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.commit import (
    ABANDONED,
    MARK,
    abandoned_at,
    clean,
    committed_steps,
    disposable,
    purge,
    remove,
    step_folder,
    write_file,
)
from torchtitan.checkpoint.format.index import listed_files
from torchtitan.checkpoint.format.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    manifest_bytes,
    read_manifest,
)
from torchtitan.utils.errors import DamageError, UserError
from torchtitan.utils.files import open_regular
from torchtitan.utils.logging import logger
from torchtitan.utils.storage import patiently
from torchtitan.utils.wording import listed, plural, show_duration

_CHUNK = 1 << 22
_BLOCK = 1 << 25
"""Bytes held in memory and sent as one part; object stores allow 10,000 parts per file."""
_POLL_SECONDS = 2.0
_RETRY_SECONDS = 60.0
_PATIENCE_SECONDS = 1800.0
"""Seconds that a rank waits for the others at the end of a run."""
_DAMAGE = ".damaged"
"""File in a copy that can't be completed; holds the reason."""


class GoneError(Exception):
    """Retention has deleted the checkpoint that was being sent."""


class _StoppedError(Exception):
    """The run has ended."""


def send(
    source: Path,
    target: Path,
    rank: int = 0,
    world: int = 1,
    *,
    proceed: Callable[[], object] = lambda: None,
) -> int | None:
    """Copy the missing files of a checkpoint, or a rank's share of them, to object storage.

    Args:
        proceed: called before each block; may raise.

    Returns:
        Number of bytes sent; None if other ranks must send their files first.

    Raises:
        GoneError: the checkpoint was deleted.
        DamageError: it is damaged, or the URL holds something else.
        OSError: the storage failed.
    """
    try:
        content = manifest_bytes(source)
    except FileNotFoundError:
        raise GoneError(f"{source} was deleted") from None
    manifest = read_manifest(source, content)
    if _read(target / MANIFEST) == content:
        for name in (MARK, ABANDONED) if rank == 0 else ():  # left by a kill, or from before
            patiently(target, lambda name=name: (target / name).unlink(missing_ok=True))  # type: ignore[misc]
        return 0
    if not _begun(target, hashlib.sha256(content).hexdigest().encode(), rank):
        return None
    sent = 0
    uploaded = _sizes(target)
    mine = []
    try:
        for name, entry in listed_files(source, manifest, rank, world):
            mine.append(target / name)
            if uploaded.get(name) != entry.bytes:
                _send_file(source, target, name, entry, proceed=proceed)
                sent += entry.bytes
        if not (source / MANIFEST).exists():
            raise GoneError(f"{source} was deleted")
    except (DamageError, GoneError) as error:
        if isinstance(error, GoneError) or not (source / MANIFEST).exists():
            for path in mine:  # rank 0 may have deleted what there was before
                patiently(target, lambda path=path: path.unlink(missing_ok=True))  # type: ignore[misc]
            raise GoneError(f"{source} was deleted") from None
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise cause from None  # another attempt may succeed
        write_file(target / _DAMAGE, str(error).encode())  # for rank 0
        raise
    if rank == 0:
        uploaded = _sizes(target)
        if _DAMAGE in uploaded:
            raise DamageError((_read(target / _DAMAGE) or b"").decode())
        if not _complete(uploaded, manifest):
            return None
        write_file(target / MANIFEST, content)
        patiently(target, lambda: (target / MARK).unlink(missing_ok=True))
    return sent


def _complete(uploaded: Mapping[str, int], manifest: Manifest) -> bool:
    """Whether files of these sizes are all of a checkpoint's files, except the manifest."""
    if any(uploaded.get(name) != entry.bytes for name, entry in manifest.files.items()):
        return False
    rank_files = [size for name, size in uploaded.items() if name.startswith("__")]
    return len(rank_files) + len(manifest.files) == manifest.file_count() and (
        sum(rank_files) + sum(file.bytes for file in manifest.files.values())
        == manifest.file_bytes()
    )


def _begun(target: Path, seal: bytes, rank: int) -> bool:
    """Whether the files at the URL belong to the manifest with this SHA-256. On rank 0 they do
    afterwards: it deletes others.
    """
    mark = _read(target / MARK)
    if mark == seal or rank != 0:
        return mark == seal
    if mark is None and _read(target / MANIFEST) is None and _sizes(target):
        raise DamageError(
            f"{target} has files, but is no checkpoint of this project; move them away"
        )
    remove(target)
    write_file(target / MARK, seal)
    return True


def _read(path: Path) -> bytes | None:
    try:
        return patiently(path, path.read_bytes)
    except FileNotFoundError:
        return None


def _sizes(folder: Any) -> dict[str, int]:
    """Sizes of the files at a URL, by name."""

    def look() -> dict[str, int]:
        with suppress(FileNotFoundError):
            return {
                entry["name"].rsplit("/", 1)[-1]: entry["size"]
                for entry in folder.fs.ls(folder.path, detail=True)
            }
        return {}

    return patiently(folder, look)


def _send_file(
    source: Path, target: Path, name: str, entry: FileEntry, proceed: Callable[[], object]
) -> None:
    """Copy a file, with one block in memory at a time, and verify its checksum."""
    path = target / name

    def copy() -> int:
        crc32 = 0
        with open_regular(source / name) as file, path.open("wb", block_size=_BLOCK) as out:  # type: ignore[call-overload]
            while chunk := file.read(_CHUNK):
                proceed()
                crc32 = zlib.crc32(chunk, crc32)
                out.write(chunk)
        return crc32

    try:
        if patiently(target, copy) != entry.crc32:
            raise DamageError(f"{source} is damaged: {name} has a wrong checksum")
    except BaseException as error:
        with suppress(Exception):
            path.unlink(missing_ok=True)
        if isinstance(error, FileNotFoundError) and not (source / MANIFEST).exists():
            raise GoneError(f"{source} was deleted") from None
        raise


class Uploader:
    """Keeps the copies up to date, newest first. Its failures never reach the run."""

    def __init__(
        self,
        source: Path,
        target: Path,
        rank: int,
        world: int,
        *,
        keep_latest: int = 0,
        keep_every: int = 0,
        confirm: Callable[[], object] = lambda: None,
    ):
        """
        Args:
            target: a URL.
            keep_latest: `checkpoint.keep_latest_k`, which applies to the copies, too.
            keep_every: `checkpoint.keep_every_n`, likewise.
            confirm: called by rank 0 before it changes anything; raises if another run has taken
            the URL.
        """
        self.source = source
        self.target = target
        self.rank = rank
        self.world = world
        self.keep_latest = keep_latest
        self.keep_every = keep_every
        self.confirm = confirm
        self._done: dict[int, str] = {}
        """State of the manifest of each step that this rank has sent, or found damaged."""
        self._wake = threading.Event()
        self._finishing = threading.Event()
        self._stopped = threading.Event()
        self._failed = False
        self._newest = -1
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for new checkpoints now."""
        self._wake.set()

    def finish(self) -> None:
        """Wait, perhaps for minutes, until all are copied or failed. No collective may follow."""
        self._finishing.set()
        self._wake.set()
        while self._thread.is_alive():
            self._thread.join(30)
            if self._thread.is_alive() and self.rank == 0 and (waiting := self._pending()):
                logger.info(f"Waiting for the upload of {_names(waiting)} to {self.target}")

    def stop(self) -> None:
        """Leave the remaining uploads to the next start."""
        if self.rank == 0 and (waiting := self._pending()):
            logger.info(f"Not uploaded yet: {_names(waiting)}; the next start continues")
        self._stopped.set()
        self.finish()

    # ---- the thread

    def _run(self) -> None:
        while True:
            self._wake.wait(_RETRY_SECONDS if self._failed else None)
            self._wake.clear()
            self._failed = False
            try:
                self._send_all()
            except _StoppedError:
                return
            except Exception as error:
                self._failed = True
                logger.warning(f"Can't upload to {self.target}: {error}; {self._when()}")
                if isinstance(error, UserError):  # another run has taken the folder
                    return
            if self._finishing.is_set():
                return

    def _when(self) -> str:
        if self._finishing.is_set():
            return (
                f"the next start, or `torchtitan ckpt upload {self.source} {self.target}`, "
                "continues"
            )
        return f"trying again at the next save, or in {show_duration(_RETRY_SECONDS)}"

    def _pending(self) -> list[int]:
        """Steps to send, oldest first."""
        steps = committed_steps(self.source)
        if self.keep_latest:
            gone = disposable(self.source, self.keep_latest, self.keep_every)
            steps = [step for step in steps if step not in gone]
        return [step for step in steps if self._done.get(step) != self._state(step)]

    def _state(self, step: int) -> str:
        """A text that changes when a step is saved again."""
        with suppress(OSError):
            status = (step_folder(self.source, step) / MANIFEST).stat()
            return f"{status.st_mtime_ns} {status.st_ino}"
        return ""

    def _send_all(self) -> None:
        if self.rank == 0:
            self.confirm()
            self._tidy()
        began = time.monotonic()
        while waiting := self._pending():
            if self.rank == 0 and len(waiting) > 1 and waiting[-1] != self._newest:
                logger.warning(
                    f"Uploads are behind: {_names(waiting)} wait; the newest is sent first"
                )
            self._newest = waiting[-1]
            if any(self._send(step) for step in reversed(waiting)):
                continue
            if self._finishing.is_set() and time.monotonic() - began > _PATIENCE_SECONDS:
                raise TimeoutError(f"other ranks have not sent their part of {_names(waiting)}")
            self._stopped.wait(_POLL_SECONDS)
        if self.rank == 0:
            self._tidy()

    def _send(self, step: int) -> bool:
        """Send a checkpoint, or this rank's share; returns whether nothing is left to do."""
        self._proceed()
        state = self._state(step)
        began = time.monotonic()
        target = step_folder(self.target, step)
        try:
            sent = send(
                step_folder(self.source, step), target, self.rank, self.world, proceed=self._proceed
            )
        except GoneError:
            if self.rank == 0:
                logger.warning(
                    f"step-{step} was deleted before it was uploaded: it was older than those kept"
                )
                self._tidy()
            return True
        except DamageError as error:
            logger.warning(f"Not uploaded: {error}")
            self._done[step] = state
            return True
        if sent is None:
            return False
        self._done[step] = state
        if self.rank == 0 and sent:
            logger.info(f"Uploaded {target} in {show_duration(time.monotonic() - began)}")
            self._tidy()
        return True

    def _proceed(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError

    def _tidy(self) -> None:
        """Bring the copies in line with the run: delete the beginnings of copies of checkpoints
        that no longer exist, abandon what the run has abandoned, and delete old copies.
        """
        steps = committed_steps(self.source)
        clean(self.target, keep=steps)
        if not steps:
            return
        abandoned = committed_steps(self.source, abandoned=True)
        for step in committed_steps(self.target):
            if step in abandoned or step > steps[-1]:
                back_to = abandoned_at(step_folder(self.source, step)) or steps[-1]
                write_file(step_folder(self.target, step) / ABANDONED, str(back_to).encode())
        purge(self.target, self.keep_latest, self.keep_every, steps[-1])


def _names(steps: list[int]) -> str:
    return f"{plural(len(steps), 'checkpoint')} ({listed(f'step-{step}' for step in steps)})"
