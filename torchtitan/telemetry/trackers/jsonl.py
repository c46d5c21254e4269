"""`metrics.jsonl` and the files beside it."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

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
        A kill or a full disk in between loses none.

        Returns:
            The records that come back from there, as the run returns to their branch.
        """
        lines = list(_lines(self.file))
        aside = list(_lines(self.abandoned))
        texts = {line.text for line in lines}

        def fits(line: _Line) -> bool:
            # A record of an earlier version has no branch by which it could come back.
            branch = self.history.branch_of(line.step)
            ours = line.branch == branch if line.branch else line.text in texts
            return line.step <= step and ours

        back = list(filter(fits, aside))
        both = lines + [line for line in aside if line.text not in texts]
        others = [line for line in both if not fits(line)]
        kept = not (others or back) or _replace(self.abandoned, others + back)
        if kept and (lines or back):
            kept = _replace(self.file, sorted(filter(fits, both), key=attrgetter("step")))
        if kept and back:
            _replace(self.abandoned, others)
        return [json.loads(line.text) for line in back]


class _Line(NamedTuple):
    step: int
    branch: str | None
    text: str


def _lines(file: RunFile) -> Iterator[_Line]:
    """The lines of a file, except for those cut off by a crash."""
    for text in (file.read() or b"").decode("utf-8-sig", "replace").split("\n"):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(text)
            yield _Line(int(record["step"]), record.get("branch"), f"{text}\n")


def _replace(file: RunFile, lines: Iterable[_Line]) -> bool:
    return file.replace("".join(line.text for line in lines))
