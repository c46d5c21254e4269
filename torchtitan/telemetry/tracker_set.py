"""The trackers of one rank."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.config.registry import Custom, metric_sinks
from torchtitan.config.sections.metrics import Metrics
from torchtitan.config.sections.schema import Job
from torchtitan.parallel.agree import from_rank_0
from torchtitan.telemetry.run_record import RunRecord
from torchtitan.telemetry.trackers.background import CLOSE_SECONDS, Background
from torchtitan.telemetry.trackers.base import TrackedRun
from torchtitan.telemetry.trackers.tensorboard import TensorBoardSink
from torchtitan.telemetry.trackers.wandb import WandbSink


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
            settings: the whole configuration, for trackers.
        """
        rank = dist.get_rank()
        on_all_ranks = config.save_for_all_ranks
        run_id = from_rank_0(record.id) if on_all_ranks else record.id
        self.all: list[Background] = []
        if rank != 0 and not on_all_ranks:
            return
        for name in config.trackers:
            run = TrackedRun(
                folder=Path(job.dump_folder),
                id=run_id,
                description=job.description,
                config=settings,
                start_step=start_step,
                state=record.trackers.get(name, {}),
                save_state=partial(_save_state, record, name),
            )
            if on_all_ranks:
                run = replace(run, state={}, save_state=lambda _: None, rank=rank)
            self.all.append(Background(name, _maker(name, config, run, custom)))

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every tracker that has it."""
        for tracker in self.all:
            tracker.call(method, *arguments)

    def close(self, reason: str) -> None:
        """Let all trackers finish at the same time.

        Args:
            reason: the end of this start, as in `run.json`.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        for tracker in self.all:
            tracker.close(reason)
        for tracker in self.all:
            tracker.join(deadline)


def _save_state(record: RunRecord, name: str, state: Mapping[str, Any]) -> None:
    # replaced, because the main thread may be writing it
    record.trackers = {**record.trackers, name: dict(state)}


def _maker(name: str, config: Metrics, run: TrackedRun, custom: Custom) -> Callable[[], Any]:
    """A function that creates a tracker. A registered sink is created here already, so that its
    mistakes stop the start.
    """
    make = metric_sinks.maker(name, custom)
    if make:
        sink = make(run.folder, run.start_step)
        return lambda: sink
    return partial(_BUILT_IN[name], run, config)


def _tensorboard(run: TrackedRun, config: Metrics) -> TensorBoardSink:
    subfolder = "" if run.rank is None else f"rank_{run.rank}"
    return TensorBoardSink(run.folder / config.save_tb_folder / subfolder)


_BUILT_IN: dict[str, Callable[[TrackedRun, Metrics], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": lambda run, _: WandbSink(run),
}
