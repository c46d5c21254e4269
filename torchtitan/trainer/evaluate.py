"""Validation: the token-weighted loss on held-out data, with the very forward that trains."""

import itertools

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan.components.data import StepLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.collectives import all_reduce
from torchtitan.distributed.mesh import Mesh
from torchtitan.trainer.step import forward_loss


@torch.no_grad()
def evaluate(
    model: FSDPModule, loader: StepLoader, mesh: Mesh, device: torch.device, max_batches: int
) -> tuple[float, int]:
    """Mean loss per token over `max_batches` batches (-1: the whole data set) on all ranks, and the token count.

    Ranks may run out of data at different times; one that has none left feeds rows without labels, since every rank
    must take part in every forward.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    blank: Tensor | None = None
    batches = iter(loader)
    for _ in range(max_batches) if max_batches >= 0 else itertools.count():
        batch = next(batches, None)
        left = all_reduce(torch.tensor(float(batch is not None), device=device), mesh.loss_group)
        if left.item() == 0:
            break
        if batch is not None:
            tokens, labels = batch.tokens, batch.labels
            blank = tokens
        else:
            tokens = blank if blank is not None else torch.zeros(1, 2, dtype=torch.int64)
            labels = torch.full_like(tokens, IGNORE_INDEX)
        labels = labels.to(device)
        totals[0] += forward_loss(model, tokens.to(device), labels).double()
        totals[1] += (labels != IGNORE_INDEX).sum()
    all_reduce(totals, mesh.loss_group)
    # FSDP keeps some gathered weights after a forward that no backward follows; a checkpoint must not see them.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    model.train()
    loss_sum, tokens_seen = totals.tolist()
    return loss_sum / max(tokens_seen, 1), int(tokens_seen)
