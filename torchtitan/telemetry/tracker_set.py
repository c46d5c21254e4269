"""The trackers of one rank."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.config.registry import TRACKER_PACKAGES, Custom, metric_sinks
from torchtitan.config.sections.metrics import Metrics
from torchtitan.config.sections.schema import Job
from torchtitan.parallel.agree import from_rank_0
from torchtitan.telemetry.run_record import RunRecord
from torchtitan.telemetry.trackers.background import CLOSE_SECONDS, Background
from torchtitan.telemetry.trackers.base import Tracked
from torchtitan.telemetry.trackers.mlflow import MlflowSink
from torchtitan.telemetry.trackers.prometheus import PrometheusSink
from torchtitan.telemetry.trackers.tensorboard import TensorBoardSink
from torchtitan.telemetry.trackers.trackio import TrackioSink
from torchtitan.telemetry.trackers.wandb import WandbSink

ON_ALL_RANKS = ("tensorboard", "wandb")
"""Built-in trackers that `metrics.save_for_all_ranks` gives to every rank."""


class Trackers:
    """All trackers of this rank. Calls return at once and never raise."""

    def __init__(
        self,
        config: Metrics,
        job: Job,
        settings: Mapping[str, Any],
        record: RunRecord,
        *,
        start_step: int,
        custom: Custom,
    ):
        """
        Args:
            settings: the whole configuration, for trackers that show it.
        """
        rank = dist.get_rank()
        each = config.save_for_all_ranks
        run_id = from_rank_0(record.id) if each else record.id
        self.all: list[Background] = []
        for name in config.trackers:
            everywhere = each and (name not in TRACKER_PACKAGES or name in ON_ALL_RANKS)
            if rank != 0 and not everywhere:
                continue
            run = Tracked(
                folder=Path(job.dump_folder),
                id=run_id,
                description=job.description,
                config=settings,
                start_step=start_step,
                known=record.trackers.get(name, {}),
                remember=partial(_remember, record, name),
                account=lambda: {"goodput": record.shares()[0], "restarts": len(record.starts) - 1},
            )
            if everywhere:
                run = replace(run, known={}, remember=lambda _: None, rank=rank)
            self.all.append(Background(name, _maker(name, config, run, custom)))

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every tracker that has it."""
        for tracker in self.all:
            tracker.call(method, *arguments)

    def close(self, reason: str) -> None:
        """Let all trackers finish at the same time.

        Args:
            reason: how this start ended, as in `run.json`.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        for tracker in self.all:
            tracker.close(reason)
        for tracker in self.all:
            tracker.join(deadline)


def _remember(record: RunRecord, name: str, state: Mapping[str, Any]) -> None:
    # replaced, because the main thread may be writing it
    record.trackers = {**record.trackers, name: dict(state)}


def _maker(name: str, config: Metrics, run: Tracked, custom: Custom) -> Callable[[], Any]:
    """A function that creates a tracker. Creates a user's own here: a mistake stops the start."""
    make = metric_sinks.maker(name, custom)
    if make:
        sink = make(run.folder, run.start_step)
        return lambda: sink
    return partial(_BUILT_IN[name], run, config)


def _tensorboard(run: Tracked, config: Metrics) -> TensorBoardSink:
    subfolder = "" if run.rank is None else f"rank_{run.rank}"
    return TensorBoardSink(run.folder / config.save_tb_folder / subfolder, run.start_step)


_BUILT_IN: dict[str, Callable[[Tracked, Metrics], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": lambda run, _: WandbSink(run),
    "mlflow": lambda run, _: MlflowSink(run),
    "trackio": lambda run, _: TrackioSink(run),
    "prometheus": lambda run, config: PrometheusSink(run, config.prometheus),
}
