"""Expert parallelism: each rank holds some of the experts, and rows travel to them and back.

The ranks of `ep` are taken from dp_shard x cp x tp, whose ranks all have different tokens. Experts
are sharded over
`ep` by index, and by FSDP over the ranks that hold the same ones. The splits of both all-to-alls
depend on the data, so the host waits once for the device in each forward.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import (
    all_reduce,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtitan.config.sections.schema import Config
from torchtitan.models.decoder import MoEBlock
from torchtitan.models.moe import Balance, Experts, Router, permute
from torchtitan.parallel.mesh import Mesh
from torchtitan.utils.activity import note_exchange


class ShardedExperts(Experts):
    """Experts of which each rank of `group` holds an equal part: `[n, dim] -> [n, dim]`, this
    rank's rows.
    """

    group: dist.ProcessGroup

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """
        Args:
            rows: sorted by expert, of all experts.
            ends: `[experts]` int32, the index after each expert's last row.
        """
        sent = ends.diff(prepend=ends.new_zeros(1))
        received = all_to_all_single(sent, None, None, self.group).view(self.group.size(), -1)
        theirs, ours = _splits(sent.view_as(received), received, len(rows))
        arrived = self._exchange(rows, theirs, ours)
        order, place = _by_expert(received, sum(ours))
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in self.parameters()]
        own_ends = received.sum(0).cumsum(0).to(torch.int32)
        own = permute(arrived, order, place)
        torch._dynamo.maybe_mark_dynamic(own, 0)  # one graph for any number of rows
        done = self.compute(own, own_ends, *weights)
        return self._exchange(permute(done, place, order), ours, theirs)

    def _exchange(self, rows: Tensor, sent: list[int], expected: list[int]) -> Tensor:
        """Send consecutive `rows` to the ranks of `group`, and receive theirs. A hang is diagnosed
        from the notes.
        """
        ranks = dist.get_process_group_ranks(self.group)
        note_exchange(ranks, sent, expected)
        arrived = all_to_all_single_autograd(rows, expected, sent, self.group)
        if arrived.grad_fn is not None:  # the backward sends gradients the other way
            arrived.grad_fn.register_prehook(lambda _: note_exchange(ranks, expected, sent))
        return arrived


def _splits(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and how many come from each.

    Args:
        sent, received: `[ranks, local experts]`.
    """
    if isinstance(sent, FakeTensor):  # while the planner traces: equal loads
        ranks = len(sent)
        equal = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return equal, equal
    theirs, ours = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return theirs, ours


def _by_expert(received: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The permutation that sorts arrived rows, which are sorted by rank, by expert; and its
    inverse.

    Args:
        received: `[ranks, local experts]`, numbers of rows.
    """
    ranks, experts = received.shape
    expert = torch.arange(experts, device=received.device).repeat(ranks)
    order = expert.repeat_interleave(received.flatten(), output_size=rows).argsort(stable=True)
    return order, torch.empty_like(order).scatter_(
        0, order, torch.arange(rows, device=order.device)
    )


def regions(block: nn.Module, *, apart: bool) -> list[tuple[nn.Module, str]]:
    """The methods of a block that are compiled, each as a graph: its forward, or, for a block whose
    experts are apart, what comes before the exchange of rows, between the exchanges, and after
    them.

    Args:
        apart: FSDP gathers experts apart from their block, by hooks inside its forward.
    """
    if apart and isinstance(block, MoEBlock):
        return [(block, "before_experts"), (block.moe.experts, "compute"), (block, "after_experts")]
    return [(block, "forward")]


def balance_of(config: Config) -> Balance:
    """What keeps the experts equally loaded, besides routing biases."""
    moe = config.moe
    return Balance(
        sequence_loss=moe.sequence_balance_loss,
        global_loss=moe.global_balance_loss,
        z_loss=moe.router_z_loss,
        forced=config.debug.moe_force_load_balance,
    )


def apply_expert_parallel(model: nn.Module, mesh: Mesh, balance: Balance) -> None:
    """Shard the experts of `model`, on the meta device, over `mesh.ep`, and set up its routers."""
    for module in model.modules():
        if isinstance(module, Router):
            module.balance = balance
            if groups := [
                group for group in (mesh.group("cp"), mesh.group("tp")) if group is not None
            ]:
                module.sum_over_row = _sum_over(groups)
        elif isinstance(module, Experts) and mesh.ep is not None:
            _shard(module, mesh.ep)


def _sum_over(groups: Sequence[dist.ProcessGroup]) -> Callable[[Tensor], Tensor]:
    def sum_over_row(counts: Tensor) -> Tensor:
        for group in groups:
            counts = all_reduce(counts, "sum", group)
        return counts

    return sum_over_row


def _shard(experts: Experts, mesh: DeviceMesh) -> None:
    for name, weight in list(experts.named_parameters()):
        setattr(
            experts,
            name,
            nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)),
        )
    # mypy doubts that classes are hashable
    experts.__class__ = _sharded(type(experts))  # type: ignore[arg-type]
    experts.group = mesh.get_group()


@functools.cache
def _sharded(kind: type) -> type:
    """`kind`, whose networks are computed by the ranks that hold them."""
    return type(f"Sharded{kind.__name__}", (ShardedExperts, kind), {})
