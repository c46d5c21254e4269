"""`metrics.jsonl` and the files beside it."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchtitan.telemetry.history import ABANDONED, History
from torchtitan.telemetry.trackers.base import Record
from torchtitan.utils.run_files import RunFile


class JsonlSink:
    """One JSON object per line, with its branch of the run's history. After a resume the file
    continues as if the run had never stopped.
    """

    def __init__(self, path: Path, history: History, *, new_run: bool = False):
        """
        Args:
            new_run: existing files are another run's, and are set aside.
        """
        self.file = RunFile(path)
        self.abandoned = RunFile(path.with_name(f"{ABANDONED}{path.name}"))
        self.history = history
        for file in (self.file, self.abandoned):
            if new_run and file.path.exists():
                file.set_aside()

    def log(self, record: Record) -> None:
        branch = self.history.branch_of(record["step"])
        self.file.append(json.dumps({**record, "branch": branch}))

    def follow(self, step: int) -> list[Record]:
        """Keep the records of the history up to `step`, and move all others to the abandoned ones.

        Returns:
            The records that come back from there, as the run returns to their branch.
        """
        kept: list[tuple[int, str]] = []
        left: list[tuple[int, str]] = []
        back: list[tuple[int, str]] = []
        for at, branch, line in _lines(self.file):
            fits = at <= step and branch in (None, self.history.branch_of(at))
            (kept if fits else left).append((at, line))
        for at, branch, line in _lines(self.abandoned):
            fits = at <= step and branch is not None and branch == self.history.branch_of(at)
            (back if fits else left).append((at, line))
        if left or back:
            self.abandoned.replace("".join(f"{line}\n" for _, line in left))
        if kept or left or back:  # all kept: a crash may have cut off another line
            lines = sorted([*kept, *back], key=lambda entry: entry[0]) if back else kept
            self.file.replace("".join(f"{line}\n" for _, line in lines))
        return [json.loads(line) for _, line in back]


def _lines(file: RunFile) -> Iterator[tuple[int, str | None, str]]:
    """Step, branch and text of each line, except for those cut off by a crash."""
    for line in (file.read() or b"").decode("utf-8-sig", "replace").split("\n"):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line)
            yield int(record["step"]), record.get("branch"), line
