"""Layout-invariant initialization: a weight depends only on the seed, its name and global index.

A parameter is cut into blocks of rows. Each block has its own generator on the CPU, seeded by a
hash of (seed, name, block), and a rank evaluates only the blocks that its shard overlaps. So values
are bitwise equal under every layout, nothing is communicated, and no rank holds a whole parameter.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from torchtitan.models.protocols import Model
from torchtitan.models.spec import Init
from torchtitan.parallel.collectives import local

ROWS_PER_BLOCK = 256


def materialize(
    model: Model,
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
    if model.norm is not None:
        # FSDP pads the shards of a unit when its module moves. The norm's unit also has the
        # output's weight, which moved after the norm.
        model.norm.to(device)
    model.init_buffers()
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to(buffer_device))
    with torch.no_grad():
        for fqn, param in model.named_parameters():
            _fill(param, fqn, seed, rule(fqn))


def _fill(param: Tensor, fqn: str, seed: int, init: Init) -> None:
    shard = local(param)
    if init.kind in ("zeros", "ones"):
        shard.fill_(1.0 if init.kind == "ones" else 0.0)
        return
    if shard.numel() == 0:
        return
    rows = owned(param, 0)  # global indices of this rank's rows
    if param.dim() == 3:  # a stack's rows are its matrices' rows
        matrix_rows = owned(param, 1)
        rows = (rows[:, None] * param.shape[1] + matrix_rows).flatten()
        shard = shard.view(len(rows), -1)
    num_rows = len(param)
    row_shape: tuple[int, ...] = ()
    columns = None
    if param.dim() > 1:
        num_rows = param.shape[:-1].numel()
        row_shape = (param.shape[-1],)
        columns = owned(param, param.dim() - 1)
        if len(columns) == param.shape[-1]:
            columns = None
    blocks = rows // ROWS_PER_BLOCK
    for block in blocks.unique().tolist():
        start = block * ROWS_PER_BLOCK
        shape = (min(ROWS_PER_BLOCK, num_rows - start), *row_shape)
        values = _block(fqn, seed, block, shape, init=init)
        in_block = (blocks == block).nonzero().squeeze(1)
        values = values[rows[in_block] - start]
        if columns is not None:
            values = values[:, columns]
        shard[in_block.to(shard.device)] = values.to(shard.device, shard.dtype)


def _block(fqn: str, seed: int, block: int, shape: tuple[int, ...], init: Init) -> Tensor:
    """Values of one block of rows, in fp32.

    Unlike `trunc_normal_`, `normal_` produces the same stream in every supported torch release.
    """
    digest = hashlib.sha256(f"{seed}:{fqn}:{block}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(shape)
    if init.kind == "log_uniform":
        return values.uniform_(init.low, init.high, generator=generator).log_()
    limit = 3 * init.std
    return values.normal_(0.0, init.std, generator=generator).clamp_(-limit, limit)


def owned(param: Tensor, dim: int) -> Tensor:
    """Global indices along `dim` that this rank holds, from indices sharded like the parameter."""
    index = torch.arange(param.shape[dim])
    if not isinstance(param, DTensor):
        return index
    mesh = param.device_mesh
    placements = [
        _along_first(placement) if getattr(placement, "dim", None) == dim else Replicate()
        for placement in param.placements
    ]
    index = index.to(mesh.device_type)
    return distribute_tensor(index, mesh, placements, src_data_rank=None).to_local().cpu()


def _along_first(placement: Placement) -> Placement:
    """The same sharding along dim 0. FSDP with TP uses a placement other than `Shard`, which has a
    split factor.
    """
    factor = getattr(placement, "split_factor", None)
    return Shard(0) if factor is None else type(placement)(0, split_factor=factor)
