"""Validation: the token-weighted loss on held-out data, computed by the same forward that trains."""

import itertools

import torch

from torchtitan.data.loader import StepLoader
from torchtitan.data.rows import IGNORE_INDEX
from torchtitan.parallel.collectives import all_reduce
from torchtitan.parallel.mesh import Mesh
from torchtitan.train.compute import Compute
from torchtitan.utils.phase import DATA, note


@torch.no_grad()
def evaluate(
    compute: Compute, loader: StepLoader, mesh: Mesh, device: torch.device, max_batches: int
) -> tuple[float, int]:
    """Mean loss per token over `max_batches` batches (-1: the whole data set) on all ranks, and the token count.

    Ranks may run out of data at different times, but every rank must take part in every forward: one without data
    feeds rows without labels.
    """
    for model in compute.models:
        model.eval()
    loss, count = torch.zeros(2, dtype=torch.float64, device=device)
    batches = iter(loader)
    for _ in range(max_batches) if max_batches >= 0 else itertools.count():
        note(f"{DATA} from {loader.name} for validation")
        batch = next(batches, None)
        note("validating")
        left = all_reduce(torch.full((), float(batch is not None), device=device), mesh.batch_group)
        if left.item() == 0:
            break
        if batch is not None:
            tokens, labels = batch.tokens, batch.labels
        else:
            tokens = torch.zeros(loader.size(0), loader.spec.seq_len, dtype=torch.int64)
            labels = torch.full_like(tokens, IGNORE_INDEX)
        rows = compute.own_rows(tokens, labels).to(device)
        loss += compute.forward(rows).double()
        count += (rows.labels != IGNORE_INDEX).sum()
    all_reduce(loss, mesh.loss_group)
    all_reduce(count, mesh.batch_group)
    compute.reshard()  # a checkpoint must not see gathered weights
    for model in compute.models:
        model.train()
    return loss.item() / max(count.item(), 1), int(count.item())
