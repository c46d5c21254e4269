"""The interface of sinks, and the run that they record. Imports no tracker."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]


class Sink(Protocol):
    """A destination of records.

    A sink that a user's module registers is created by `make(dump_folder, start_step[, keys])`, on
    rank 0, or on all ranks with `metrics.save_for_all_ranks`; `start_step` is 0 or the step of the
    checkpoint. Its methods are called in a separate thread, one at a time. These are optional:

    - `rewind(step)`: the records after `step` are void. Called before the first record of a start
      that trains, and when the run goes back to a checkpoint.
    - `log_samples(step, samples)`: texts of the model, each with `prompt` and `text`.
    - `event(event)`: an event of the run, as in `events.jsonl`.
    - `ended(reason)`: the end of this start, as in `run.json`; called before `close`.
    """

    def log(self, record: Record) -> None:
        """Write a record: numbers by name, with `step` and `time`. A validation has other names."""

    def close(self) -> None:
        """Finish at the end of the run."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records."""

    folder: Path
    id: str
    """The run's id, the same for all starts."""
    description: str
    config: Mapping[str, Any]
    start_step: int
    state: Mapping[str, Any]
    """The state that this tracker saved at an earlier start; empty at the first start."""
    save_state: Callable[[Mapping[str, Any]], None]
    """Saves the state that the next start needs to continue the same run of this tracker."""
    rank: int | None = None
    """None unless each rank has a separate run (`metrics.save_for_all_ranks`)."""

    @property
    def name(self) -> str:
        """Default name: the run's folder, and the rank if each rank has a separate run."""
        return self.folder.resolve().name + ("" if self.rank is None else f"-rank_{self.rank}")


# ---- names of metrics

STEP = "train/step"
_PERF = {
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_gib",
    "memory_pct",
    "data_loading_pct",
    "step_time_s",
    "gpu_utilization_pct",
    "gpu_power_w",
    "gpu_temperature_c",
}
_EXPERTS = {
    "expert_load_max": "load_max",
    "expert_load_max_layer": "load_max_layer",
    "expert_entropy": "entropy",
    "auxiliary_loss": "auxiliary_loss",
    "dead_experts": "dead",
}
_OF_SOURCES = ("loss/", "tokens/", "epochs/", "bytes_per_token/")


def tracker_name(key: str) -> str:
    """A key of `metrics.jsonl` as trackers name it: `train/loss`, `perf/mfu`, `val/loss`, ..."""
    if key in _PERF:
        return f"perf/{key}"
    if key in _EXPERTS:
        return f"experts/{_EXPERTS[key]}"
    if key.startswith("validation_"):
        return f"val/{key.removeprefix('validation_')}"
    if key.startswith("eval/"):
        return key
    return f"sources/{key}" if key.startswith(_OF_SOURCES) else f"train/{key}"


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by `tracker_name`, without its step and time."""
    return {
        tracker_name(key): value
        for key, value in record.items()
        if key not in ("step", "time") and isinstance(value, int | float)
    }
