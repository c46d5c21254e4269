"""What one training step asks of the device.

    python benchmarks/cpu/step_trace.py --ranks 64 [--rank 0] -- TOML and flags

One rank of a fake process group of any size runs the trainer's own step on tensors without memory,
on a device that doesn't exist. Printed, by phase of the step: kernels (operators that compute;
views and allocations are free), launches, the bytes they read and write, collectives by process
group, and host waits with the line that causes each. Operators on lists of tensors, as optimizers
use, start several launches on CUDA, by PyTorch's limits for CUDA 13 (`--cuda 12`: for CUDA 12). A
host wait is an operator for which the host must stop until the device has caught up: reading a
value, or a copy from or to pageable memory. The step is eager: attention is one operator, RMSNorm
several.

    python benchmarks/cpu/step_trace.py --ranks 8 -- --job.config_file=train_configs/llama3_8b.toml

One process can trace one step.
"""

import argparse
import json
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "lazy"
"""A device type that no build of PyTorch implements, and for which autograd needs no thread."""
_FREE = (
    "unsafe_view",
    "empty",
    "detach",
    "lift",
    "record_stream",
    "resize_",
    "is_pinned",
    "set_",
    "wait_tensor",
    "new_empty",
)
"""Beginnings of names of operators that start no kernel, besides views."""
CHUNK = 65_536
"""Elements of a block of a multi-tensor kernel (`ATen/native/cuda/MultiTensorApply.cuh`)."""
LIMITS = {12: (320, (110, 64, 48, 36, 30)), 13: (2240, (770, 448, 336, 252, 210))}
"""By version of CUDA, from there: blocks of a launch, and its tensors by the number of lists."""


@dataclass
class Phase:
    """What a part of the step did."""

    kernels: Counter[str] = field(default_factory=Counter)
    """By operator."""
    launches: int = 0
    bytes: Counter[str] = field(default_factory=Counter)
    """Read and written, by operator."""
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (process group, operator)."""
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes of the collectives."""
    waits: list[str] = field(default_factory=list)
    """`file:line operator` of each host wait."""


