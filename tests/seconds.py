"""The seconds that each test file takes: `seconds.csv`, whose sum has a ceiling.

Recorded by `scripts/test.sh --record` on two idle cores, with two workers. Other arguments record
only their files.
"""

import csv
from collections import Counter
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("seconds.csv")
CEILING = 1_350
"""Seconds of all files together. It only falls."""


def read(table: Path) -> dict[str, float]:
    """File to its seconds."""
    if not table.exists():
        return {}
    with table.open() as rows:
        return {row["file"]: float(row["seconds"]) for row in csv.DictReader(rows)}


class Seconds:
    """A pytest plugin that enters the files of a session into a table."""

    def __init__(self, table: Path):
        self.table = table
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.location[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        rows = {name: s for name, s in read(self.table).items() if Path(name).exists()}
        rows |= {name: round(seconds, 1) for name, seconds in self.seconds.items()}
        with self.table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["file", "seconds"])
            writer.writerows(sorted(rows.items(), key=lambda row: (-row[1], row[0])))
