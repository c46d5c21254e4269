"""`metrics.jsonl` and the files beside it."""

import json
import time
from pathlib import Path

from torchtitan.telemetry.trackers.base import Record
from torchtitan.utils.files import write_whole


class JsonlSink:
    """One JSON object per line. After a resume the file continues as if the run had never
    stopped.
    """

    def __init__(
        self,
        path: Path,
        start_step: int,
    ):
        self.path = path
        self._drop_after(start_step)
        self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a", buffering=1)

    def rewind(self, step: int) -> None:
        """Drop what was recorded after `step`."""
        self.file.close()
        self._drop_after(step)
        self._open()

    def _drop_after(self, start_step: int) -> None:
        """Drop the steps that will be trained again; set aside, don't overwrite, another run's
        file.
        """
        path = self.path
        if not path.exists():
            return
        if start_step == 0:
            path.rename(
                path.with_name(f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}{path.suffix}")
            )
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= start_step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue  # a line cut off by a crash
        write_whole(path, "".join(kept).encode())

    def log(self, record: Record) -> None:
        if not self.path.exists():  # deleted: its open file would take the records with it
            self.file.close()
            self._open()
        self.file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self.file.close()
