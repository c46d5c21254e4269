"""The device mesh: which ranks shard, which replicate, and which rows of the data each one reads."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.config.schema import Parallelism


@dataclass(frozen=True)
class Mesh:
    """The ranks, arranged in axes from outer to inner: dp_replicate, dp_shard."""

    world: DeviceMesh

    @property
    def fsdp(self) -> DeviceMesh:
        """Axes for FSDP2: (dp_replicate, dp_shard) for HSDP and DDP, dp_shard alone where nothing is replicated."""
        return self.world["dp_shard"] if self.world["dp_replicate"].size() == 1 else self.world

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """Ranks over which the loss and token counts are summed: all that read different data."""
        return dist.group.WORLD

    @property
    def dp_degree(self) -> int:
        """Number of ranks that read different data."""
        return self.world.size()

    @property
    def dp_rank(self) -> int:
        """This rank's place among those that read different data."""
        replicate, shard = self.world.get_coordinate()
        return replicate * self.world.size(1) + shard


def build_mesh(parallelism: Parallelism, device_type: str) -> Mesh:
    """Arrange all ranks of the default process group by the (derived, validated) degrees."""
    degrees = (parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree)
    return Mesh(init_device_mesh(device_type, degrees, mesh_dim_names=("dp_replicate", "dp_shard")))
