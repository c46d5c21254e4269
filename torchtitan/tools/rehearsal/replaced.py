"""What a rehearsal replaces: layers that don't run, sizes of exchanges, the data, and the files of
checkpoints.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import LoadPlanner, SavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan.checkpoint import resume as resuming
from torchtitan.checkpoint import save as saving
from torchtitan.checkpoint.index import TensorPlaces, dtype_name, render_index
from torchtitan.checkpoint.layout import shares
from torchtitan.checkpoint.load import Reader
from torchtitan.checkpoint.writer import CommittingWriter
from torchtitan.config.derive import validation_rows
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch
from torchtitan.data.positions import DataFingerprint, DataPosition, SharesState, SourcePosition
from torchtitan.parallel import expert, parallelize, pipeline
from torchtitan.tools.planner.fake import aside
from torchtitan.tools.rehearsal.recorder import Recorder
from torchtitan.train.preflight import Setup
from torchtitan.train.restore import RunState


@contextmanager
def replaced(setup: Setup, recorder: Recorder, layers: int | None) -> Iterator[None]:
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
            (saving, "own_plan", aside(saving.own_plan)),
            (CommittingWriter, "write_data", _write_nothing),
            (CommittingWriter, "describe", lambda *_: (0, 0)),
            (CommittingWriter, "finish", lambda *_, **__: None),
            (Reader, "locate", lambda *_: None),
            (Reader, "read_data", _read_nothing),
            (
                dcp.DefaultLoadPlanner,
                "create_local_plan",
                aside(dcp.DefaultLoadPlanner.create_local_plan),
            ),
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
    recorder: Recorder, sent: Tensor, received: Tensor, rows: int
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

    def __init__(self, config: Config, section: Any, rows: int, sources: Sequence[str]):
        self.rows = rows
        self.count = section.global_batch_size
        self.length = section.seq_len
        self.sources = sources
        self.name = "no data"
        self.fingerprint = DataFingerprint(sources={}, tokenizer="", seq_len=self.length, seed=0)
        self.record = SimpleNamespace(add_held_out=lambda _: None, lists=lambda: b"{}")
        read = {name: SourcePosition(contents="", rows=1, tokens=self.length) for name in sources}
        self.start = DataPosition(
            step=1, shares=SharesState(weights={}, rows=0, counts={}), sources=read
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

    def stage_after(self, _: Any) -> int:
        return 0

    def skipped(self, _: Any) -> Any:
        return Counter()

    def check_enough(self, *_: Any) -> None: ...

    def own_state(self, position: DataPosition) -> DataPosition:
        return position

    def seek(self, *_: Any) -> None: ...

    def begin(self, *_: Any) -> None: ...

    def close(self) -> None: ...


def blank_data(config: Config, key: str, _: Any, share: tuple[int, int] = (0, 1), **__: Any) -> Any:
    section = getattr(config, key)
    size = section.local_batch_size if key == "training" else validation_rows(config)
    count = section.global_batch_size if key == "training" else size * share[1]
    rows = -(-count // (share[1] * size)) * size
    return _Loader(config, section, rows, [source.name for source in config.training.sources])


def _write_nothing(writer: Any, plan: Any, planner: SavePlanner) -> Future[list[Any]]:
    future: Future[list[Any]] = Future()
    future.set_result([])
    return future


def _read_nothing(reader: Any, plan: Any, planner: LoadPlanner) -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


@contextmanager
def stored_checkpoint(checkpointer: Any) -> Iterator[None]:
    """A checkpoint of step 1, which holds what this rank has."""
    state = flatten_state_dict(checkpointer.trained.tensors())[0]
    found = {}
    ranks = range(dist.get_world_size() // checkpointer.trained.places)
    with _disable_current_modes():
        layouts = shares(state, dist.get_rank(), ranks)[0]
    index = render_index(
        {
            name: TensorPlaces(
                dtype=dtype_name(value.dtype), size=tuple(value.size()), layout=layouts[name].layout
            )
            for name, value in state.items()
        }
    )
    for name, value in state.items():
        properties = TensorProperties(dtype=value.dtype)
        whole = torch.Size([0] * value.dim())
        chunk = ChunkStorageMetadata(whole, value.size())
        found[name] = TensorStorageMetadata(properties, value.size(), [chunk])
    metadata = Metadata(found, storage_data={})
    manifest = SimpleNamespace(
        step=1, model_only=False, tensor_bytes=checkpointer.trained.tensors()
    )
    manifest.state = lambda: None
    manifest.model_dump = dict
    with ExitStack() as stack:
        for module, name, replacement in (
            (resuming, "committed_steps", lambda *_: [1]),
            (resuming, "read_manifest", lambda *_: manifest),
            (resuming, "index_bytes", lambda *_: index),
            (resuming, "Index", lambda *_: SimpleNamespace(metadata=metadata)),
            (Reader, "check_files", lambda *_: None),
            (resuming, "manifest_bytes", lambda *_: b""),
            (RunState, "load", lambda *_: None),
        ):
            stack.enter_context(patch.object(module, name, replacement))
        yield
