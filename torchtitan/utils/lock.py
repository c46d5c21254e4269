"""One run per folder: `.lock` in the folder names the run that writes to it.

A holder on this machine is looked up by its process id. A holder on another machine renews its
file, and is considered dead once the file has not changed for `EXPIRY_SECONDS`. Only files are read
and written, so it works the same on local disks, network file systems and object storage.

A lock can be lost: after a long suspension, another run may have locked the folder. So a run
confirms its lock before it commits a checkpoint.
"""

import atexit
import errno
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from torchtitan.utils.errors import UserError
from torchtitan.utils.files import read_regular, write_whole
from torchtitan.utils.limits import LOCK_BYTES
from torchtitan.utils.logging import logger
from torchtitan.utils.storage import is_remote, make_folder, patiently

NAME = ".lock"
RENEW_SECONDS = 20.0
EXPIRY_SECONDS = 90.0
SETTLE_SECONDS = 1.0
"""Wait before reading a claim back: object storage has no exclusive creation."""
_SAME_START = 2.0
"""Difference in seconds between two readings of one process's start."""


class Holder(BaseModel):
    """A run that holds a folder."""

    model_config = ConfigDict(strict=True)

    run: str
    """A random name of this start."""
    host: str = Field(pattern=r"^[\x21-\x7e]{1,255}$")
    place: str
    """Machine, boot and container, within which process ids are unique."""
    pid: int = Field(ge=1, lt=2**31)
    started: float
    """Start of the process, in seconds since the epoch."""
    since: datetime = Field(strict=False)
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since:%Y-%m-%d %H:%M:%S %Z}"

    def is_alive(self, me: "Holder") -> bool | None:
        """Whether this run still writes to the folder; None if this machine can't find out."""
        if (self.place, self.pid) == (me.place, me.pid):
            return False  # an earlier run of this process
        if self.place != me.place:
            return None
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return True if abs(process.create_time() - self.started) < _SAME_START else None
        except psutil.NoSuchProcess:
            return False


def current_holder() -> Holder:
    """This process."""
    process = psutil.Process()
    return Holder(
        run=uuid.uuid4().hex,
        host=socket.gethostname(),
        place=_machine_id(),
        pid=process.pid,
        started=process.create_time(),
        since=datetime.now(UTC),
    )


def _machine_id() -> str:
    names = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        names.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(names)


def read_holder(folder: Path) -> tuple[Holder | None, bytes]:
    """The run that holds `folder` (None if there is none, or it is unreadable), and the file's
    content.
    """
    path = folder / NAME
    try:
        content = patiently(path, lambda: read_regular(path, LOCK_BYTES))
    except FileNotFoundError:
        return None, b""
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ELOOP, errno.EFBIG):  # a pipe, a link, another file
            return None, b"?"
        raise
    try:
        return Holder.model_validate_json(content), content
    except ValidationError:
        return None, content or b"?"


def in_use_message(folder: Path, holder: Holder | None) -> str:
    """The message about a folder that another run holds."""
    who = f": {holder}" if holder else ""
    return (
        f"{folder} is in use by another run{who}. Two runs in one folder would overwrite each "
        "other's files; stop that run, or choose another folder"
    )


def local_conflict(folder: Path) -> str | None:
    """A message if another process on this machine holds `folder`, else None. Locks nothing."""
    with suppress(OSError):  # the run reports an unusable folder
        holder, _ = read_holder(folder)
        if holder is not None and holder.is_alive(current_holder()):
            return in_use_message(folder, holder)
    return None


class FolderLock:
    """This run's claim on a folder, renewed by a thread until `release`."""

    def __init__(self, folder: Path):
        """Lock `folder`. May wait `EXPIRY_SECONDS` to see whether a holder on another machine is
        alive.

        Raises:
            UserError: another run holds the folder.
            OSError: the folder can't be written to.
        """
        self.folder = folder
        self.me = current_holder()
        self._writing = threading.Lock()
        self._closing = threading.Event()
        make_folder(folder)
        self._take()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)
        self._thread.start()
        atexit.register(self.release)

    def confirm(self) -> bool:
        """Check that this run still holds the folder.

        Returns:
            False if the folder was deleted; it exists again now.

        Raises:
            UserError: another run has locked it.
        """
        with self._writing:
            if self._is_mine():
                return True
            holder, content = read_holder(self.folder)
            if holder is not None:
                raise UserError(
                    f"this run has lost its folder: {in_use_message(self.folder, holder)}"
                )
            if not content:
                logger.warning(
                    f"{self.folder} was deleted while the run was writing to it, and what it held "
                    "is lost. The run continues in a new folder of that name"
                )
            make_folder(self.folder)
            self._write()
            return bool(content)

    def release(self) -> None:
        """Unlock the folder."""
        atexit.unregister(self.release)
        self._closing.set()
        with self._writing, suppress(OSError):
            if self._is_mine():
                path = self.folder / NAME
                patiently(path, lambda: path.unlink(missing_ok=True))

    # ---- taking and renewing

    def _take(self) -> None:
        holder, content = read_holder(self.folder)
        if content:
            if not self._is_dead(holder, content):
                raise self._refusal()
            logger.info(f"{self.folder} was held by {holder or 'an unknown run'}, which has died")
        self._write(exclusive=not content)
        time.sleep(SETTLE_SECONDS if is_remote(self.folder) else 0)
        if not self._is_mine():
            raise self._refusal()

    def _is_dead(self, holder: Holder | None, content: bytes) -> bool:
        """Whether the holder has died. On another machine, watch whether it renews its lock."""
        alive = holder.is_alive(self.me) if holder else None
        if alive is not None:
            return not alive
        logger.info(
            f"{self.folder} is held by {holder or 'an unknown run'}. Waiting {EXPIRY_SECONDS:g} s "
            "to see if it is alive"
        )
        deadline = time.monotonic() + EXPIRY_SECONDS
        while time.monotonic() < deadline:
            time.sleep(EXPIRY_SECONDS / 60)
            _, now = read_holder(self.folder)
            if now != content:
                return not now
        return True

    def _is_mine(self) -> bool:
        holder, _ = read_holder(self.folder)
        return holder is not None and holder.run == self.me.run

    def _refusal(self) -> UserError:
        holder, _ = read_holder(self.folder)
        return UserError(in_use_message(self.folder, holder))

    def _write(self, *, exclusive: bool = False) -> None:
        path = self.folder / NAME
        content = self.me.model_dump_json().encode()
        if is_remote(path):
            patiently(path, lambda: path.write_bytes(content))
        elif exclusive:
            with suppress(FileExistsError), path.open("xb") as file:  # another run may be faster
                file.write(content)
        else:
            write_whole(path, content)

    def _renew(self) -> None:
        while not self._closing.wait(RENEW_SECONDS):
            with self._writing, suppress(OSError):  # of the storage; the next attempt may succeed
                if not self._closing.is_set() and self._is_mine():
                    self.me = self.me.model_copy(update={"beat": self.me.beat + 1})
                    self._write()
