"""Runs the trainer of one rank on the fake process group: a step, its report, a validation, a save,
a resume, the end.

The code of a run is unchanged, from the first process group to the last barrier. Only the network,
the memory, the data (rows without content) and the storage of checkpoints are replaced.
"""

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.util import get_temp_dir
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan.config.derive import axis_degrees
from torchtitan.config.sections.schema import Config
from torchtitan.health.rank_dumps import where
from torchtitan.parallel.mesh import build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.tools.rehearsal.coverage import rehearsal_config
from torchtitan.tools.rehearsal.events import Broadcast, RankRecord
from torchtitan.tools.rehearsal.fake import aside, no_network, start_group, take_fake_memory
from torchtitan.tools.rehearsal.network import recording
from torchtitan.tools.rehearsal.recorder import EndlessLoopError, Recorder, is_hidden
from torchtitan.tools.rehearsal.replaced import NoFiles, blank_data, few_modules, unequal_splits
from torchtitan.train import trainer
from torchtitan.train.build import Builders
from torchtitan.train.built_in import Report, Save
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.engine import Engine
from torchtitan.train.evaluations import Validate
from torchtitan.train.preflight import Setup, preflight
from torchtitan.train.restore import restore
from torchtitan.train.state import StepResult
from torchtitan.train.step import train_step
from torchtitan.utils.activity import last_exchanges
from torchtitan.utils.torch_compat import replaced


def rehearse_rank(
    config: Config,
    world: int,
    layers: int,
    rank: int,
    values: int,
    broadcasts: list[Broadcast] | None,
) -> RankRecord:
    """Run one rank in this process, which can't run another one afterwards.

    Args:
        config: derived and validated for `world` ranks.
        layers: number of layers of each stage to run.
        values: index in `VALUES` of what the host reads of the rank's own tensors.
        broadcasts: rank 0's, in its rehearsal; None on rank 0.
    """
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with TemporaryDirectory(prefix="rehearsal-", dir=get_temp_dir()) as folder:
        config = rehearsal_config(config, world, folder)
        setup = preflight(config, output=False)
        recorder = Recorder(rank, axis_degrees(config.parallelism), values=values)
        record(
            recorder, broadcasts, lambda mode: _run(config, setup, world, recorder, mode, layers)
        )
    return recorder.record


def record(
    recorder: Recorder, broadcasts: list[Broadcast] | None, work: Callable[[FakeTensorMode], None]
) -> None:
    """Run `work` as the recorder's rank without a network, and record what it does and how it ends.

    Args:
        broadcasts: rank 0's; None on rank 0.
    """
    with no_network() as mode, recording(recorder, broadcasts):
        try:
            with mode, recorder:
                work(mode)
        except EndlessLoopError as loop:
            recorder.record.error = str(loop)
        except (Exception, SystemExit) as error:
            recorder.record.error = _describe(error)
    recorder.record.exchanges = last_exchanges()


def _describe(error: BaseException) -> str:
    """An exception, and the line of the run that raised it."""
    frames = [
        (frame.filename, frame.lineno, frame.name)
        for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    run_frames = [frame for frame in frames if not is_hidden(frame[0])]
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"raised {text}, at {where(run_frames or frames)}"


def _run(
    config: Config, setup: Setup, world: int, recorder: Recorder, mode: FakeTensorMode, layers: int
) -> None:
    def with_labels(callbacks: tuple[Callback, ...]) -> Iterator[Callback]:
        for callback in callbacks:
            kind = type(callback)
            ours = kind.__module__.startswith("torchtitan.train.")
            label = _CALLBACK_LABELS.get(kind, "first step" if ours else "callbacks")
            yield from (_During(recorder, label), callback)
        yield _During(recorder, "first step")

    def step(engine: Engine, *args: Any, **options: Any) -> StepResult:
        if engine.progress.step:
            recorder.during = "last step"
            engine.progress.step = config.training.steps - 1
        result = train_step(engine, *args, **options)
        result.stop = False  # the host has read a made-up value
        return result

    run = trainer.Trainer(
        config,
        setup,
        arrange=lambda callbacks: tuple(with_labels(callbacks)),
        builders=Builders(
            connect=lambda *_: start_group(world, recorder.record.rank),
            mesh=aside(build_mesh),
            data=blank_data,
            models=aside(
                partial(
                    parallelize,
                    fill=lambda model, *_: take_fake_memory(mode, model),
                    splits=partial(unequal_splits, recorder),
                    modules_of=partial(few_modules, setup, layers),
                )
            ),
            storage=NoFiles(),
        ),
        device=torch.device("cpu"),
    )
    recorder.during = "first step"
    with replaced(trainer, train_step=step):
        run.train()
    if run.checkpointer.config.enable:
        recorder.during = "resume"
        restore(run.checkpointer, run.state)
    recorder.during = "end"
    run.close()


_CALLBACK_LABELS: dict[type[Callback], str] = {
    Report: "report",
    Validate: "validation",
    Save: "save",
}
"""Labels of callbacks in the report; a user's callback has the label `callbacks`."""


class _During(Callback):
    """Names the part of the rehearsal that begins after a step."""

    def __init__(self, recorder: Recorder, label: str):
        self.recorder = recorder
        self.label = label

    def after_step(self, run: Run, result: StepResult) -> None:
        self.recorder.during = self.label
