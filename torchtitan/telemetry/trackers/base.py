"""What a sink is, and what a tracker is told of the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]


class Sink(Protocol):
    """Where records go.

    One that a module of the user registers is made by `make(dump_folder, start_step[, keys])`, on
    rank 0, or on all with `metrics.save_for_all_ranks`; `start_step` is 0 or the step of the
    checkpoint. Its methods are called in a thread of its own, one at a time. These are optional:

    - `rewind(step)`: the steps after `step` will be trained again.
    - `log_samples(step, samples)`: texts of the model, each with `prompt` and `text`.
    - `log_histograms(step, values)`: the values of each name.
    - `event(event)`: an event of the run, as in `events.jsonl`.
    - `ended(reason)`: how this start ended, as in `run.json`; called before `close`.
    """

    def log(self, record: Record) -> None:
        """Take a record: names to numbers, with `step` and `time`. Those of a validation have other
        names.
        """

    def close(self) -> None:
        """The run ends."""


@dataclass(frozen=True)
class Tracked:
    """What a tracker knows of the run it shows."""

    folder: Path
    id: str
    """Stays the same over all starts."""
    description: str
    config: Mapping[str, Any]
    start_step: int
    known: Mapping[str, Any]
    """What this tracker recorded at an earlier start of the run; empty at the first."""
    remember: Callable[[Mapping[str, Any]], None]
    """Record what the next start needs to continue the same run of this tracker."""
    account: Callable[[], Mapping[str, float]]
    """Goodput in percent, and restarts."""
    rank: int | None = None
    """With `metrics.save_for_all_ranks`."""

    @property
    def name(self) -> str:
        """The name of the run's folder, unless the tracker is told another one; of a rank, if each
        has its own.
        """
        return self.folder.resolve().name + ("" if self.rank is None else f"-rank_{self.rank}")
