"""Runs the trainer of one rank on the fake process group: a step, its report, a validation, a save,
a resume, the end.

It is the code of a run, from the first process group to the last barrier. Replaced are the network,
the memory, the data (rows without content) and the files of checkpoints.
"""

import logging
import math
import pickle
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import LoadPlanner, SavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future

import torchtitan.train
from torchtitan.checkpoint import resume as resuming
from torchtitan.checkpoint.index import render_index
from torchtitan.checkpoint.load import Reader
from torchtitan.checkpoint.save import CommittingWriter
from torchtitan.config.derive import axis_degrees, gradient_accumulation_steps, validation_rows
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch
from torchtitan.data.positions import DataFingerprint, DataPosition, SharesState, SourcePosition
from torchtitan.health.rank_dumps import is_library, where
from torchtitan.parallel import expert, parallelize, pipeline
from torchtitan.parallel.mesh import build_mesh
from torchtitan.tools.planner.fake import aside, no_network, start_group, take_fake_memory
from torchtitan.tools.rehearsal.events import Record
from torchtitan.tools.rehearsal.network import recording
from torchtitan.tools.rehearsal.recorder import EndlessLoopError, Recorder
from torchtitan.train import restore
from torchtitan.train.build import build
from torchtitan.train.built_in import Report, Save
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.evaluations import Validate
from torchtitan.train.preflight import Setup, preflight
from torchtitan.train.restore import RunState
from torchtitan.train.step import StepResult
from torchtitan.train.trainer import Trainer
from torchtitan.utils import activity as phase

BATCHES = 3
"""Batches that run of an accumulated step, or of a validation: the first, one in the middle, the
last.
"""


def rehearse_rank(
    config: Config,
    world: int,
    rank: int,
    *,
    layers: int | None,
    large: bool,
    broadcasts: list[Any] | None,
) -> Record:
    """Run one rank in this process, which can't run another one afterwards.

    Args:
        config: derived and validated for `world` ranks.
        layers: of each stage that run; None: all.
        large: of a rank's own values, the host reads large ones.
        broadcasts: objects that rank 0 broadcast in its own rehearsal; None on rank 0.
    """
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with TemporaryDirectory(prefix="rehearsal-") as folder:
        config = rehearsed(config, world, folder)
        setup = preflight(config, output=False)
        recorder = Recorder(rank, axis_degrees(config.parallelism), large=large)
        with (
            no_network() as mode,
            recording(recorder, broadcasts),
            _replaced(setup, recorder, layers),
        ):
            try:
                with mode, recorder:
                    _run(config, setup, world, recorder, mode)
            except EndlessLoopError as loop:
                recorder.record.loop = str(loop)
            except Exception as error:
                frames = [
                    (f.filename, f.lineno, f.name)
                    for f in traceback.extract_tb(error.__traceback__)
                ][::-1]
                frames = [
                    f
                    for f in frames
                    if "torchtitan/tools/rehearsal/" not in f[0] and not is_library(f[0])
                ] or frames
                recorder.record.error = (
                    f"{type(error).__name__}: {error}".splitlines()[0] + f", at {where(frames)}"
                )
    recorder.record.exchanges = phase.last_exchanges()
    recorder.record.cpu_seconds = time.process_time()
    recorder.record.memory = _most_memory()
    return recorder.record


def rehearsed(
    config: Config,
    world: int,
    folder: str,
) -> Config:
    """The configuration of a rehearsal: one step, after which everything that a run does is due."""
    training = config.training
    degrees = axis_degrees(config.parallelism)
    rows = training.local_batch_size * degrees["dp_replicate"] * degrees["dp_shard"]
    changes: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": folder},
        "model": {"converters": []},
        "compile": {"enable": False},
        "training": {
            "global_batch_size": rows * min(gradient_accumulation_steps(config), BATCHES),
            "steps": 1,
            "document_mask": False,
            "enable_cpu_offload": False,
            "stages": [],
        },
        "metrics": {
            "log_freq": 1,
            "sinks": [],
            "enable_tensorboard": False,
            "enable_wandb": False,
        },
        "notifications": {"webhook_env": "", "command": []},
        "validation": {
            "freq": 1,
            "steps": _at_most(config.validation.steps),
            "sets": [
                one.model_copy(update={"steps": _at_most(one.steps)})
                for one in config.validation.sets
            ],
        },
        "checkpoint": {
            "interval": 1,
            "folder": "checkpoint",
            "async_mode": "disabled",
            "last_save_model_only": False,
            "last_save_in_hf": False,
            "initial_load_path": None,
            "initial_load_in_hf": False,
        },
        "guard": {"weight_hash_freq": min(1, config.guard.weight_hash_freq)},
        "profiling": {"enable_profiling": False, "enable_memory_snapshot": False},
        "comm": {"trace_buf_size": 0},
        "eval": {"enable": False},
        "sampling": {"prompts": []},
    }
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=values)
            for name, values in changes.items()
        }
    )


