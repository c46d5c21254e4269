"""The files in which a run records itself, such as `metrics.jsonl` and `run.json`.

None of them may stop a run: a failure to write is reported once, until writing works again, and an
unreadable file is set aside. Only regular files of limited size are opened.
"""

import time
from collections.abc import Callable
from pathlib import Path

from torchtitan.utils.files import append_line, read_regular, write_whole
from torchtitan.utils.logging import logger

MOST_BYTES = 1 << 32
"""Maximum size of a file to read."""


class RunFile:
    """One file, which a single rank writes. Only `set_aside` raises."""

    def __init__(self, path: Path):
        self.path = path
        self._failing = False

    def read(self, most: int = MOST_BYTES) -> bytes | None:
        """The file's contents; None if it doesn't exist, or was set aside as unreadable."""
        try:
            return read_regular(self.path, most, links=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.refuse(error.strerror or str(error))
            return None

    def append(self, text: str) -> None:
        """Add a line."""
        self._try(lambda: append_line(self.path, text.encode("utf-8", "backslashreplace") + b"\n"))

    def replace(self, text: str) -> bool:
        """Replace the whole file. Returns whether it worked."""
        if self.path.is_dir():
            self.refuse("Is a directory")
        return self._try(lambda: write_whole(self.path, text.encode("utf-8", "backslashreplace")))

    def refuse(self, why: str) -> None:
        """Set the file aside as unreadable."""
        logger.warning(f"can't read {self.path} ({why}): set aside")
        try:
            self.set_aside()
        except OSError as error:
            logger.warning(f"can't rename {self.path}: {error.strerror or error}")

    def set_aside(self) -> None:
        """Add the time to the file's name.

        Raises:
            OSError: the file can't be renamed.
        """
        name = f"{self.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}{self.path.suffix}"
        self.path.rename(self.path.with_name(name))

    def _try(self, write: Callable[[], object]) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted
            write()
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    f"can't write {self.path}: {error.strerror or error}. The run goes on, and "
                    "nothing is recorded there until it works"
                )
            self._failing = True
        return not self._failing
