"""The loss: a sum over tokens, so that dividing by the global token count is exact under every layout."""

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

IGNORE_INDEX = -100
"""Label of positions that are not predicted."""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the token cross-entropies, in fp32.

    Args:
        logits: `[batch, seq, vocab]`; a DTensor if sharded over the vocabulary, and then within `loss_context`.
        labels: `[batch, seq]`; `IGNORE_INDEX` counts nothing.
    """
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(0, 1), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
