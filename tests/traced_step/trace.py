"""Trace a training step of one pipeline rank: memory, FLOPs, collectives, without a GPU.

The functions that a run uses build, split, shard and checkpoint the model on a fake process group
of the full size, and take one step on tensors without memory (`docs/internals/plan.md`).
"""

import dataclasses
import itertools
import logging
import multiprocessing
import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard

from tests.traced_step.allocator import peak_by_part, replay
from tests.traced_step.cuda import LOSSES, recording
from tests.traced_step.tracer import Tracer
from torchtitan.config.converters import GROUPED_MX, MX, converts_experts, uses
from torchtitan.config.derive import compiles_blocks, gradient_accumulation_steps, replace
from torchtitan.config.registry import import_custom
from torchtitan.config.sections.schema import Config
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.decoder.model import MoEBlock
from torchtitan.optim.ema import WeightAverage
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.parallel.fsdp import expect_backward
from torchtitan.parallel.mesh import Mesh, build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.precision.dense import quantize
from torchtitan.tools.planner.memory import CATEGORIES
from torchtitan.tools.rehearsal.fake import fake_cluster, take_fake_memory
from torchtitan.train.build import build_compute
from torchtitan.train.engine import Engine
from torchtitan.train.forward import Compute
from torchtitan.train.preflight import Setup, preflight
from torchtitan.train.step import build_update, device_step
from torchtitan.utils.torch_compat import replaced

_TRACED_BATCHES = 3
"""Batches of an accumulated step that are traced: the first, one in the middle, and the last."""


@dataclass(frozen=True)
class RankTrace:
    """A pipeline rank's step in the steady state, with all state and buffers allocated."""

    rank: int
    """Global rank of the first rank at this place of the pipeline."""
    pp_rank: int
    memory: dict[str, int]
    """Bytes of each of `CATEGORIES` at the peak."""
    peak_active: int
    """Their sum: bytes of all live tensors."""
    peak_reserved: int
    """Bytes that the caching allocator reserves on the device."""
    flops: dict[tuple[str, str], float]
    """Keys: (`matmul` or `attention`, dtype). With recomputation; causal attention counts half."""
    collectives: dict[str, dict[str, tuple[int, int]]]
    """Mesh axis to operation to (calls, bytes): bytes of a gather's result, a reduction's input, or
    what is sent.
    """


def trace_ranks(
    config: Config, world: int, pp_ranks: Iterable[int], *, device_type: str = "cuda"
) -> list[RankTrace]:
    """Trace several pipeline ranks, each in its own process, in parallel.

    PyTorch keeps references to process groups and meshes after they are destroyed, so a process
    that has traced can't be reused.

    Args:
        config: derived and validated for `world` ranks.
        pp_ranks: places along the `pp` axis.
        device_type: as for `trace_rank`.

    Raises:
        ConfigError: `preflight` refuses `config`.
    """
    ranks = list(pp_ranks)
    ac = config.activation_checkpoint
    # `memory_budget` is the share, between nothing and everything, that the compiler keeps.
    modes = ["full", "none"] if ac.mode == "memory_budget" else [ac.mode]
    jobs = []
    for mode in modes:
        changed = replace(config, "activation_checkpoint.mode", mode)
        jobs += [(changed, rank) for rank in ranks]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with ProcessPoolExecutor(
        min(cores, len(jobs)), mp_context=context, max_tasks_per_child=1
    ) as pool:
        traces = list(pool.map(partial(_trace_alone, world, device_type), *zip(*jobs, strict=True)))
    if len(modes) == 1:
        return traces
    full = traces[: len(ranks)]
    none = traces[len(ranks) :]
    return [_between(a, b, ac.memory_budget) for a, b in zip(full, none, strict=True)]


def _trace_alone(world: int, device_type: str, config: Config, pp_rank: int) -> RankTrace:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # about a run, which this is not
    warnings.simplefilter("ignore")
    if config.experimental.custom_import:
        import_custom(config.experimental.custom_import)
    return trace_rank(
        config, preflight(config, output=False), world, pp_rank, device_type=device_type
    )


def _between(a: RankTrace, b: RankTrace, share: float) -> RankTrace:
    """Linear interpolation from `a` to `b`."""

    def mix(x: float, y: float) -> int:
        return round(x + share * (y - x))

    return dataclasses.replace(
        a,
        memory={name: mix(a.memory[name], b.memory[name]) for name in CATEGORIES},
        peak_active=mix(a.peak_active, b.peak_active),
        peak_reserved=mix(a.peak_reserved, b.peak_reserved),
        flops={kind: a.flops[kind] + share * (b.flops[kind] - a.flops[kind]) for kind in a.flops},
    )


