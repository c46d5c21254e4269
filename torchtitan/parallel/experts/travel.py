"""An exchange of rows in two halves, so that other work runs while rows travel.

    travelling = start(rows, sent, received, group)
    ...  # what doesn't need the rows
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
    sent: Sequence[int]
    """Number of rows sent to each rank of `group`."""
    received: Sequence[int]
    """Number of rows received from each rank."""
    group: dist.ProcessGroup
    rows: Tensor | None = None
    """Rows in transit, or their gradient. They bypass autograd, where a gradient has the shape of
    its tensor; but a rank sends another number of rows than it receives.
    """

    def start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        # The note tells the hang diagnosis which ranks wait for which.
        note_exchange(dist.get_process_group_ranks(self.group), sent, received)
        self.rows = torch.ops._c10d_functional.all_to_all_single(
            rows.contiguous(), received, sent, self.group.group_name
        )

    def finish(self) -> Tensor:
        arrived = wait_tensor(self.rows)
        self.rows = None
        return arrived


Travelling = tuple[Tensor, _Exchange]
"""Rows between `start` and `finish`. The tensor is empty, and links the two in autograd's graph."""


def start(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Travelling:
    """Begin to send consecutive `rows` to the ranks of `group`: `[n, dim]`.

    Args:
        sent, received: number of rows to each rank, and from each.
    """
    exchange = _Exchange(sent, received, group)
    return _Start.apply(rows, exchange), exchange


def finish(travelling: Travelling) -> Tensor:
    """The rows that have arrived, `[n, dim]`."""
    return _Finish.apply(*travelling)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(rows, exchange.sent, exchange.received)
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
        exchange.start(gradient, exchange.received, exchange.sent)
        return gradient.new_empty(0), None
