"""Exchanges of experts' rows whose sizes the host knows in advance, so that it needn't wait for the
device: `parallelism.expert_parallel_exchange = "fixed"`.

Sizes follow from the rows of recent steps, with headroom, and differ from layer to layer. If a step
has more rows than fit, a flag on the device forbids its update, and the step is done again with
exchanges of any size. So no row is lost, and the results are those of counted exchanges: each
expert computes the same rows in the same order.

Shapes: n rows of a rank, r ranks, e experts of each, c slots from one rank to another, m rows of a
rank's experts.

    rows [n, dim], sorted by expert -> slots [r * c, dim], the first ones of each c are used
    -> all-to-all -> rows sorted by expert [m, dim], which end before the last
    -> experts -> slots -> all-to-all -> rows [n, dim]

What is in unused slots and after the last row is a copy of some row. Nothing reads it.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.parallel.collectives import all_reduce
from torchtitan.parallel.room import Room, equal_room, room_for
from torchtitan.utils.logging import logger

_STEPS = 32
"""Recent steps whose largest exchange decides the sizes."""


def to_slots(ends: Tensor, ranks: int, slots: int, rows: int) -> tuple[Tensor, Tensor]:
    """Where rows, sorted by expert, are put before the exchange.

    Args:
        ends: `[r * e]`, the index after each expert's last row.
        slots: c.
        rows: n.

    Returns:
        The row of each slot `[r * c]`, and the slot of each row `[n]`. Rows beyond a rank's slots
        share its last one.
    """
    lasts = ends.view(ranks, -1)[:, -1].long().contiguous()
    firsts = lasts - lasts.diff(prepend=lasts.new_zeros(1))
    row = torch.arange(rows, device=ends.device)
    rank = torch.searchsorted(lasts, row, right=True).clamp_(max=ranks - 1)
    slot = rank * slots + (row - firsts[rank]).clamp_(max=slots - 1)
    source = firsts[:, None] + torch.arange(slots, device=ends.device)
    return source.flatten().clamp_(max=rows - 1), slot


def by_expert(arriving: Tensor, room: Room) -> tuple[Tensor, Tensor, Tensor]:
    """How the slots that arrive are sorted by expert.

    Args:
        arriving: `[r, e]`, rows of each rank for each expert. Those without room don't count.

    Returns:
        The slot of each row `[m]`, the row of each slot `[r * c]`, and the index after each
        expert's last row `[e]` int32.
    """
    ranks, experts = arriving.shape
    device = arriving.device
    bounds = arriving.long().cumsum(1).clamp_(max=room.pair)
    sizes = bounds.diff(dim=1, prepend=bounds.new_zeros(ranks, 1))
    starts = bounds - sizes
    # Rows are sorted by expert, those of an expert by the rank that sent them: cells [e, r].
    cell_ends = sizes.T.flatten().cumsum(0)
    cell_starts = cell_ends - sizes.T.flatten()
    shift = starts + room.pair * torch.arange(ranks, device=device)[:, None]
    shift = shift.T.flatten() - cell_starts
    row = torch.arange(room.rank, device=device)
    cell = torch.searchsorted(cell_ends, row, right=True).clamp_(max=ranks * experts - 1)
    order = (row + shift[cell]).clamp_(max=ranks * room.pair - 1)
    offset = torch.arange(room.pair, device=device).expand(ranks, -1).contiguous()
    expert = torch.searchsorted(bounds, offset, right=True).clamp_(max=experts - 1)
    cell = expert * ranks + torch.arange(ranks, device=device)[:, None]
    slot = torch.arange(ranks * room.pair, device=device)
    place = (slot - shift[cell.flatten()]).clamp_(min=0, max=room.rank - 1)
    ends = cell_ends.view(experts, ranks)[:, -1].clamp(max=room.rank)
    return order, place, ends.to(torch.int32)


class Exchanging(Protocol):
    """The part of a layer's experts that `FixedExchange` sets."""

    room: Room | None
    needed: Tensor | None
    empty: float


