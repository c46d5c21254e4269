"""`metrics.jsonl` and the files beside it."""

import json
from pathlib import Path

from torchtitan.telemetry.trackers.base import Record
from torchtitan.utils.run_files import RunFile


class JsonlSink:
    """One JSON object per line. After a resume the file continues as if the run had never
    stopped.
    """

    def __init__(self, path: Path, start_step: int):
        self.file = RunFile(path)
        drop_after(self.file, start_step)

    def rewind(self, step: int) -> None:
        """Drop the records after `step`."""
        drop_after(self.file, step)

    def log(self, record: Record) -> None:
        self.file.append(json.dumps(record))


def drop_after(file: RunFile, step: int) -> None:
    """Drop the lines of later steps, which will be trained again. With step 0, the file belongs to
    another run, and is set aside. The file need not exist.
    """
    if step == 0:
        if file.path.exists():
            file.set_aside()
        return
    content = file.read()
    if content is None:
        return
    lines = []
    for line in content.decode("utf-8-sig", "replace").split("\n"):
        try:
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # a line cut off by a crash
    file.replace("".join(lines))
