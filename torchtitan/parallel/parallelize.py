"""Turn a plain model into a distributed one: one ordered list of steps for all model families."""

from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.converters import FLOAT8, uses
from torchtitan.config.derive import layout_degrees, layout_name
from torchtitan.config.sections.schema import Config
from torchtitan.models.delta.layer import use_fla
from torchtitan.models.spec import ModelArgs, ModelSpec
from torchtitan.parallel.compile import apply_compile, configure_compiler
from torchtitan.parallel.context.attention import build_attention
from torchtitan.parallel.context.delta import apply_delta_context
from torchtitan.parallel.experts.shard import (
    Splits,
    apply_expert_parallel,
    build_balance,
    count_splits,
)
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.init import materialize
from torchtitan.parallel.memory.checkpoint import apply_activation_checkpoint
from torchtitan.parallel.memory.offload import apply_activation_offload
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline.pipeline import keep_modules, stage_modules
from torchtitan.parallel.pipeline.split import PipelinePlan
from torchtitan.parallel.precision.copies import WeightCopies
from torchtitan.parallel.precision.dense import quantize
from torchtitan.parallel.tensor.styles import apply_tensor_parallel
from torchtitan.utils.logging import logger
from torchtitan.utils.torch_compat import silence_false_alarms


def parallelize(
    config: Config,
    spec: ModelSpec,
    args: ModelArgs,
    stages: PipelinePlan | None,
    mesh: Mesh,
    device: torch.device,
    *,
    fill: Callable[..., None] = materialize,
    splits: Splits = count_splits,
    modules_of: Callable[[PipelinePlan | None, int], list[tuple[str, ...] | None]] = stage_modules,
) -> list[FSDPModule]:
    """Build this rank's part of the model, sharded and initialized: a module per pipeline stage.

    Everything before `fill` works on the meta device and allocates nothing. Nothing communicates.

    Args:
        stages: the pipeline; None without pipeline parallelism.
        device: where this rank computes.
        fill: allocates and initializes the sharded model; called like `materialize`.
        splits: returns the numbers of rows that experts' ranks exchange, like `count_splits`.
        modules_of: returns the modules' names of each stage of a rank, like `stage_modules`.
    """
    training = config.training
    p = config.parallelism
    ac = config.activation_checkpoint
    experts_apart = mesh.expert_fsdp is not None
    silence_false_alarms()
    configure_compiler(config, mesh, device, args.dim)
    attend = build_attention(mesh, p, device)  # context parallelism
    models = []
    parameter_count = 0
    for modules in modules_of(stages, mesh.rank("pp")):
        with torch.device("meta"):
            model = spec.build(args, attend)
        parameter_count = sum(weight.numel() for weight in model.parameters())
        keep_modules(model, modules)
        model.to(getattr(torch, training.dtype))
        if config.model.delta_rule == "fla":
            use_fla(model)
        quantize(model, config)
        apply_expert_parallel(model, mesh, build_balance(config), splits)
        apply_tensor_parallel(
            model,
            mesh.tp,
            spec.tensor_parallel_styles,
            sharded_loss=not p.disable_loss_parallel,
            float8=uses(config, FLOAT8),
        )
        apply_delta_context(model, mesh, p)
        apply_activation_checkpoint(model, ac, experts_apart=experts_apart)
        apply_compile(model, config, experts_apart=experts_apart)
        apply_activation_offload(model, ac)
        apply_fsdp(model, mesh, config, tied=bool(spec.tied_modules(args)))
        weights_device = torch.device("cpu") if training.enable_cpu_offload else device
        fill(model, weights_device, device, config.debug.seed, lambda fqn: spec.init(fqn, args))
        model.copies = WeightCopies(model, getattr(torch, training.mixed_precision_param))
        models.append(model)
    layout = layout_name(layout_degrees(p))
    logger.info(f"Model {config.model.label}: {parameter_count:,} parameters on {layout}")
    return models
