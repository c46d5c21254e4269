"""Telemetry of a run: metrics, the run record, events, the profiler."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.config.derive import layout_degrees, layout_name, stages_of
from torchtitan.config.sections.schema import Config
from torchtitan.telemetry.console import StageCost
from torchtitan.telemetry.events import Events
from torchtitan.telemetry.history import History
from torchtitan.telemetry.metrics import MetricsReporter, peak_flops
from torchtitan.telemetry.profiler import Profiler
from torchtitan.telemetry.run_record import RunRecord
from torchtitan.train.preflight import Setup
from torchtitan.train.run_info import describe_start
from torchtitan.utils.device import device_name
from torchtitan.utils.logging import event, logger


class Telemetry:
    """Everything that measures and reports this start of the run."""

    def __init__(
        self,
        config: Config,
        setup: Setup,
        run_description: Mapping[str, Any],
        history: History,
        *,
        step: int,
        resumable: bool,
        began: float,
    ):
        """
        Args:
            run_description: from `describe_run`.
            history: of the checkpoint that this start resumes from.
            step: the step of the checkpoint that this start resumes from; 0 from scratch.
            resumable: the run saves checkpoints.
            began: when this start began, in seconds since the epoch.
        """
        folder = Path(config.job.dump_folder)
        first_rank = dist.get_rank() == 0
        self.profiler = Profiler(config.profiling, config.job.dump_folder)
        self.run_record = RunRecord(
            folder,
            describe_start(run_description, config.parallelism),
            step=step,
            resumable=resumable,
            writes=first_rank,
            began=began,
        )
        self.metrics = MetricsReporter(
            config.metrics,
            config.job,
            config.model_dump(),
            self.run_record,
            history,
            start_step=step,
            total_steps=config.training.steps,
            stages=list(_stage_costs(config, setup)),
            peak_flops=peak_flops(device_name(), config.training.mixed_precision_param),
            experts=setup.n_experts > 0,
            custom=config.custom,
            samples=bool(config.sampling.prompts),
        )
        self.events = Events(
            folder,
            writes=first_rank,
            continues=len(self.run_record.starts) > 1,
            listener=self.metrics.event,
        )
        _announce(config, step)

    def close(self, step: int, reason: str, loss: str | None) -> None:
        """
        Args:
            reason: why this start ended, as in `run.json`.
            loss: the loss of the last steps; None if this start trained none.
        """
        self.events.end(step, reason, loss)
        self.metrics.close(reason)
        self.run_record.save_trackers()


def _announce(config: Config, step: int) -> None:
    begins = f"Resuming after step {step}" if step else "Starting"
    layout = layout_name(layout_degrees(config.parallelism))
    steps = config.training.steps
    goal = f"to train to step {steps} on {layout}" if step < steps else "with nothing left to train"
    logger.info(f"{begins}, {goal}", extra=event("resumed" if step else "started", step))


def _stage_costs(config: Config, setup: Setup) -> Iterator[StageCost]:
    firsts = [1, *(stage.from_step for stage in config.training.stages)]
    for index, (first, stage) in enumerate(zip(firsts, stages_of(config), strict=True)):
        t = stage.training
        flops = setup.spec.flops_per_token(setup.args_of(index), t.seq_len)
        yield StageCost(first, flops, t.global_batch_size * t.seq_len)
