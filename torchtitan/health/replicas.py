"""Check that ranks with copies of the same tensor have the same bytes.

Copies are tensors that a DTensor's placement replicates (data-parallel replicas, norms under tensor
parallelism; experts only along dp_replicate), and all plain tensors, such as routing biases. They
stay bit-identical in a healthy run, because each rank computes them from the same reduced
gradients. A difference means a faulty device or a bug in the layout.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.checkpoint import Checkpointer
from torchtitan.config.derive import AXES
from torchtitan.health.collectives import name_ranks
from torchtitan.parallel import agree
from torchtitan.parallel.collectives import local
from torchtitan.parallel.mesh import Mesh
from torchtitan.utils.errors import GuardError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""2^64 / golden ratio, as a signed number."""


def check_replicas(mesh: Mesh, device: torch.device, step: int, checkpointer: Checkpointer) -> None:
    """Compare all replicated tensors that `checkpointer` saves, and buffers. Called by all ranks.

    Raises:
        GuardError: copies differ.
    """
    tensors = {}
    for owner, values in checkpointer.trained.tensors().items():
        for name, value in values.items():
            tensors[name if owner == "model" else f"{owner} {name}"] = value
    for model in checkpointer.trained.models:
        for name, value in model.named_buffers():
            tensors[f"buffer {name}"] = value
    differences = disagreements(tensors, mesh, device)
    if differences:
        checkpointer.wait()
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise GuardError(
            f"after step {step}: ranks hold different copies: {'; '.join(differences[:3])}{more}.\n"
            "Either a device or its memory is faulty, or the layout has a bug. Run the same "
            f"command again ({checkpointer.last_good()}); if the same rank differs again, exclude "
            "its machine."
        )


def fingerprint(value: Tensor) -> Tensor:
    """64-bit hash of a tensor's bytes: an int64 scalar on its device.

    The elements, read as integers, are multiplied by odd coefficients that depend on their position
    and summed modulo 2^64. The sum doesn't depend on the order of addition, and a change of one
    element always changes it, because the coefficients are odd.
    """
    flat = value.detach().contiguous().view(_INTEGERS[value.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start, chunk in enumerate(flat.split(_CHUNK)):
        positions = torch.arange(start * _CHUNK, start * _CHUNK + len(chunk), device=flat.device)
        total += ((positions * _ODD) | 1).mul_(chunk).sum()
    return total


def disagreements(tensors: Mapping[str, Tensor], mesh: Mesh, device: torch.device) -> list[str]:
    """Copies that differ, each as tensor, mesh axis and ranks; the same list on every rank.

    Args:
        tensors: tensors by name; ranks along an axis other than pp pass the same names in the same
            order.
    """
    hashes = torch.stack([fingerprint(local(value)).to(device) for value in tensors.values()])
    copies: dict[str, tuple[dist.ProcessGroup, list[int]]] = {}
    for index, value in enumerate(tensors.values()):
        for axis, group in _replicated_along(value, mesh):
            copies.setdefault(axis, (group, []))[1].append(index)
    names = list(tensors)
    differences = []
    for axis, (group, indices) in sorted(copies.items()):
        local_hashes = hashes[indices]
        copies_of_rank = [torch.empty_like(local_hashes) for _ in range(group.size())]
        dist.all_gather(copies_of_rank, local_hashes, group=group)
        ranks = dist.get_process_group_ranks(group)
        columns = torch.stack(copies_of_rank, 1).tolist()
        for index, column in zip(indices, columns, strict=True):
            if len(set(column)) > 1:
                differences.append(
                    f"{names[index]} differs along {axis}: {_versions(ranks, column)}"
                )
    return list(
        dict.fromkeys(
            text for rank in agree.problems_from_all(differences or None) for text in rank or ()
        )
    )


def _replicated_along(value: Tensor, mesh: Mesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Axes along which a tensor has copies, with their groups."""
    axes: dict[str, dist.ProcessGroup | None] = {}
    if isinstance(value, DTensor):
        tensor_mesh = value.device_mesh
        names = tensor_mesh.mesh_dim_names or ()
        for axis, placement in zip(names, value.placements, strict=True):
            if placement.is_replicate():
                axes[axis] = tensor_mesh.get_group(axis)
    else:
        axes = {axis: mesh.group(axis) for axis in AXES if axis != "pp"}
    for axis, group in axes.items():
        if group is not None and group.size() > 1:
            yield axis, group


def _versions(ranks: Sequence[int], values: Sequence[int]) -> str:
    """The sets of ranks that agree with each other, smallest first."""
    by_value: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    return " against ".join(map(name_ranks, sorted(by_value.values(), key=len)))
