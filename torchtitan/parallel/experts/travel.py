"""An exchange of rows in two halves, so that other work runs while rows travel.

    travelling = start(rows, sent, received, group)
    ...  # what doesn't need the rows
    rows = finish(travelling)

The backward has the same shape: the gradient of `finish` starts the exchange the other way, that of
`start` ends it. Autograd runs what was computed last first, so the backward of what stood between
the two stands between them again.

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
    """Numbers of rows for each rank of `group`."""
    received: Sequence[int]
    """Numbers of rows from each."""
    group: dist.ProcessGroup
    rows: Tensor | None = None
    """Rows that travel, or their gradient. Not passed through autograd, for which a gradient has
    the shape of its tensor: here one has the shape of what was sent, the other of what arrived.
    """

    def start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        # The note lets the hang doctor see who waits for whom.
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
        sent, received: numbers of rows for each rank, and from each.
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
