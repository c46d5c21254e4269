"""Expert parallelism: each rank holds some of the experts, and rows travel to them and back.

The ranks of `ep` come from dp_shard x cp x tp, whose ranks all have different tokens. Experts
are sharded over `ep` by index, and by FSDP over the ranks that hold the same ones. The splits of
both all-to-alls depend on the data, so the host waits once for the device in each forward.

Shapes: n rows, a row for each token and expert.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, all_to_all_single
from torch.distributed.tensor import DTensor, Shard

from torchtitan.config.sections.schema import Config
from torchtitan.models.moe.moe import Experts, inverse_permutation, permute
from torchtitan.models.moe.router import Balance, Router
from torchtitan.models.protocols import Model
from torchtitan.parallel.collectives import distribute
from torchtitan.parallel.experts.travel import finish, start
from torchtitan.parallel.mesh import Mesh

Splits: TypeAlias = Callable[[Tensor, Tensor, int], tuple[list[int], list[int]]]
"""A function like `count_splits`."""


def count_splits(sends: Tensor, arrivals: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """The number of rows to send to each rank, and to receive from each.

    Args:
        sends, arrivals: numbers of rows for each expert, `[ranks, local experts]`.
        rows: the number of rows that this rank sends.
    """
    to_ranks, from_ranks = torch.stack([sends.sum(1), arrivals.sum(1)]).tolist()
    return to_ranks, from_ranks


class ShardedExperts(Experts):
    """Experts that are sharded evenly over the ranks of `group`: `[n, dim] -> [n, dim]`."""

    group: dist.ProcessGroup
    splits: Splits = staticmethod(count_splits)
    """Counts the rows to send to each rank, and to receive from each."""

    def forward(
        self, rows: Tensor, ends: Tensor, meanwhile: Callable[[], None] = lambda: None
    ) -> Tensor:
        """
        Args:
            rows: this rank's rows for all experts, sorted by expert.
            ends: `[experts]` int32, the index after each expert's last row.
            meanwhile: called while rows travel to their experts.
        """
        sends = ends.diff(prepend=ends.new_zeros(1))  # rows for each expert
        arrivals = all_to_all_single(sends, None, None, self.group).view(self.group.size(), -1)
        to_ranks, from_ranks = self.splits(sends.view_as(arrivals), arrivals, len(rows))
        transfer = start(rows, to_ranks, from_ranks, self.group)
        meanwhile()
        received_rows = finish(transfer)
        order = _expert_order(arrivals, sum(from_ranks))
        inverse = inverse_permutation(order)
        local_ends = arrivals.sum(0).cumsum(0).to(torch.int32)
        local_rows = permute(received_rows, order, inverse)
        del rows, received_rows  # frees them while the experts compute
        torch._dynamo.maybe_mark_dynamic(local_rows, 0)  # one graph for two rows or more
        compute = self.compute if len(local_rows) > 1 else super().compute  # eager
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in self.parameters()]
        results = permute(compute(local_rows, local_ends, *weights), inverse, order)
        del local_rows
        transfer = start(results, from_ranks, to_ranks, self.group)
        del results
        return finish(transfer)


def _expert_order(counts: Tensor, rows: int) -> Tensor:
    """`[n]`, the permutation that sorts rows by expert, which arrived sorted by rank.

    Args:
        counts: `[ranks, local experts]`, numbers of rows.
    """
    ranks, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(ranks)
    return expert.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)


def build_balance(config: Config) -> Balance:
    """The losses that balance the load of experts, besides routing biases."""
    moe = config.moe
    return Balance(
        sequence_loss=moe.sequence_balance_loss,
        global_loss=moe.global_balance_loss,
        z_loss=moe.router_z_loss,
        forced=config.debug.moe_force_load_balance,
    )


def apply_expert_parallel(
    model: Model, mesh: Mesh, balance: Balance, splits: Splits = count_splits
) -> None:
    """Shard the experts of `model`, on the meta device, over `mesh.ep`, and set up its routers.

    Args:
        splits: returns the numbers of rows that ranks exchange, like `count_splits`.
    """
    along_rows = [group for axis in ("cp", "tp") if (group := mesh.group(axis)) is not None]
    for module in model.modules():
        if isinstance(module, Router):
            module.balance = balance
            if along_rows:
                module.sum_over_row = _sum_over(along_rows)
        elif isinstance(module, Experts) and mesh.ep is not None:
            for name, _ in list(module.named_parameters()):
                distribute(module, name, mesh.ep, Shard(0))
            # mypy doubts that classes are hashable
            module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]
            module.group = mesh.ep.get_group()
            module.splits = splits


def _sum_over(groups: list[dist.ProcessGroup]) -> Callable[[Tensor], Tensor]:
    def sum_over_row(counts: Tensor) -> Tensor:
        for group in groups:
            counts = all_reduce(counts, "sum", group)
        return counts

    return sum_over_row


@cache
def _sharded_class(kind: type) -> type:
    """A subclass of `kind` whose experts are computed by the ranks that hold them."""
    return type(f"Sharded{kind.__name__}", (ShardedExperts, kind), {})
