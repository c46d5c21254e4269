"""An exchange of rows in two halves, so that other work runs while rows travel.

    travelling = start(rows, to_ranks, from_ranks, group)
    ...  # work that doesn't need the rows
    rows = finish(travelling)

The backward has the same shape: the gradient of `finish` starts the reverse exchange, and the
gradient of `start` ends it. Autograd runs backwards in reverse order, so the backward of the work
between the two again runs between them.

Shapes: n rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor

from torchtitan.utils.activity import note_exchange


@dataclass
class _Exchange:
    to_ranks: Sequence[int]
    """Number of rows sent to each rank of `group`."""
    from_ranks: Sequence[int]
    """Number of rows received from each rank."""
    group: dist.ProcessGroup
    rows: Tensor | None = None
    """Rows in transit, or their gradient. They bypass autograd, where a gradient has the shape of
    its tensor; here a rank sends and receives different numbers of rows.
    """

    def start(self, rows: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> None:
        # The hang diagnosis reads from the note which ranks wait for which.
        note_exchange(dist.get_process_group_ranks(self.group), to_ranks, from_ranks)
        self.rows = torch.ops._c10d_functional.all_to_all_single(
            rows.contiguous(), from_ranks, to_ranks, self.group.group_name
        )

    def finish(self) -> Tensor:
        rows = wait_tensor(self.rows)
        self.rows = None
        return rows


Transfer = tuple[Tensor, _Exchange]
"""Rows between `start` and `finish`. The tensor is empty, and links the two in autograd's graph."""


def start(
    rows: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """Begin to send consecutive `rows` to the ranks of `group`: `[n, dim]`.

    Args:
        to_ranks, from_ranks: number of rows to each rank, and from each.
    """
    exchange = _Exchange(to_ranks, from_ranks, group)
    return _Start.apply(rows, exchange), exchange


def finish(transfer: Transfer) -> Tensor:
    """The rows that have arrived, `[n, dim]`."""
    return _Finish.apply(*transfer)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(rows, exchange.to_ranks, exchange.from_ranks)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.finish(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        exchange.start(gradient, exchange.from_ranks, exchange.to_ranks)
        return gradient.new_empty(0), None
