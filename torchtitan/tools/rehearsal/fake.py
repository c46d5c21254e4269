"""One rank of a simulated cluster: collectives that return at once, and tensors without memory.

PyTorch's `fake` backend replaces the network and `FakeTensorMode` the device. Tensors are nominally
on the CPU, since autograd needs a device that this build of torch supports.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import schedules, stage
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan.parallel.collectives import local, sharded_like
from torchtitan.utils.torch_compat import replaced


@contextmanager
def fake_cluster(world: int, rank: int) -> Iterator[FakeTensorMode]:
    """Make this process `rank` of a fake default process group of `world` ranks."""
    assert not dist.is_initialized(), "a fake cluster creates its own process group"
    with no_network() as mode:
        start_group(world, rank)
        try:
            yield mode
        finally:
            dist.destroy_process_group()


@contextmanager
def no_network() -> Iterator[FakeTensorMode]:
    """Let a rank of this project run on a fake process group, whose ranks exchange nothing."""
    propagate = aside(ShardingPropagator._propagate_tensor_meta_non_cached)
    with ExitStack() as stack:
        # DTensor runs each operation on fake tensors of global shape, which no rank ever holds.
        stack.enter_context(
            replaced(ShardingPropagator, _propagate_tensor_meta_non_cached=propagate)
        )
        store = _Store()
        stack.enter_context(replaced(distributed_c10d, _get_default_store=lambda: store))
        # Ranks exchange shapes first in torch 2.12 to 2.14; other releases lack the method.
        if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
            stack.enter_context(
                replaced(schedules._PipelineSchedule, _warmup_p2p=_use_static_shapes)
            )
        # torch 2.11 tests connections outside of that method, by sends of another shape.
        if hasattr(stage._PipelineStageBase, "_get_init_p2p_neighbors_ops"):
            stack.enter_context(
                replaced(stage._PipelineStageBase, _get_init_p2p_neighbors_ops=lambda _: [])
            )
        yield FakeTensorMode(allow_non_fake_inputs=True)


aside = _disable_current_modes()
"""A decorator: the function runs outside of fake mode and of the recorder."""


@aside
class _Store(dist.Store):
    """Stands for a job's store. The key of another rank, such as `process/0`, has the value that
    this rank set as `process/5`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key.rpartition("/")[0]] = value.encode() if isinstance(value, str) else value

    append = set

    def get(self, key: str) -> bytes:
        return self._values.get(key.rpartition("/")[0], b"")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, _: str, amount: int) -> int:
        return amount

    def check(self, _: Sequence[str]) -> bool:
        return False

    def wait(self, *_: Any) -> None: ...

    def set_timeout(self, _: timedelta) -> None: ...

    def clone(self) -> "_Store":
        return self


def start_group(world: int, rank: int) -> None:
    """Initialize a fake default process group."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def _use_static_shapes(schedule: Any, stages: Any, *_: Any) -> None:
    for pipeline_stage in stages:
        pipeline_stage._inference_mode = stage.InferenceMode.STATIC


def take_fake_memory(
    mode: FakeTensorMode, model: nn.Module, device: str | torch.device = "cpu"
) -> None:
    """Move a sharded model from the meta device to fake tensors, nominally on `device`."""
    with mode:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            owner, _, leaf = name.rpartition(".")
            fake = sharded_like(torch.empty_like(local(tensor), device=device), tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(fake) if is_parameter else fake)
