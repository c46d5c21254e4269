"""The loss of each data source."""

from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor

from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.parallel.collectives import all_reduce
from torchtitan.parallel.mesh import Mesh


class SourceTally:
    """Adds up loss, tokens and bytes of the rows of each source, without waiting for the device."""

    def __init__(self, sources: int, byte_lengths: NDArray, device: torch.device):
        """
        Args:
            byte_lengths: `[vocab]`, bytes of text that each token stands for.
        """
        self._bytes = torch.from_numpy(byte_lengths).to(device)
        self._sums = torch.zeros(3, sources, dtype=torch.float64, device=device)
        self._index = torch.arange(sources, device=device)

    def add(self, sources: Tensor, losses: Tensor, labels: Tensor) -> None:
        """Take in rows.

        Args:
            sources: `[batch]`.
            losses: `[batch]`.
            labels: `[batch, seq]`.
        """
        counted = labels != IGNORE_INDEX
        lengths = self._bytes[labels.clamp(min=0)] * counted
        values = torch.stack([losses.double(), counted.sum(1).double(), lengths.sum(1).double()])
        # Not `index_add_`, whose order of additions differs from run to run on CUDA.
        self._sums += values @ (sources[:, None] == self._index).double()

    def take(self, mesh: Mesh, epochs: Sequence[float]) -> list[list[float]]:
        """Loss, tokens, bytes and epochs of each source, over all ranks; then starts again from
        zero.

        Args:
            epochs: how often this rank has read each source. The mean over ranks is returned.
        """
        read = (
            torch.tensor(epochs, dtype=torch.float64, device=self._sums.device)
            / mesh.loss_group.size()
        )
        sums = all_reduce(torch.cat([self._sums, read[None]]), mesh.loss_group)
        self.clear()
        return sums.T.tolist()

    def clear(self) -> None:
        self._sums.zero_()