def trace_rank(
    config: Config, setup: Setup, world: int, pp_rank: int = 0, *, device_type: str = "cuda"
) -> RankTrace:
    """Trace a step in this process, which can't trace or communicate again afterwards.

    Args:
        config: derived and validated for `world` ranks.
        setup: from `preflight`.
        pp_rank: place along the `pp` axis; all ranks at one place do the same.
        device_type: trace what would happen on `cuda`, or on `cpu`.
    """
    degree = config.parallelism.pipeline_parallel_degree
    with fake_cluster(world, pp_rank * (world // degree)) as mode:
        tracer, events, lasting = _record(config, setup, mode, cuda=device_type == "cuda")
    blocks = tracer.blocks
    if config.training.enable_cpu_offload and device_type == "cuda":
        host = {
            i
            for i, block in enumerate(blocks)
            if block.part in ("parameters", "gradients", "optimizer")
        }
        events = [(number, new) for number, new in events if number not in host]
        lasting -= host
    steady = [(number, new) for number, new in events if number not in lasting]
    memory = peak_by_part(blocks, sorted(lasting), steady)
    active = sum(memory.values())
    collectives: dict[str, dict[str, tuple[int, int]]] = {}
    for (axis, kind), calls in sorted(tracer.counts.calls.items()):
        collectives.setdefault(axis, {})[kind] = calls, tracer.counts.bytes[axis, kind]
    return RankTrace(
        rank=pp_rank * (world // degree),
        pp_rank=pp_rank,
        memory=memory,
        peak_active=active,
        peak_reserved=replay(blocks, events, steady) if device_type == "cuda" else active,
        flops={kind: float(count) for kind, count in tracer.counts.flops.items()},
        collectives=collectives,
    )


def _record(
    config: Config, setup: Setup, mode: FakeTensorMode, *, cuda: bool
) -> tuple[Tracer, list[tuple[int, bool]], set[int]]:
    """Run one eager step. Returns its tracer, its allocations, and the blocks that outlive it:
    parameters, buffers and optimizer state.
    """
    eager = _eager(config, cuda)
    t = eager.training
    device = torch.device("cpu")
    mesh = build_mesh(config, device.type, experts=bool(setup.spec.expert_sizes(setup.args)))
    shapes: dict[str, tuple[int, ...]] = {}

    def fill(model: nn.Module, *_: Any) -> None:
        shapes.update({name: _gathered_shape(param) for name, param in model.named_parameters()})
        take_fake_memory(mode, model)

    models = parallelize(
        eager, setup.spec, setup.args, setup.stages, mesh, device, fill=fill, splits=equal_splits
    )
    vocabulary = setup.args.vocab_size
    tracer = Tracer(
        _axes(mesh),
        weights=shapes.values(),
        vocabulary={vocabulary, vocabulary // mesh.size("tp")},
        eight_bit=_eight_bit(config, setup, shapes),
        cuda=cuda,
    )
    if compiles_blocks(config):
        _drop_unneeded(tracer, models)
    fused = config.compile.enable and "loss" in config.compile.components
    with mode:
        compute = build_compute(
            eager, setup, mesh, device, models=models, section=t, loss=LOSSES[fused]
        )
        compute.expect_backward = partial(expect_backward, config=config)
        optimizer = build_optimizer(models, eager.optimizer, eager.custom, setup.width_ratio)
        average = WeightAverage(models, eager.ema) if eager.ema.enable else None
        engine = Engine(
            eager,
            setup,
            mesh,
            device,
            models=models,
            optimizer=optimizer,
            schedule=None,  # type: ignore[arg-type]
            loader=None,  # type: ignore[arg-type]
            compute=compute,
        )
        params = [param for model in models for param in model.parameters()]
        _track(tracer, models, average)
        _track_copies(tracer, models)
        before = len(tracer.events)
        with (
            recording(tracer, cuda=cuda),
            _scaled(tracer, compute, gradient_accumulation_steps(config)) as batches,
        ):
            tokens = torch.empty(batches * t.local_batch_size, t.seq_len, dtype=torch.int64)
            rows = compute.local_rows(tokens, tokens.clone())
            device_step(engine, rows, 1, build_update(engine, agree=True))
            tracer.rename([param.grad for param in params if param.grad is not None], "gradients")
            tracer.phase = "update"
            optimizer.step()
            state = itertools.chain(*(slots.values() for slots in optimizer.state.values()))
            lasting = tracer.rename([x for x in state if isinstance(x, Tensor)], "optimizer")
            optimizer.zero_grad(set_to_none=True)
            if average is not None:
                for _ in range(2):  # the first is a copy
                    average.update(eager.ema.start_step)
            del tokens, rows
            events = list(tracer.events)  # later events are the model being freed
    return tracer, events, lasting | {number for number, _ in events[:before]}


def _drop_unneeded(tracer: Tracer, models: list[nn.Module]) -> None:
    """Drop what a compiler drops; gradients of experts need everything that is kept."""
    for model in models:
        for block in model.layers.values():
            if not isinstance(block, MoEBlock):
                block.register_forward_hook(tracer.drop_unneeded)


def _track(tracer: Tracer, models: list[nn.Module], average: WeightAverage | None) -> None:
    """Count what exists before the step."""
    for model in models:
        for param in model.parameters():
            tracer.track(param, "parameters")
    for model in models:
        for buffer in model.buffers():
            tracer.track(buffer, "other")
    if average is not None:
        for mean in average.tensors.values():
            tracer.track(mean, "optimizer")


def _track_copies(tracer: Tracer, models: list[nn.Module]) -> None:
    """Count copies that stand in for the weights as gathered weights."""
    weights = {param for model in models for param in model.parameters()}

    def rename(model: nn.Module, _: Any) -> None:
        tracer.rename([x for x in model.parameters() if x not in weights], "unsharded")

    for model in models:
        model.register_forward_pre_hook(rename)


def _eager(config: Config, cuda: bool) -> Config:
    """The part of `config` that can be traced (`docs/internals/plan.md` has the rest)."""
    model = config.model.model_copy(update={"converters": []})
    compile_ = config.compile.model_copy(update={"enable": False})
    # On CUDA a mask within documents is a few bytes per token, and its kernel takes no more memory.
    mask = config.training.document_mask and not cuda
    training = config.training.model_copy(
        update={"document_mask": mask, "enable_cpu_offload": False}
    )
    return config.model_copy(update={"model": model, "compile": compile_, "training": training})


def equal_splits(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Numbers of rows, as in `count_splits`, where all ranks are sent equally many."""
    ranks = len(sent)
    equal = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    return equal, equal


@contextmanager
def _scaled(tracer: Tracer, compute: Compute, batches: int) -> Iterator[int]:
    """Trace at most three batches; the middle one stands for those left out."""
    traced = min(batches, _TRACED_BATCHES)
    marks = []
    run = compute.forward_backward

    def marked(*args: Any, **kwargs: Any) -> Tensor:
        marks.append(tracer.counts.copy())
        return run(*args, **kwargs)

    with replaced(compute, forward_backward=marked):
        yield traced
    if batches > traced:
        tracer.counts.repeat(marks[1], marks[2], batches - traced)


def _gathered_shape(param: Tensor) -> tuple[int, ...]:
    """Shape of a weight in compute: split by tensor or expert parallelism, gathered by FSDP."""
    shape = list(param.shape)
    if isinstance(param, DTensor):
        for axis, placement in zip(
            param.device_mesh.mesh_dim_names or (), param.placements, strict=True
        ):
            if axis in ("tp", "ep") and isinstance(placement, Shard):
                shape[placement.dim] //= param.device_mesh[axis].size()
    return tuple(shape)


def _eight_bit(
    config: Config, setup: Setup, shapes: dict[str, tuple[int, ...]]
) -> dict[tuple[int, ...], str]:
    """Operand type of the layers that `model.converters` changes, by the weight's shape."""
    if not config.model.converters:
        return {}
    with torch.device("meta"):
        model = setup.spec.build(setup.args, attention_backend("cpu"))
    quantize(model, config)
    kind = "mxfp8" if uses(config, MX) else "float8"
    changed = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear
    ]
    found = {shapes[f"{name}.weight"]: kind for name in changed if f"{name}.weight" in shapes}
    if any(converts_experts(config, name) for name in shapes if ".moe.experts." in name):
        kind = "mxfp8" if uses(config, GROUPED_MX) else "float8"
        found |= {shape: kind for name, shape in shapes.items() if ".moe.experts." in name}
    return found


def _axes(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Mesh axes by the name of their process group. FSDP's is dp_shard x cp, for experts dp_shard x
    cp x tp / ep.
    """
    parts = {
        axis: g
        for axis in ("pp", "dp_replicate", "cp", "tp")
        if (g := mesh.group(axis)) is not None
    }
    parts["fsdp"] = mesh.fsdp.get_group(mesh.fsdp.ndim - 1)
    if mesh.expert_fsdp is not None:
        parts["efsdp"] = mesh.expert_fsdp.get_group(mesh.expert_fsdp.ndim - 1)
    if mesh.ep is not None:
        parts["ep"] = mesh.ep.get_group()
    named = {"loss": mesh.loss_group, "batch": mesh.batch_group}
    axes: dict[str, tuple[str, ...]] = {
        group.group_name: (axis,) for axis, group in named.items() if group.size() > 1
    }
    for name in {group.group_name for group in parts.values() if group.size() > 1}:
        axes[name] = tuple(axis for axis, group in parts.items() if group.group_name == name)
    return axes
