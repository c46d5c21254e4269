"""Layout-invariant initialization: a weight is a function of (seed, its name, its global index), and nothing else.

A parameter is cut into blocks of rows. Each block has a generator of its own, seeded by a hash of (seed, name, block),
always on the CPU. A rank evaluates only the blocks that its shard touches, so the values are the same bit for bit under
every layout, with no communication and no rank ever holding a whole parameter.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from torchtitan.models.spec import Init

ROWS_PER_BLOCK = 256


def materialize(
    model: nn.Module, device: torch.device, buffer_device: torch.device, seed: int, rule: Callable[[str], Init]
) -> None:
    """Give a (sharded) model on the meta device its memory and its initial values.

    Args:
        device: where parameters live (the CPU under offload).
        buffer_device: where computation runs.
        rule: initialization of each fully qualified parameter name.
    """
    model.to_empty(device=device)
    model.init_buffers()
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to(buffer_device))
    with torch.no_grad():
        for fqn, param in model.named_parameters():
            _fill(param, fqn, seed, rule(fqn))


def _fill(param: Tensor, fqn: str, seed: int, init: Init) -> None:
    local = param.to_local() if isinstance(param, DTensor) else param
    if init.kind == "ones":
        local.fill_(1.0)
        return
    if local.numel() == 0:
        return
    rows = _owned(param, 0)
    columns = _owned(param, 1) if param.dim() > 1 else None
    whole = columns is None or len(columns) == param.shape[1]
    for block in torch.unique(rows // ROWS_PER_BLOCK).tolist():
        start = block * ROWS_PER_BLOCK
        mine = (rows // ROWS_PER_BLOCK == block).nonzero().squeeze(1)
        values = _block(fqn, seed, block, (min(ROWS_PER_BLOCK, param.shape[0] - start), *param.shape[1:]), init.std)
        values = values[rows[mine] - start]
        local[mine.to(local.device)] = (values if whole else values[:, columns]).to(local.device, local.dtype)


def _block(fqn: str, seed: int, block: int, shape: tuple[int, ...], std: float) -> Tensor:
    """Values of one block of rows: fp32 normal, limited to three standard deviations.

    `normal_` gives the same stream in every supported torch release, which `trunc_normal_` does not.
    """
    digest = hashlib.sha256(f"{seed}:{fqn}:{block}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)


def _owned(param: Tensor, dim: int) -> Tensor:
    """Global indices along `dim` that this rank holds: the index itself, sharded as the parameter is."""
    index = torch.arange(param.shape[dim])
    if not isinstance(param, DTensor):
        return index
    placements = [_along_first(p) if getattr(p, "dim", None) == dim else Replicate() for p in param.placements]
    index = index.to(param.device_mesh.device_type)
    return distribute_tensor(index, param.device_mesh, placements, src_data_rank=None).to_local().cpu()


def _along_first(placement: Placement) -> Placement:
    """The same sharding of axis 0. FSDP x TP has shards with a split factor, which are no `Shard`."""
    factor = getattr(placement, "split_factor", None)
    return Shard(0) if factor is None else type(placement)(0, split_factor=factor)