class StepCounter(TorchDispatchMode):
    """Counts what runs on the device, below DTensor."""

    def __init__(self, cuda: int = 13) -> None:
        super().__init__()
        self.limits = LIMITS[cuda]
        self.phases: dict[str, Phase] = {}
        self.phase = "rest"
        self.pinned: set[int] = set()
        self._reads: set[tuple[str, int]] = set()
        self.kept: list[Tensor] = []

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        before = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = func._overloadpacket.__name__
        inputs = list(_tensors((args, list(kwargs.values()))))
        backward = self.phase == "forward" and torch._C._current_graph_task_id() != -1
        phase = self.phases.setdefault("backward" if backward else self.phase, Phase())
        if name in ("is_pinned", "_pin_memory", "pin_memory"):
            return self._pin(name, inputs[0])
        if name == "_local_scalar_dense":
            read = _caller(), inputs[0].untyped_storage()._cdata
            if inputs[0].device.type == DEVICE and read not in self._reads:  # `tolist` reads once
                self._reads.add(read)
                self.kept.append(inputs[0])  # or another tensor gets its storage's address
                phase.waits.append(f"{read[0]} {name}")
            return 1 if not inputs[0].is_floating_point() else 1.0
        out = func(*args, **kwargs)
        outputs = list(_tensors(out))
        if (
            func.namespace in ("c10d", "_c10d_functional", "c10d_functional")
            and name != "wait_tensor"
        ):
            key = _group(args), name.strip("_")
            phase.collectives[key] += 1
            phase.moved[key] += max([_nbytes(x) for x in (*inputs, *outputs)], default=0)
        elif any(x.device.type == DEVICE for x in (*inputs, *outputs)) and not self._free(
            func, name
        ):
            phase.kernels[name] += 1
            phase.launches += self._launches(name, args, out)
            phase.bytes[name] += sum(map(_nbytes, inputs)) + (
                0 if name.endswith("_") else sum(map(_nbytes, outputs))
            )
            if self._waits(name, inputs, outputs, args, kwargs):
                phase.waits.append(f"{_caller()} {name}")
        return out

    def _launches(self, name: str, args: Sequence[Any], out: Any) -> int:
        """As `multi_tensor_apply` counts: full at a number of tensors, or of chunks of them."""
        if not name.startswith(("_foreach_", "_fused_")):
            return 1
        lists = [x for x in (*args, out) if isinstance(x, (list, tuple)) and len(x)]
        if name.startswith("_fused_"):
            lists = lists[:4]  # the fifth are steps, one for each tensor
        norm = name == "_foreach_norm"
        depth = 1 if norm else len(lists)
        most_blocks, most_tensors = self.limits[0], self.limits[1][depth - 1]
        launches = blocks = tensors = 0
        for tensor in lists[0]:
            chunks = -(-tensor.numel() // CHUNK)
            tensors += chunks > 0
            for chunk in range(chunks):
                blocks += 1
                last = chunk == chunks - 1
                if blocks == most_blocks or (last and tensors == most_tensors):
                    launches += 1
                    blocks = 0
                    tensors = 0 if last else 1
        # A norm ends with sums of its chunks' sums.
        return launches + (blocks > 0) + norm * -(-len(lists[0]) // most_tensors)

    def _free(self, func: Any, name: str) -> bool:
        return func.is_view or func.namespace == "prim" or name.strip("_").startswith(_FREE)

    def _waits(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Any, kwargs: Any
    ) -> bool:
        if name in ("nonzero", "masked_select", "equal", "unique_dim", "_unique2", "is_nonzero"):
            return True
        if name in ("_to_copy", "copy_"):
            source, target = (
                (inputs[0], outputs[0]) if name == "_to_copy" else (inputs[1], inputs[0])
            )
            if source.device.type == target.device.type:
                return False
            asynchronous = kwargs.get(
                "non_blocking", args[2] if name == "copy_" and len(args) > 2 else False
            )
            host = source if source.device.type == "cpu" else target
            return not (asynchronous and host.untyped_storage()._cdata in self.pinned)
        if not name.startswith("index"):
            return False
        # of a scalar: masked_fill on CUDA
        if name.startswith("index_put") and inputs[-1].numel() == 1:
            return False
        return any(x.dtype == torch.bool or x.device.type == "cpu" for x in inputs[1:])

    def _pin(self, name: str, tensor: Tensor) -> Any:
        if name == "is_pinned":
            return tensor.untyped_storage()._cdata in self.pinned
        copy = torch.empty_like(tensor)
        self.kept.append(copy)
        self.pinned.add(copy.untyped_storage()._cdata)
        return copy


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _group(args: Sequence[Any]) -> str:
    for arg in reversed(args):
        if isinstance(arg, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(arg).group_name
            except (RuntimeError, TypeError):  # a reduction operator is a ScriptObject too
                continue
        if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min"):
            return arg
    return ""


def _caller() -> str:
    """The innermost line of this project."""
    for frame in reversed(traceback.extract_stack()):
        if "/torchtitan/" in frame.filename.replace("\\", "/"):
            return f"{frame.filename.rpartition('/torchtitan/')[2]}:{frame.lineno}"
    return "?"


# ---- a device that doesn't exist


@torch.library.custom_op("benchmarks::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise NotImplementedError


@torch.library.custom_op("benchmarks::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


_attention.register_fake(lambda q, k, v: torch.empty_like(q))
_attention_backward.register_fake(lambda grad, *qkv: tuple(map(torch.empty_like, qkv)))
_attention.register_autograd(
    lambda ctx, grad: _attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class _Stream:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *_: Any, **__: Any): ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def _nothing(self, *_: Any) -> None: ...

    record = wait = wait_stream = wait_event = synchronize = _nothing


def make_device() -> torch.device:
    """Register a device that tensors of `FakeTensorMode` can be on. Once per process."""
    stream = _Stream()
    module = SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda *_: None,
        get_rng_state=lambda *_: torch.empty(1, dtype=torch.uint8),
        set_rng_state=lambda *_: None,
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda *_: stream,
        stream=lambda stream: stream or nullcontext(),
    )
    torch._register_device_module(DEVICE, module)
    return torch.device(DEVICE, 0)


# ---- the step


@dataclass(frozen=True)
class StepTrace:
    phases: dict[str, Phase]
    groups: dict[str, tuple[str, int]]
    """Of the process groups that this rank is in: description and size, by name."""

    @property
    def waits(self) -> list[str]:
        return [wait for phase in self.phases.values() for wait in phase.waits]

    def kernels(self, phase: str) -> int:
        return self.phases[phase].kernels.total()


def trace_step(
    arguments: Sequence[str], world: int, rank: int = 0, *, acts: bool = False, cuda: int = 13
) -> StepTrace:
    """Trace the second step of one rank; the first makes the optimizer's state.

    Args:
        arguments: of `torchtitan train`.
        acts: the guard must judge a step before the weights change.
        cuda: 12 or 13, for the number of launches.

    Raises:
        ConfigError: the configuration is wrong.
    """
    from torchtitan.config import resolve
    from torchtitan.data.loader import StepBatch
    from torchtitan.parallel import parallelize as parallel
    from torchtitan.parallel.mesh import build_mesh
    from torchtitan.tools.rehearsal.fake import aside, fake_cluster, take_fake_memory
    from torchtitan.train import build, preflight, step
    from torchtitan.train.engine import Engine

    config = resolve([*arguments, "--compile.enable=false"], world).config
    setup = preflight.preflight(config, output=False)
    device = make_device()
    counter = StepCounter(cuda)

    def counted(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with counter.within(phase):
                return function(*args, **kwargs)

        return run

    with ExitStack() as stack:
        mode = stack.enter_context(fake_cluster(world, rank))
        attention = "torch.nn.functional.scaled_dot_product_attention"
        stack.enter_context(patch(attention, lambda q, k, v, **_: _attention(q, k, v)))
        for kind in ("fused", "foreach"):
            for module in ("optim.optimizer", "utils._foreach_utils"):
                name = f"torch.{module}._get_{kind}_kernels_supported_devices"
                stack.enter_context(patch(name, lambda: [DEVICE]))
        mesh = build_mesh(config, device.type)

        def fill(model: Any, *_: Any) -> None:
            take_fake_memory(mode, model, device)

        stack.enter_context(patch.object(DeviceMesh, "__init__", aside(DeviceMesh.__init__)))

        def shard(*args: Any, **kwargs: Any) -> None:
            with mode:  # FSDP allocates on the device
                apply_fsdp(*args, **kwargs)

        apply_fsdp = parallel.apply_fsdp
        stack.enter_context(patch.object(parallel, "apply_fsdp", shard))
        models = parallel.parallelize(
            config, setup.spec, setup.args, setup.stages, mesh, device, fill=fill
        )
        with mode:
            compute = build.build_compute(
                config, setup, mesh, device, models=models, section=config.training
            )
            optimizer = build.build_optimizer(models, config.optimizer)
            schedule = build.LRSchedule(optimizer, config.optimizer.lr, config.lr_scheduler)
            engine = Engine(
                config,
                setup,
                mesh,
                device,
                models=models,
                optimizer=optimizer,
                schedule=schedule,
                loader=None,
                compute=compute,
            )
            batches = -(
                -config.training.global_batch_size
                // (mesh.dp_degree * config.training.local_batch_size)
            )
            shape = batches * config.training.local_batch_size, config.training.seq_len
            update = step.build_update(engine, agree=acts)
            patches = (
                (compute, "forward_backward", "forward"),
                (optimizer, "step", "update"),
                (update, "clip", "clip"),
            )
            for owner, name, phase in patches:
                if hasattr(owner, name):
                    stack.enter_context(
                        patch.object(owner, name, counted(phase, getattr(owner, name)))
                    )
            for _ in range(2):
                counter.phases.clear()
                with counter:
                    tokens = torch.zeros(shape, dtype=torch.int64).pin_memory()
                    batch = StepBatch(tokens, tokens.clone().pin_memory(), {}, len(tokens))
                    step.train_step(engine, batch, update=update, approve=lambda loss, norm: True)
        groups = {
            g.group_name: (g.group_desc, g.size()) for g in dist.distributed_c10d._world.pg_map
        }
    return StepTrace(counter.phases, groups)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, default=1)
    options.add_argument("--rank", type=int, default=0)
    options.add_argument("--cuda", type=int, default=13, choices=LIMITS)
    options.add_argument(
        "--top", type=int, default=8, help="operators to print for each phase, by bytes"
    )
    options.add_argument(
        "--json", action="store_true", help="print one JSON line of totals instead"
    )
    options.add_argument("arguments", nargs="*", help="of `torchtitan train`, after --")
    told = options.parse_args()
    warnings.simplefilter("ignore")
    trace = trace_step(told.arguments, told.ranks, told.rank, cuda=told.cuda)
    totals = {
        "kernels": {name: phase.kernels.total() for name, phase in trace.phases.items()},
        "launches": {name: phase.launches for name, phase in trace.phases.items()},
        "gib": {
            name: round(phase.bytes.total() / 2**30, 3) for name, phase in trace.phases.items()
        },
        "collectives": {name: phase.collectives.total() for name, phase in trace.phases.items()},
        "waits": trace.waits,
        "groups": len(trace.groups),
    }
    if told.json:
        print(json.dumps(totals))
        return
    for name, phase in trace.phases.items():
        print(
            f"{name}: {phase.kernels.total():,} kernels, {phase.launches:,} launches, "
            f"{phase.bytes.total() / 2**30:,.2f} GiB read and written"
        )
        for operator, count in phase.bytes.most_common(told.top):
            print(f"  {operator:40} {phase.kernels[operator]:7,} {count / 2**30:10,.3f} GiB")
        for (group, operator), count in phase.collectives.most_common():
            description, size = trace.groups.get(group, ("", 0))
            moved = phase.moved[group, operator] / 2**30
            print(
                f"  {operator:30} {count:5,} {moved:10,.3f} GiB over {size} ranks, "
                f"{description or group}"
            )
    print(f"host waits: {len(trace.waits)}", *trace.waits, sep="\n  ")
    print(f"process groups of this rank: {len(trace.groups)}", end=": ")
    print(", ".join(f"{text} ({size})" for text, size in trace.groups.values()))


if __name__ == "__main__":
    main()
