"""Cross entropy with a z-loss, which keeps the logits small (Chowdhery et al., arXiv:2204.02311,
section 5).

torchtitan train CONFIG.toml --experimental.custom_import z_loss --training.loss z_loss
"""

import torch.nn.functional as F
from torch import Tensor

from torchtitan.config.registry import Section, losses
from torchtitan.config.types import Factor
from torchtitan.optim.loss import IGNORE_INDEX, RowLoss
from torchtitan.parallel.collectives import unsharded


class Keys(Section):
    coefficient: Factor = 1e-4
    """Of the squared logarithm of the softmax's denominator."""


@losses.register("z_loss", Keys)
def z_loss(keys: Keys) -> RowLoss:
    coefficient = keys.coefficient

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.float()
        entropy = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        log_z = unsharded(logits.logsumexp(dim=-1))
        z_loss = coefficient * log_z.square() * (labels != IGNORE_INDEX)
        return (unsharded(entropy).view_as(labels) + z_loss).sum(dim=1)

    return loss
