"""Saves, by all ranks together or by one process.

Uses the planner and the writer of `torch.distributed.checkpoint` (DCP), but not its collectives,
which would send the plans of all ranks through rank 0.
"""

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchtitan.checkpoint.commit import discard
from torchtitan.checkpoint.format.manifest import CheckpointInfo, RankTotals
from torchtitan.checkpoint.load import PhaseError, describe
from torchtitan.checkpoint.writer import CommittingWriter, LocalPlan
from torchtitan.parallel.agree import from_all
from torchtitan.parallel.groups import cpu_group
from torchtitan.utils.errors import FormatBugError

NUMBERS = 4
"""Numbers that ranks exchange after a phase; the first is the number of ranks that failed."""
_TEXT_LENGTH = 1000
"""Maximum number of characters of an error's description."""


class Phases:
    """Runs the phases of a save on all ranks. A phase ends on every rank once all have ended it,
    and fails on every rank if it failed on any.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False):
        """
        Args:
            group: all ranks, with gloo; its timeout bounds the wait for the slowest rank. None:
                `cpu_group`.
            alone: this process saves by itself.
        """
        self.alone = alone or not dist.is_initialized()
        self.group = None if self.alone else group or cpu_group()
        self.rank = 0 if self.alone else dist.get_rank()
        self.world = 1 if self.alone else dist.get_world_size()

    def run(self, action: Callable[[], Sequence[int]]) -> Tensor:
        """Run one phase, by one all-reduce of `NUMBERS` numbers.

        Args:
            action: returns fewer than `NUMBERS` numbers below 2^63.

        Returns:
            The numbers' sums over all ranks, modulo 2^64.

        Raises:
            PhaseError: the phase failed on some rank; every rank raises the same error. If `alone`,
                the cause itself is raised.
        """
        values: Sequence[int] = ()
        cause = None
        try:
            values = action()
        except Exception as error:
            if self.alone:
                raise
            cause = error
        padding = [0] * (NUMBERS - 1 - len(values))
        sums = torch.tensor([int(cause is not None), *values, *padding], dtype=torch.int64)
        if not self.alone:
            dist.all_reduce(sums, group=self.group)
        if cause is not None or sums[0] > 0:
            texts = from_all("" if cause is None else describe(cause)[:_TEXT_LENGTH], self.group)
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
            raise PhaseError(f"rank {rank}: {text}") from cause
        return sums[1:]


class Writer(Protocol):
    """Writes one checkpoint. `CommittingWriter` writes it to a folder."""

    def begin(self) -> int:
        """Prepare to write, on rank 0; returns the number of the save, of 62 bits."""

    def plan(self, planner: DefaultSavePlanner, rank: int, world: int, pp_degree: int) -> LocalPlan:
        """Plan this rank's writes."""

    def write(self, save: str, rank: int, plan: LocalPlan, planner: SavePlanner) -> tuple[int, int]:
        """Write this rank's tensors; returns number and bytes of its files."""

    def finish(self, save: str, totals: RankTotals) -> None:
        """Commit, on rank 0."""


def save(
    state: dict[str, Any] | concurrent.futures.Future[dict[str, Any]],
    open_writer: Callable[[], Writer],
    planner: DefaultSavePlanner | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    pp_degree: int = 1,
    alone: bool = False,
) -> None:
    """Save a checkpoint, on all ranks together.

    Each rank derives its writes without a message. Ranks exchange a few numbers three times: to
    begin, when all have written, and when rank 0 has committed.

    Args:
        state: the tensors by section (`model`, `optimizer`, `ema`) and name, or a future of them.
        group: all ranks, with gloo; None: `cpu_group`.
        pp_degree: pipeline-parallel degree. Ranks at the same position of the pipeline hold the
            same tensors, or shards of them.
        alone: this process saves by itself.

    Raises:
        PhaseError: the save failed on some rank; every rank raises the same error.
    """
    phases = Phases(group, alone=alone)
    rank = phases.rank
    planner = planner or DefaultSavePlanner()
    plans: list[tuple[Writer, LocalPlan]] = []

    def prepare() -> tuple[int, int]:
        writer = open_writer()
        tensors = state.result() if isinstance(state, concurrent.futures.Future) else state
        planner.set_up_planner(tensors, is_coordinator=rank == 0)
        plan = writer.plan(planner, rank, phases.world, pp_degree)
        plans.append((writer, plan))
        return (writer.begin() if rank == 0 else 0), plan.agreement

    number, differences = phases.run(prepare)[:2]
    if differences != 0:
        raise FormatBugError(
            "ranks hold different tensors: this is a bug in torchtitan, please report it"
        )
    ((writer, plan),) = plans
    save_number = f"{int(number):016x}"
    files, size = phases.run(lambda: writer.write(save_number, rank, plan, planner))[:2]

    def finish() -> tuple[()]:
        if rank == 0:
            totals = RankTotals(ranks=phases.world, files=int(files), bytes=int(size))
            writer.finish(save_number, totals)
        return ()

    phases.run(finish)