def _at_most(steps: int | None) -> int | None:
    """Batches of a validation that run; -1 would be all."""
    return steps if steps is None or 0 <= steps < BATCHES else BATCHES


def _most_memory() -> int:
    """Bytes that this process held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _run(
    config: Config,
    setup: Setup,
    world: int,
    recorder: Recorder,
    mode: FakeTensorMode,
) -> None:
    def connect(*_: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            start_group(world, recorder.record.rank)

    def fill(model: nn.Module, *_: Any) -> None:
        take_fake_memory(mode, model)

    def named(callbacks: tuple[Callback, ...]) -> Iterator[Callback]:
        for callback in callbacks:
            kind = type(callback)
            ours = kind.__module__.startswith(f"{torchtitan.train.__name__}.")
            part = _PARTS.get(kind, "first step" if ours else "callbacks")
            yield from (_During(recorder, part), callback)
        yield _During(recorder, "first step")

    run = Trainer(
        config,
        setup,
        arrange=lambda callbacks: tuple(named(callbacks)),
        connect=connect,
        build=partial(
            build,
            make_mesh=aside(build_mesh),
            make_data=_data,
            make_models=aside(partial(parallelize.parallelize, fill=fill)),
        ),
        device=torch.device("cpu"),
    )
    recorder.during = "first step"
    run.train()
    recorder.record.parts = _parts(run.checkpointer.trained.tensors())
    recorder.record.metadata = _metadata_bytes()
    if run.checkpointer.config.enable:
        recorder.during = "resume"
        with _stored(run.checkpointer):
            restore.restore(config, setup, run.parts.models, run.checkpointer, run.state)
    recorder.during = "end"
    run.close()


_PARTS: dict[type[Callback], str] = {
    Report: "report",
    Validate: "validation",
    Save: "save",
}
"""Callbacks that the rehearsal names; the user's are `callbacks`."""


class _During(Callback):
    """Names the part of the rehearsal that begins after a step."""

    def __init__(self, recorder: Recorder, part: str):
        self.recorder = recorder
        self.part = part

    def after_step(self, run: Run, result: StepResult) -> None:
        self.recorder.during = self.part


# ---- what is replaced


@contextmanager
def _replaced(
    setup: Setup,
    recorder: Recorder,
    layers: int | None,
) -> Iterator[None]:
    """Fewer layers, sizes of exchanges without data, and checkpoints without files."""

    def stage_modules(*args: Any) -> list[Any]:
        stages = [
            stage or tuple(setup.spec.module_flops(setup.args, 1)) for stage in all_modules(*args)
        ]
        kept = stages if layers is None else [_fewer(stage, layers) for stage in stages]
        run, of = (
            sum(name.startswith("layers.") for stage in part for name in stage)
            for part in (kept, stages)
        )
        recorder.record.layers = run, of
        return kept

    all_modules = pipeline.stage_modules
    with ExitStack() as stack:
        for module, name, replacement in (
            (parallelize, "stage_modules", stage_modules),
            (expert, "_splits", partial(_splits, recorder)),
            (CommittingWriter, "write_data", _write_nothing),
            (CommittingWriter, "finish", lambda *_, **__: None),
            (Reader, "read_data", _read_nothing),
            (
                dcp.DefaultSavePlanner,
                "create_local_plan",
                aside(dcp.DefaultSavePlanner.create_local_plan),
            ),
            (
                dcp.DefaultLoadPlanner,
                "create_local_plan",
                aside(dcp.DefaultLoadPlanner.create_local_plan),
            ),
            (dcp.DefaultSavePlanner, "create_global_plan", lambda _, plans: (plans, Metadata({}))),
        ):
            stack.enter_context(patch.object(module, name, replacement))
        yield


def _fewer(modules: tuple[str, ...], layers: int) -> tuple[str, ...]:
    """The modules of a stage, of which at most `layers` are layers: the first ones, and the
    last.
    """
    own = [name for name in modules if name.startswith("layers.")]
    kept = {*own[: layers - 1], *own[-1:]}
    return tuple(name for name in modules if name in kept or not name.startswith("layers."))


def _splits(
    recorder: Recorder,
    sent: Tensor,
    received: Tensor,
    rows: int,
) -> tuple[list[int], list[int]]:
    """Unequal numbers of rows that each rank sends to each other, the same in the eyes of both."""
    ranks = len(sent)
    groups = recorder.record.groups
    group = next((group for group in groups if group.description == "ep"), groups[0])
    own = group.ranks.index(recorder.record.rank)

    def rows_of(source: int, target: int) -> int:
        shift = (target - source) % ranks
        share = rows // ranks
        return share + (shift < rows % ranks) + ((shift == 1) - (shift == 0) if share else 0)

    return [rows_of(own, other) for other in range(ranks)], [
        rows_of(other, own) for other in range(ranks)
    ]


