"""Multi-token prediction in training: the inputs, labels and losses of its modules."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.data.order.rows import IGNORE_INDEX


class MTPLoss:
    """The losses of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, equations 24 and 25).

    The loss of module k is the mean over those tokens of the global batch that have a k-th token
    after the next.
    """

    def __init__(self, modules: int, weight: float, device: torch.device):
        """
        Args:
            modules: number of modules.
            weight: weight of the mean of their losses, relative to the loss of the next token.
        """
        self.modules = modules
        self.weight = weight
        self._sums = torch.zeros(modules, device=device)

    def factors(self, totals: Tensor) -> Tensor:
        """The factor of each summed loss, `[1 + modules]`: the step's loss is their weighted sum
        divided by `totals[0]`.

        Args:
            totals: `[1 + modules]`, number of predicted tokens of the whole step for each loss.
        """
        return F.pad(self.weight / self.modules * totals[0] / totals[1:], (1, 0), value=1.0)

    def add(self, rows: Tensor, totals: Tensor) -> None:
        """Add the losses of some rows, `[batch, 1 + modules]`."""
        self._sums += rows[:, 1:].sum(0) / totals[1:]

    def take(self) -> Tensor:
        """`[modules]`, this rank's share of the losses of the step; restarts from zero."""
        sums = self._sums.clone()
        self._sums.zero_()
        return sums


def stack_next_tokens(
    tokens: Tensor, labels: Tensor, documents: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Give each token of whole rows `[batch, seq]` the `count` tokens after it.

    Args:
        documents: `[batch, seq]`, the document of each token; None: a row counts as one.

    Returns:
        Tokens and labels `[batch, seq, 1 + count]`. There is no label after the end of a token's
        document, or of the row.
    """
    all_tokens = [tokens]
    all_labels = [labels]
    for k in range(1, count + 1):
        ahead = F.pad(labels[:, k:], (0, k), value=IGNORE_INDEX)
        if documents is not None:
            same = F.pad(documents[:, k:], (0, k), value=-1) == documents
            ahead = ahead.masked_fill(~same, IGNORE_INDEX)
        all_labels.append(ahead)
        all_tokens.append(F.pad(tokens[:, k:], (0, k)))  # what has no label may be any token
    return torch.stack(all_tokens, dim=-1), torch.stack(all_labels, dim=-1)