# ---- copies on the host, for saves in the background


def build_stager(async_mode: str) -> "Stager | None":
    """The stager of `checkpoint.async_mode`; None for `disabled`."""
    if async_mode == "disabled":
        return None
    overlap = async_mode == "async_with_pinned_mem"
    pinned = overlap and torch.cuda.is_available()
    return Stager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=overlap,
            use_non_blocking_copy=pinned,
        )
    )


class Stager(DefaultStager):
    """DCP's stager, with workarounds for three faults of torch 2.11 to 2.15. Ends with `release`,
    not `close`.

    1. Before 2.13, DCP's `close` after each save drops the buffers, so every save allocates them
       again. Remove `close`, `release` and `_drop_buffers` with support for 2.12.
    2. Copies run on a separate stream without waiting for the current one, on which the optimizer's
       step was only enqueued. Remove `stage` once torch waits.
    3. The staging thread always uses the first GPU, and creates a context there. Remove `_stage`
       once the thread uses the rank's device.
    """

    def __init__(self, options: StagingOptions):
        super().__init__(options)
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._drop_buffers = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        if self._staging_stream is not None:
            self._staging_stream.wait_stream(torch.accelerator.current_stream())
        return super().stage(state_dict, **kwargs)

    def _stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        return super()._stage(state_dict, **kwargs)

    def close(self) -> None: ...

    def release(self) -> None:
        """Stop the thread and free the buffers."""
        super().close()
        self._drop_buffers()


# ---- one process, with a piece of a tensor in memory at a time


class LazyPlanner(DefaultSavePlanner):
    """Plans a save of meta tensors, and computes each piece only when it is written."""

    def __init__(self, make_box: Callable[[str, tuple[slice, ...]], Tensor], max_bytes: int):
        super().__init__()
        self.make_box = make_box
        self.max_bytes = max_bytes

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in _rows(item, self.max_bytes)]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        box = tuple(slice(start, start + size) for start, size in ends)
        return self.make_box(write_item.index.fqn, box)


def _rows(item: WriteItem, max_bytes: int) -> Iterator[WriteItem]:
    """An item, cut along its first dimension into items of at most `max_bytes`, or of one row."""
    tensor = item.tensor_data
    assert tensor is not None
    size = tensor.size.numel() * tensor.properties.dtype.itemsize
    if size <= max_bytes:
        yield item
        return
    rows = max(1, int(max_bytes * tensor.size[0] / size))
    for start in range(0, tensor.size[0], rows):
        offsets = torch.Size((start, *(0 for _ in tensor.size[1:])))
        sizes = torch.Size((min(rows, tensor.size[0] - start), *tensor.size[1:]))
        chunk = ChunkStorageMetadata(offsets, sizes)
        index = replace(item.index, offset=offsets)
        data = replace(tensor, chunk=chunk)
        yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def write_streamed(
    final: Path,
    info: CheckpointInfo,
    state: dict[str, Any],
    make_box: Callable[[str, tuple[slice, ...]], Tensor],
    max_bytes: int = 2**25,
) -> None:
    """Write a checkpoint in one process, with one piece of a tensor in memory at a time. A failure
    leaves no files.

    Args:
        final: the checkpoint's folder.
        info: the contents of the manifest, without its files.
        state: the tensors, on the meta device.
        make_box: returns a box of a tensor, by its key and a slice of each dimension.
        max_bytes: size up to which a tensor is computed at once. Larger tensors are computed in
            rows of the first dimension.
    """
    # DCP holds all tensors of a file until it is complete, hence one file per tensor.
    open_writer = partial(CommittingWriter, final, info, file_per_tensor=True)
    try:
        save(state, open_writer, LazyPlanner(make_box, max_bytes), alone=True)
    except BaseException:
        with suppress(Exception):
            discard(final)
        raise