class _Loader:
    """Replaces the data of a rank: rows without content."""

    def __init__(
        self,
        config: Config,
        section: Any,
        rows: int,
        sources: Sequence[str],
    ):
        self.rows = rows
        self.count = section.global_batch_size
        self.length = section.seq_len
        self.sources = sources
        self.name = "no data"
        self.fingerprint = DataFingerprint(
            sources={},
            tokenizer="",
            seq_len=self.length,
            seed=0,
        )
        self.record = SimpleNamespace(
            add_held_out=lambda _: None,
            lists=lambda: b"{}",
        )
        read = {name: SourcePosition(contents="", rows=1) for name in sources}
        self.start = DataPosition(
            step=1,
            shares=SharesState(
                weights={},
                rows=0,
                counts={},
            ),
            sources=read,
        )

    def __iter__(self) -> Iterator[StepBatch]:
        while True:
            yield self.blank()

    def blank(self) -> StepBatch:
        tokens = torch.empty(self.rows, self.length, dtype=torch.int64)
        sources = torch.empty(self.rows, dtype=torch.int64)
        return StepBatch(
            tokens, tokens.clone(), self.start, self.count, sources, [0.0] * len(self.sources)
        )

    def skipped(self, _: Any) -> Any:
        return Counter()

    def check_enough(self, *_: Any) -> None: ...

    def state(self, parts: Any) -> DataPosition:
        return self.start

    def seek(self, *_: Any) -> None: ...

    def begin(self, *_: Any) -> None: ...

    def close(self) -> None: ...


def _data(config: Config, key: str, _: Any, share: tuple[int, int] = (0, 1), **__: Any) -> Any:
    section = getattr(config, key)
    size = section.local_batch_size if key == "training" else validation_rows(config)
    count = section.global_batch_size if key == "training" else size * share[1]
    rows = -(-count // (share[1] * size)) * size
    return _Loader(config, section, rows, [source.name for source in config.training.sources])


def _write_nothing(
    writer: Any,
    plan: Any,
    planner: SavePlanner,
) -> Future[list[Any]]:
    future: Future[list[Any]] = Future()
    future.set_result([])
    return future


def _read_nothing(
    reader: Any,
    plan: Any,
    planner: LoadPlanner,
) -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


# ---- checkpoints


def _parts(tensors: dict[str, Any]) -> tuple[int, int]:
    """As `Record.parts`."""
    counts = [0, 0]
    for name, value in flatten_state_dict(tensors)[0].items():
        parts = 1
        if isinstance(value, DTensor):
            sizes = zip(value.device_mesh.shape, value.placements, strict=True)
            parts = math.prod(size for size, placement in sizes if not placement.is_replicate())
        counts[".layers." not in name] += min(parts, max(1, value.numel()))
    return counts[0], counts[1]


def _metadata_bytes() -> float:
    """Bytes for each part of `.metadata` and `tensors.json`, measured on a tensor in many parts."""
    name = "optimizer.layers.10.attention.wo.weight.exp_avg"
    size = 2**24
    parts = 256
    chunks = [
        ChunkStorageMetadata(torch.Size([size * i, 0]), torch.Size([size, 2**14]))
        for i in range(parts)
    ]
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([size * parts, 2**14]), chunks)
    places = {
        MetadataIndex(name, chunk.offsets, i): _StorageInfo(f"__{i}_0.distcp", size * i, size)
        for i, chunk in enumerate(chunks)
    }
    metadata = Metadata({name: entry}, storage_data=places)
    sums = dict.fromkeys(places, 2**32 - 1)
    return (len(pickle.dumps(metadata)) + len(render_index(metadata, sums))) / parts


@contextmanager
def _stored(checkpointer: Any) -> Iterator[None]:
    """A checkpoint of step 1, which holds what this rank has."""
    state = flatten_state_dict(checkpointer.trained.tensors())[0]
    found = {}
    for name, value in state.items():
        properties = TensorProperties(dtype=value.dtype)
        whole = torch.Size([0] * value.dim())
        chunk = ChunkStorageMetadata(whole, value.size())
        found[name] = TensorStorageMetadata(properties, value.size(), [chunk])
    metadata = Metadata(found, storage_data={})
    manifest = SimpleNamespace(
        step=1,
        model_only=False,
        tensor_bytes=checkpointer.trained.tensors(),
    )
    manifest.state = lambda: None
    manifest.model_dump = dict
    with ExitStack() as stack:
        for module, name, replacement in (
            (resuming, "committed_steps", lambda *_: [1]),
            (resuming, "read_manifest", lambda *_: manifest),
            (resuming, "index_bytes", lambda *_: b""),
            (resuming, "read_index", lambda *_: metadata),
            (Reader, "check_files", lambda *_: None),
            (resuming, "manifest_bytes", lambda *_: b""),
            (Reader, "read_metadata", lambda *_, **__: metadata),
            (RunState, "load", lambda *_: None),
        ):
            stack.enter_context(patch.object(module, name, replacement))
        yield
