"""Layout-invariant initialization: a weight's value depends only on the seed, its name and its
global index.

A parameter is cut into blocks of rows. Each block has its own generator on the CPU, seeded by a
hash of (seed, name, block), and a rank evaluates only the blocks its shard overlaps. Values are
bitwise equal under every layout, without communication and without any rank holding a whole
parameter.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from torchtitan.models.spec import Init

ROWS_PER_BLOCK = 256


def materialize(
    model: nn.Module,
    device: torch.device,
    buffer_device: torch.device,
    seed: int,
    rule: Callable[[str], Init],
) -> None:
    """Allocate and initialize a model, sharded or not, that is on the meta device.

    Args:
        device: where the parameters live; the CPU under offload.
        buffer_device: where the buffers live and computation runs.
        rule: maps a parameter's fully qualified name to its initialization.
    """
    model.to_empty(device=device)
    model.init_buffers()
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to(buffer_device))
    with torch.no_grad():
        for fqn, param in model.named_parameters():
            _fill(param, fqn, seed, rule(fqn))


def _fill(
    param: Tensor,
    fqn: str,
    seed: int,
    init: Init,
) -> None:
    local = param.to_local() if isinstance(param, DTensor) else param
    if init.kind != "normal":
        local.fill_({"zeros": 0.0, "ones": 1.0}[init.kind])
        return
    if local.numel() == 0:
        return
    rows = _owned(param, 0)
    if param.dim() == 3:  # a stack of matrices is their rows
        rows = (rows[:, None] * param.shape[1] + _owned(param, 1)).flatten()
        local = local.view(len(rows), -1)
    count = param.shape[:-1].numel() if param.dim() > 1 else len(param)
    width = param.shape[1:][-1:]
    columns = _owned(param, param.dim() - 1) if param.dim() > 1 else None
    whole = columns is None or len(columns) == param.shape[-1]
    for block in torch.unique(rows // ROWS_PER_BLOCK).tolist():
        start = block * ROWS_PER_BLOCK
        mine = (rows // ROWS_PER_BLOCK == block).nonzero().squeeze(1)
        values = _block(fqn, seed, block, (min(ROWS_PER_BLOCK, count - start), *width), init.std)
        values = values[rows[mine] - start]
        local[mine.to(local.device)] = (values if whole else values[:, columns]).to(
            local.device, local.dtype
        )


def _block(
    fqn: str,
    seed: int,
    block: int,
    shape: tuple[int, ...],
    std: float,
) -> Tensor:
    """Values of one block of rows: fp32 normal, clamped to three standard deviations.

    Unlike `trunc_normal_`, `normal_` produces the same stream in every supported torch release.
    """
    digest = hashlib.sha256(f"{seed}:{fqn}:{block}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)


def _owned(param: Tensor, dim: int) -> Tensor:
    """Global indices along `dim` that this rank holds, found by sharding the indices like the
    parameter.
    """
    index = torch.arange(param.shape[dim])
    if not isinstance(param, DTensor):
        return index
    placements = [
        _along_first(p) if getattr(p, "dim", None) == dim else Replicate() for p in param.placements
    ]
    index = index.to(param.device_mesh.device_type)
    return (
        distribute_tensor(index, param.device_mesh, placements, src_data_rank=None).to_local().cpu()
    )


def _along_first(placement: Placement) -> Placement:
    """The same sharding along dim 0. FSDP x TP uses placements with a split factor, which are not
    `Shard`.
    """
    factor = getattr(placement, "split_factor", None)
    return Shard(0) if factor is None else type(placement)(0, split_factor=factor)
