"""The device mesh: the five axes of parallelism, and the process groups along and across them."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.config.derive import axis_degrees, needs_replica_axis
from torchtitan.config.sections.schema import Config


@dataclass(frozen=True)
class Mesh:
    """All ranks along five axes, from outer to inner: pp, dp_replicate, dp_shard, cp, tp.

    Inner axes communicate most, so their ranks are placed closest, within a node if possible.
    """

    degrees: dict[str, int]
    """Number of ranks along each axis."""
    world: DeviceMesh
    """All ranks. It has the axes with more than one rank, and the ones FSDP always needs."""
    fsdp: DeviceMesh
    """FSDP2's axes: (dp_replicate, dp_shard x cp). Context-parallel ranks also share weights."""
    batch_group: dist.ProcessGroup
    """Ranks that see different tokens: dp_replicate x dp_shard x cp."""
    loss_group: dist.ProcessGroup
    """Ranks over which losses are summed: pp x `batch_group`. Only the last stage has a loss."""
    expert_fsdp: DeviceMesh | None = None
    """FSDP2's axes for experts, if they differ: (dp_replicate, efsdp), where efsdp is
    dp_shard x cp x tp / ep. Tensor-parallel ranks hold different tokens, so they don't split the
    matrices of an expert.
    """
    ep: DeviceMesh | None = None
    """The ranks that share all experts. None: each rank computes all of them."""

    def size(self, axis: str) -> int:
        return self.degrees[axis]

    def rank(self, axis: str) -> int:
        """This rank's coordinate along an axis."""
        return self.world.get_local_rank(axis) if self.degrees[axis] > 1 else 0

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks along an axis; None: this rank alone."""
        return self.world.get_group(axis) if self.degrees[axis] > 1 else None

    @property
    def tp(self) -> DeviceMesh | None:
        return self.world["tp"] if self.degrees["tp"] > 1 else None

    @property
    def dp_degree(self) -> int:
        """Number of ranks that read different rows."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def dp_rank(self) -> int:
        """This rank's index among the ranks that read different rows."""
        return self.rank("dp_replicate") * self.size("dp_shard") + self.rank("dp_shard")


_meshes: dict[tuple[object, ...], Mesh] = {}


def build_mesh(config: Config, device_type: str, *, experts: bool = False) -> Mesh:
    """Arrange all ranks of the default process group by the degrees of a validated configuration.

    The same degrees get the same mesh: process groups are expensive, and DTensor caches the first
    mesh it sees.

    Args:
        experts: the model is a mixture of experts.
    """
    degrees = axis_degrees(config.parallelism)
    replicas = degrees["dp_replicate"] > 1 or needs_replica_axis(config)
    ep = config.parallelism.expert_parallel_degree
    if not experts or ep == degrees["tp"] == 1:
        ep = 0
    key = (dist.group.WORLD, device_type, *degrees.values(), replicas, ep)
    if key not in _meshes:
        _meshes[key] = _build(degrees, device_type, replicas, ep)
    return _meshes[key]


def _build(degrees: dict[str, int], device_type: str, replicas: bool, ep: int) -> Mesh:
    """Build a mesh with one process group per distinct set of ranks, because groups use memory.

    Args:
        replicas: FSDP has an axis of replicas. It would all-reduce even in a group of one, so it
            is left out where possible.
        ep: number of ranks that share all experts; 0: experts see the same axes as other weights.
    """
    fsdp_axes = {"dp_shard": degrees["dp_shard"] == degrees["cp"] == 1, "dp_replicate": replicas}
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1 or fsdp_axes.get(axis)}
    world = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def across(*names: str) -> DeviceMesh:
        """A single axis along all axes of `names`."""
        axes_to_join = [name for name in names if degrees[name] > 1] or ["dp_shard"]
        if len(axes_to_join) == 1:
            return world[axes_to_join[0]]
        return world[tuple(axes_to_join)]._flatten("_".join(axes_to_join))

    def with_replicas(shards: DeviceMesh) -> DeviceMesh:
        if not replicas:
            return shards
        return DeviceMesh._concatenate([world["dp_replicate"], shards])

    fsdp = with_replicas(across("dp_shard", "cp"))
    expert_fsdp = None
    expert_ranks = None
    if ep:
        flat = across("dp_shard", "cp", "tp")
        expert_mesh = flat._unflatten(0, (flat.size() // ep, ep), ("efsdp", "ep"))
        expert_fsdp = with_replicas(expert_mesh["efsdp"])
        expert_ranks = expert_mesh["ep"] if ep > 1 else None
    return Mesh(
        degrees=degrees,
        world=world,
        fsdp=fsdp,
        batch_group=across("dp_replicate", "dp_shard", "cp").get_group(),
        loss_group=across("pp", "dp_replicate", "dp_shard", "cp").get_group(),
        expert_fsdp=expert_fsdp,
        ep=expert_ranks,
    )
