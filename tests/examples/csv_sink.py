"""Metrics as a CSV file.

torchtitan train CONFIG.toml --experimental.custom_import csv_sink --metrics.sinks csv_file
"""

import csv
from pathlib import Path
from typing import Any

from torchtitan.config.registry import Section, metric_sinks


class Keys(Section):
    columns: list[str] = ["step", "loss", "lr"]
    """What to write of each record."""


@metric_sinks.register("csv_file", Keys)
class CsvFile:
    def __init__(self, dump_folder: Path, start_step: int, keys: Keys):
        self.path = dump_folder / "metrics.csv"
        self.columns = keys.columns

    def rewind(self, step: int) -> None:
        """Drop the records after `step`, which are trained again."""
        lines = self.path.read_text().splitlines()[1:] if step and self.path.exists() else []
        kept = [line for line in lines if int(line.split(",")[0]) <= step]
        self.path.write_text("\n".join([",".join(self.columns), *kept, ""]))

    def log(self, record: dict[str, Any]) -> None:
        if all(column in record for column in self.columns):
            with self.path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(
                    [record[column] for column in self.columns]
                )

    def close(self) -> None:
        pass
