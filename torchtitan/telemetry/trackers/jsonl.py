"""`metrics.jsonl` and the files beside it."""

import json
import time
from pathlib import Path

from torchtitan.telemetry.trackers.base import Record
from torchtitan.utils.files import text_of, write_whole


class JsonlSink:
    """One JSON object per line. After a resume the file continues as if the run had never
    stopped.
    """

    def __init__(self, path: Path, start_step: int):
        self.path = path
        drop_after(path, start_step)
        self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a", buffering=1)

    def rewind(self, step: int) -> None:
        """Drop what was recorded after `step`."""
        self.file.close()
        drop_after(self.path, step)
        self._open()

    def log(self, record: Record) -> None:
        if not self.path.exists():  # deleted: its open file would take the records with it
            self.file.close()
            self._open()
        self.file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self.file.close()


def drop_after(path: Path, step: int) -> None:
    """Drop the lines of later steps, which will be trained again; with step 0, set the file aside
    as another run's. There may be none.
    """
    if not path.exists():
        return
    if step == 0:
        path.rename(path.with_name(f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}{path.suffix}"))
        return
    lines = []
    for line in text_of(path.read_bytes()).split("\n"):
        try:
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line cut off by a crash
    write_whole(path, "".join(lines).encode())
