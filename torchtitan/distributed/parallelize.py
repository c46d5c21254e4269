"""THE ordered list: how a plain model becomes a distributed one. The same for every model family."""

import torch
from torch import nn

from torchtitan.config.schema import Parallelism, Training
from torchtitan.distributed.fsdp import apply_fsdp
from torchtitan.distributed.mesh import Mesh


def parallelize(model: nn.Module, mesh: Mesh, training: Training, parallelism: Parallelism) -> None:
    """Distribute `model` (on the meta device) in place; no memory is taken and nothing is communicated."""
    model.to(getattr(torch, training.dtype))
    apply_fsdp(model, mesh.fsdp, training, parallelism.fsdp_reshard_after_forward)