class FixedExchange:
    """The sizes of all layers' exchanges: learnt from one step for the next, the same on all ranks.

    The first step, and the first after `forget`, counts rows before it exchanges them.
    """

    def __init__(
        self, layers: Mapping[int, Exchanging], n_layers: int, headroom: float, device: torch.device
    ):
        """
        Args:
            layers: the experts of this rank's layers.
            n_layers: blocks of the whole model.
            headroom: `parallelism.expert_parallel_headroom`.
        """
        self.layers = layers
        self.headroom = headroom
        self.redone = 0
        """Steps of this start that were done again."""
        self._empty: list[float] = []
        """Of each step since the last `take` that didn't count, the mean share of this rank's slots
        without a row.
        """
        self._needed = torch.zeros(n_layers, 2, dtype=torch.int64, device=device)
        for layer, experts in layers.items():
            experts.needed = self._needed[layer]
        self._rooms: list[Room] | None = None
        """Of every layer of the model; None: rows are counted."""
        self._limits = torch.zeros_like(self._needed)
        self._recent: deque[list[Room]] = deque(maxlen=_STEPS)
        self._measured = self._needed
        self._last: list[Room] = []

    @property
    def fixed(self) -> bool:
        """The running step's exchanges have fixed sizes."""
        return self._rooms is not None

    def forget(self) -> None:
        """Count rows in the next step, which has another number of them."""
        self._recent.clear()
        self._set(None)

    def assume(self, rows: int, ranks: int) -> None:
        """Make room for equal loads, of `rows` from each of `ranks` ranks."""
        self._set([equal_room(rows, ranks, self.headroom)] * len(self._needed))

    def _set(self, rooms: list[Room] | None) -> None:
        if rooms is not None and rooms != self._rooms:
            self._limits = torch.tensor(rooms).to(self._limits)
        self._rooms = rooms
        for layer, experts in self.layers.items():
            experts.room = None if rooms is None else rooms[layer]

    # ---- within a step

    def measure(self) -> None:
        """Find out how many rows the exchanges of the step needed on all ranks. Called by all, once
        after the backward of its last batch; the host doesn't wait.
        """
        self._measured = self._needed.clone()
        self._needed.zero_()
        all_reduce(self._measured, dist.group.WORLD, dist.ReduceOp.MAX)

    @property
    def measured(self) -> Tensor:
        """`[2 * layers]` fp64, what `measure` found, for `read`."""
        return self._measured.double().flatten()

    @property
    def overflow(self) -> Tensor | None:
        """Whether some rows had no room, a scalar on the device; None if they were counted."""
        return (self._measured > self._limits).any() if self.fixed else None

    def read(self, measured: Sequence[float]) -> None:
        """Take what the host has read of `measured`."""
        pairs = zip(measured[::2], measured[1::2], strict=True)
        self._last = [Room(int(pair), int(rank)) for pair, rank in pairs]

    @property
    def overflowed(self) -> bool:
        """Whether some rows had no room, after `read`."""
        return self._too_small() is not None

    def _too_small(self) -> int | None:
        """The first layer with more rows than room."""
        for layer, (needed, room) in enumerate(zip(self._last, self._rooms or (), strict=False)):
            if needed.pair > room.pair or needed.rank > room.rank:
                return layer
        return None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Do the step that overflowed again with exchanges of any size."""
        self.redone += 1
        self._explain()
        rooms = self._rooms
        self._set(None)
        yield
        self._set(rooms)

    def learn(self) -> None:
        """Choose the sizes of the next step, after `read`."""
        if self.fixed and self.layers:
            self._empty.append(fmean(x.empty for x in self.layers.values()))
        self._recent.append(self._last)
        self._set([self._room(layer) for layer in range(len(self._last))])

    def take(self) -> dict[str, float]:
        """What a record says: steps done again, and empty slots since the last call."""
        empty = self._empty
        self._empty = []
        said: dict[str, float] = {"redone_steps": self.redone}
        return said | ({"empty_slots_pct": 100 * fmean(empty)} if empty else {})

    def _room(self, layer: int) -> Room:
        recent = [step[layer] for step in self._recent]
        pair, rank = (max(sizes) for sizes in zip(*recent, strict=True))
        return Room(room_for(pair, self.headroom), room_for(rank, self.headroom))

    def _explain(self) -> None:
        """Log that a step is done again: for the 1st, the 10th, the 100th, ... time."""
        if not math.log10(self.redone).is_integer():
            return
        layer = self._too_small()
        assert layer is not None
        assert self._rooms is not None
        needed = self._last[layer]
        room = self._rooms[layer]
        logger.info(
            f"A step is done again (time {self.redone} of this start): layer {layer} sends "
            f"{needed.pair} rows from one rank to another and {needed.rank} to one rank, with room "
            f"for {room.pair} and {room.rank}. If this is frequent, raise "
            "parallelism.expert_parallel_headroom or moe.balance_bias_rate"
        )
