"""Runs the trainer of one rank on the fake process group: a step, its report, a validation, a save,
a resume, the end.

The code of a run is unchanged, from the first process group to the last barrier. Only the network,
the memory, the data (rows without content) and the storage of checkpoints are replaced.
"""

import logging
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.util import get_temp_dir
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchtitan.train
from torchtitan.config.derive import axis_degrees
from torchtitan.config.sections.schema import Config
from torchtitan.health.rank_dumps import where
from torchtitan.parallel.mesh import build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.tools.rehearsal.coverage import rehearsal_config
from torchtitan.tools.rehearsal.events import RankRecord
from torchtitan.tools.rehearsal.fake import aside, no_network, start_group, take_fake_memory
from torchtitan.tools.rehearsal.network import recording
from torchtitan.tools.rehearsal.recorder import EndlessLoopError, Recorder, is_hidden
from torchtitan.tools.rehearsal.replaced import NoFiles, blank_data, few_modules, unequal_splits
from torchtitan.train.build import Builders
from torchtitan.train.built_in import Report, Save
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.evaluations import Validate
from torchtitan.train.preflight import Setup, preflight
from torchtitan.train.restore import restore
from torchtitan.train.state import StepResult
from torchtitan.train.trainer import Trainer
from torchtitan.utils.activity import last_exchanges


def rehearse_rank(
    config: Config,
    world: int,
    rank: int,
    *,
    layers: int | None,
    values: int,
    broadcasts: list[Any] | None,
) -> RankRecord:
    """Run one rank in this process, which can't run another one afterwards.

    Args:
        config: derived and validated for `world` ranks.
        layers: number of layers of each stage to run; None: all.
        values: index in `VALUES` of what the host reads of the rank's own tensors.
        broadcasts: objects that rank 0 broadcast in its rehearsal; None on rank 0.
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
    recorder.record.cpu_seconds = time.process_time()
    recorder.record.memory = _peak_memory()
    return recorder.record


def record(
    recorder: Recorder, broadcasts: list[Any] | None, work: Callable[[FakeTensorMode], None]
) -> None:
    """Run `work` as the recorder's rank without a network, and record what it does and how it ends.

    Args:
        broadcasts: objects that rank 0 broadcast; None on rank 0.
    """
    with no_network() as mode, recording(recorder, broadcasts):
        try:
            with mode, recorder:
                work(mode)
        except EndlessLoopError as loop:
            recorder.record.loop = str(loop)
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
    return f"{text}, at {where(run_frames or frames)}"


def _peak_memory() -> int:
    """Peak memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _run(
    config: Config,
    setup: Setup,
    world: int,
    recorder: Recorder,
    mode: FakeTensorMode,
    layers: int | None,
) -> None:
    def with_labels(callbacks: tuple[Callback, ...]) -> Iterator[Callback]:
        for callback in callbacks:
            kind = type(callback)
            ours = kind.__module__.startswith(f"{torchtitan.train.__name__}.")
            label = _CALLBACK_LABELS.get(kind, "first step" if ours else "callbacks")
            yield from (_During(recorder, label), callback)
        yield _During(recorder, "first step")

    run = Trainer(
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
