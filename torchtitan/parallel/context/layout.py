"""The layout of a row over the ranks of context parallelism: which tokens each rank holds."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.config.sections.parallelism import Parallelism


class RowLayout(NamedTuple):
    """The layout of rows that the ranks of a group share, and this rank's index among them.

    A row is cut into chunks of equal length: one per rank, or, balanced, two. Rank r of n then has
    chunks r and 2n-1-r, so that causal attention is the same work everywhere (Brandon et al.,
    arXiv:2311.09431).
    """

    group_name: str
    """Name of the process group. A compiled block can use the name, but not look up the group."""
    ranks: int
    rank: int
    balanced: bool

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that `rank` holds, in order."""
        return (rank, 2 * self.ranks - 1 - rank) if self.balanced else (rank,)

    def positions(self, seq_len: int, device: torch.device | None = None) -> Tensor:
        """Positions in their row of the tokens that this rank holds: `[seq_len / ranks]`."""
        chunks = torch.arange(seq_len, device=device).chunk(len(self.chunks(0)) * self.ranks)
        return torch.cat([chunks[chunk] for chunk in self.chunks(self.rank)])

    def join_shards(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Join the shards of all ranks along `dim` to whole rows."""
        if self.balanced:
            # Not by index, whose backward adds up by `index_put`.
            halves = [shard.chunk(2, dim) for shard in shards]
            heads = [head for head, _ in halves]
            tails = [tail for _, tail in reversed(halves)]
            shards = heads + tails
        return torch.cat(list(shards), dim)

    def split_rows(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Split whole rows along `dim` into a shard for each rank, the reverse of `join_shards`."""
        chunks = rows.chunk(len(self.chunks(0)) * self.ranks, dim)
        return [
            torch.cat([chunks[chunk] for chunk in self.chunks(rank)], dim)
            for rank in range(self.ranks)
        ]


def local_positions(
    seq_len: int, degree: int, rank: int, balanced: bool, device: torch.device | None = None
) -> Tensor:
    """Positions in their row of the tokens that rank `rank` of `degree` holds, in order."""
    return RowLayout("", degree, rank, balanced and degree > 1).positions(seq_len, device)


def attending_positions(positions: Tensor, p: Parallelism) -> Tensor:
    """Positions of the queries whose attention a rank computes, for its masks.

    Args:
        positions: `[s]`, of the tokens that the rank holds.
    """
    if p.context_parallel_degree == 1 or p.context_parallel_method == "ring":
        return positions
    return torch.arange(len(positions) * p.context_parallel_degree, device=positions.device)
