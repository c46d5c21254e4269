"""Replacements for parts of the trainer: fewer layers, made-up sizes of exchanges, rows without
content, and a checkpoint storage without files.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from torchtitan.checkpoint.backend import Storage
from torchtitan.checkpoint.format.index import Index, IndexedTensor, dtype_name, render_index
from torchtitan.checkpoint.format.manifest import (
    FORMAT,
    CheckpointInfo,
    FileEntry,
    Manifest,
    RankTotals,
    render,
    validate,
)
from torchtitan.checkpoint.load import Reader
from torchtitan.checkpoint.writer import LocalPlan, local_plan
from torchtitan.config.derive import validation_rows
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch
from torchtitan.data.read.positions import (
    DataFingerprint,
    DataPosition,
    DataState,
    SharesState,
    SourcePosition,
)
from torchtitan.parallel.pipeline.pipeline import stage_modules
from torchtitan.parallel.pipeline.split import PipelinePlan
from torchtitan.tools.rehearsal.fake import aside
from torchtitan.tools.rehearsal.recorder import Recorder
from torchtitan.train.preflight import Setup

# ---- layers


def few_modules(
    setup: Setup, layers: int, stages: PipelinePlan | None, pp_rank: int
) -> list[tuple[str, ...] | None]:
    """The modules of a rank's stages, as `stage_modules` names them, with at most `layers` layers
    each: the first ones and the last.
    """
    every = tuple(setup.spec.module_flops(setup.args, 1))
    modules_of_stages: list[tuple[str, ...] | None] = []
    for modules in stage_modules(stages, pp_rank):
        modules = modules or every
        names = [name for name in modules if name.startswith("layers.")]
        omitted = names[layers - 1 : -1]
        modules_of_stages.append(tuple(name for name in modules if name not in omitted))
    return modules_of_stages


# ---- exchanges


def unequal_splits(
    recorder: Recorder, sent: Tensor, received: Tensor, rows: int
) -> tuple[list[int], list[int]]:
    """Unequal numbers of rows that each rank sends to each other; both ends compute the same."""
    ranks = len(sent)
    groups = recorder.record.groups
    group = next((group for group in groups if group.description == "ep"), groups[0])
    group_rank = group.ranks.index(recorder.record.rank)

    def rows_of(source: int, target: int) -> int:
        shift = (target - source) % ranks
        share = rows // ranks
        return share + (shift < rows % ranks) + ((shift == 1) - (shift == 0) if share else 0)

    return [rows_of(group_rank, other) for other in range(ranks)], [
        rows_of(other, group_rank) for other in range(ranks)
    ]


# ---- data


class _Loader:
    """Replaces the data of a rank: rows without content."""

    is_ready = True

    def __init__(self, config: Config, section: Any, rows: int, sources: Sequence[str]):
        self.rows = rows
        self.count = section.global_batch_size
        self.length = section.seq_len
        self.sources = sources
        self.name = "no data"
        self.fingerprint = DataFingerprint(sources={}, tokenizer="", seq_len=self.length, seed=0)
        self.record = SimpleNamespace(add_validation_set=lambda _: None, lists=lambda: b"{}")
        positions = {
            name: SourcePosition(contents="", rows=1, tokens=self.length) for name in sources
        }
        self.start = DataPosition(
            step=1, shares=SharesState(weights={}, rows=0, counts={}), sources=positions
        )

    def __iter__(self) -> Iterator[StepBatch]:
        while True:
            yield self.blank()

    def blank(self) -> StepBatch:
        tokens = torch.empty(self.rows, self.length, dtype=torch.int64)
        sources = torch.empty(self.rows, dtype=torch.int64)
        return StepBatch(
            tokens,
            tokens.clone(),
            self.start,
            self.count,
            sources=sources,
            epochs=[0.0] * len(self.sources),
        )

    def stage_after(self, _: Any) -> int:
        return 0

    def skip_counts(self, _: Any) -> Any:
        return Counter()

    def check_enough(self, *_: Any, **__: Any) -> None: ...

    def local_state(self, position: DataPosition) -> DataState:
        return DataState(
            step=position.step,
            shares=position.shares,
            sources=position.sources,
            fingerprint=self.fingerprint,
        )

    def seek(self, *_: Any) -> None: ...

    def begin(self, *_: Any) -> None: ...

    def close(self) -> None: ...


def blank_data(config: Config, key: str, _: Any, share: tuple[int, int] = (0, 1), **__: Any) -> Any:
    section = getattr(config, key)
    rows = validation_rows(config)
    if key == "training":
        size = section.local_batch_size
        rows = -(-section.global_batch_size // (share[1] * size)) * size
    return _Loader(config, section, rows, [source.name for source in config.training.sources])


# ---- checkpoints


class NoFiles(Storage):
    """Stands for the storage of checkpoints: keeps the last save's manifest and this rank's index;
    reading leaves tensors as they are.
    """

    def __init__(self) -> None:
        self.saved_steps: list[int] = []
        self.manifest = b""
        self.index = b""

    def steps(self, folder: Path, *, abandoned: bool = False) -> list[int]:
        return [] if abandoned else self.saved_steps

    def manifest_bytes(self, path: Path) -> bytes:
        return self.manifest

    def sees(self, path: Path, manifest: bytes) -> bool:
        return True  # each rank has its own manifest

    def index_bytes(self, path: Path, manifest: Manifest) -> bytes:
        return self.index

    def reader(self, path: Path, manifest: Manifest, index: bytes | None) -> Reader:
        """Uses this rank's index, because rank 0's lacks the tensors of other pipeline stages."""
        return _NullReader(path, Index(path, manifest, self.index))

    def writer(self, path: Path, info: CheckpointInfo, *_: Any, **__: Any) -> "_NullWriter":
        return _NullWriter(self, info)


class _NullWriter:
    """Plans a save as each rank does, and keeps what it plans."""

    def __init__(self, storage: NoFiles, info: CheckpointInfo):
        self.storage = storage
        self.info = info

    def begin(self) -> int:
        return 0

    def plan(self, planner: DefaultSavePlanner, rank: int, world: int, pp_degree: int) -> LocalPlan:
        plan: LocalPlan = aside(local_plan)(planner, rank, world, pp_degree)
        self.storage.index = render_index(
            {
                key: IndexedTensor(
                    dtype=dtype_name(value.dtype), size=tuple(value.shape), layout=plan.layouts[key]
                )
                for key, value in planner.state_dict.items()
            }
        )
        manifest = {
            **dict(self.info),
            "format": FORMAT,
            "saved": "",
            "parameters": 0,
            "tensor_bytes": {},
            "files": {".metadata": FileEntry(bytes=0, crc32=0)},
            "save": f"{0:016x}",
            "written": RankTotals(ranks=world, files=world, bytes=0),
        }
        self.storage.manifest = render(validate(Manifest, manifest))
        self.storage.saved_steps = [self.info.step]
        return plan

    def write(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def finish(self, *_: Any) -> None: ...


class _NullReader(Reader):
    """Leaves the tensors that it would read as they are."""

    def check_files(self, *_: Any, **__: Any) -> None: ...

    def fill(self, state: dict[str, Any]) -> None: ...
