"""QK-clip: keeps attention's scores small by scaling the projections of heads (Kimi K2,
arXiv:2507.20534, section 2.1.1).

After a step in which the largest score m of a head exceeded a limit t, its queries and keys are
scaled so that this score would be t. Products of queries and keys shrink by t / m:

    heads with separate keys        queries and keys by sqrt(t / m)
    heads that share keys           queries by t / m; keys stay, as other heads read them
    latent attention                the features without positions of queries and keys by
                                    sqrt(t / m); queries' rotated features by t / m, as all heads
                                    share the keys' rotated features
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.models.attention.modules import Attention, LatentAttention
from torchtitan.models.delta.layer import GatedDeltaNet
from torchtitan.optim.max_logits import RecordMaxLogits
from torchtitan.parallel.collectives import all_reduce, storage_of
from torchtitan.parallel.context.layout import RowLayout
from torchtitan.parallel.init import owned
from torchtitan.utils.errors import UserError


class _Rows(NamedTuple):
    """A parameter whose rows belong to heads."""

    param: Tensor
    heads: Tensor
    """Head of each row of this rank's shard, on its device."""
    powers: Tensor
    """Exponent of each of these rows, which is multiplied by its head's factor to this power."""


class QKClip:
    """Records the largest score of every head in a step, and scales heads after it."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        limit: float,
        *,
        layers: int,
        heads: int,
        tp: tuple[int, int],
        layout: RowLayout | None,
        device: torch.device,
    ):
        """
        Args:
            models: this rank's pipeline stages, sharded.
            limit: `optimizer.qk_clip`.
            layers, heads: blocks and query heads of the whole model.
            tp: this rank's index in tensor parallelism, which splits the heads, and its degree.
            layout: the layout of rows under context parallelism.

        Raises:
            UserError: the model has blocks, but no attention whose scores can be recorded.
        """
        self.limit = limit
        rank, degree = tp
        local_heads = heads // degree
        self.heads = slice(rank * local_heads, (rank + 1) * local_heads)
        self._records: dict[int, RecordMaxLogits] = {}
        self._rows: dict[int, list[_Rows]] = {}
        for model in models:
            for name, module in model.named_modules():
                if isinstance(module, Attention | LatentAttention):
                    layer = int(name.split(".")[1])
                    record = RecordMaxLogits(module.attend, local_heads, layout, device)
                    module.attend = record
                    self._records[layer] = record
                    self._rows[layer] = list(_scaled_rows(module, heads))
        every_row = [row for rows in self._rows.values() for row in rows]
        self._weights_device = every_row[0].heads.device if every_row else device
        """The host under `training.enable_cpu_offload`."""
        self._largest = torch.full((layers, heads), -torch.inf, device=device)
        self._largest_since_take = self._largest.clone()
        self._clips = torch.zeros((), device=device)
        blocks = [block for model in models for block in model.layers.values()]
        if not self._records and not all(map(_has_no_scores, blocks)):
            raise UserError(
                "optimizer.qk_clip: found no attention in the model; set it to 0, or build the "
                "model's attention on torchtitan.models.attention.modules"
            )

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """End a step, after the optimizer's update. Called by all ranks.

        Args:
            skip: if true, the weights don't change; a boolean scalar on the device.
        """
        self._largest.fill_(-torch.inf)
        for layer, record in self._records.items():
            self._largest[layer, self.heads] = record.largest
            record.largest.fill_(-torch.inf)
        # Ranks see different rows, heads or layers: the maximum over the world is exact.
        all_reduce(self._largest, dist.group.WORLD, dist.ReduceOp.MAX)
        torch.maximum(self._largest_since_take, self._largest, out=self._largest_since_take)
        is_above = self._largest.isfinite() & (self._largest > self.limit)
        if skip is not None:
            is_above = is_above & ~skip
        self._clips += is_above.sum()
        factors = torch.where(is_above, self.limit / self._largest, 1.0).to(self._weights_device)
        for layer, rows in self._rows.items():
            for param, heads, powers in rows:
                shard = storage_of(param)
                factor = (factors[layer].index_select(0, heads) ** powers).to(shard.dtype)
                shard.mul_(factor.view(-1, *[1] * (shard.dim() - 1)))

    def take(self) -> tuple[float, int]:
        """The largest score of any head since the last call, and how often one was scaled."""
        largest, clips = torch.stack([self._largest_since_take.max(), self._clips]).tolist()
        self._largest_since_take.fill_(-torch.inf)
        self._clips.zero_()
        return largest, int(clips)


def _has_no_scores(block: nn.Module) -> bool:
    """Whether a block mixes tokens by Gated DeltaNet. A pipeline stage may have no others."""
    return any(isinstance(module, GatedDeltaNet) for module in block.modules())


def _scaled_rows(attention: Attention | LatentAttention, heads: int) -> Iterator[_Rows]:
    """The rows of the projections that are scaled."""
    if isinstance(attention, LatentAttention):
        plain_width, rotary_width = attention.widths
        queries = attention.wq if attention.wq is not None else attention.wq_b
        assert queries is not None
        yield from _linear_rows(queries, heads, [(plain_width, 0.5), (rotary_width, 1.0)])
        keys = [(plain_width, 0.5), (attention.value_dim, 0.0)]
        yield from _linear_rows(attention.wkv_b, heads, keys)
        return
    size = attention.head_dim
    shares_keys = attention.wk.weight.shape[0] != heads * size
    yield from _linear_rows(attention.wq, heads, [(size, 1.0 if shares_keys else 0.5)])
    if not shares_keys:
        yield from _linear_rows(attention.wk, heads, [(size, 0.5)])


def _linear_rows(
    linear: nn.Module, heads: int, powers_of_rows: Sequence[tuple[int, float]]
) -> Iterator[_Rows]:
    """The rows of a projection, and of its bias if it has one.

    Args:
        powers_of_rows: (number of rows, power) within each head, in order.

    Raises:
        UserError: the projection has a different number of rows, in a user's family.
    """
    powers = torch.cat([torch.full((rows,), power) for rows, power in powers_of_rows])
    for _, param in linear.named_parameters(recurse=False):
        local_rows = owned(param, 0)
        if param.shape[0] != heads * len(powers):
            raise UserError(
                f"optimizer.qk_clip: a projection to {heads} heads has {param.shape[0]} rows, not "
                f"{len(powers)} for each, so which to scale is unknown; set it to 0"
            )
        shard = storage_of(param)
        heads_of_rows = (local_rows // len(powers)).to(shard.device)
        yield _Rows(param, heads_of_rows, powers[local_rows % len(powers)].to(shard.device))
