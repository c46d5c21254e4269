"""From a plain model to a distributed one: the ordered list of steps, the same for every model
family.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.derive import layout_degrees, layout_name
from torchtitan.config.features import FLOAT8, compiles_blocks, uses
from torchtitan.config.sections.schema import Config
from torchtitan.models.spec import ModelSpec
from torchtitan.parallel.activation_checkpoint import apply_activation_checkpoint
from torchtitan.parallel.activation_offload import apply_activation_offload
from torchtitan.parallel.compile import apply_compile, configure_compiler
from torchtitan.parallel.context import build_attention
from torchtitan.parallel.expert import apply_expert_parallel, balance_of
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.init import materialize
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import keep_modules, stage_modules
from torchtitan.parallel.pipeline_stages import StagePlan
from torchtitan.parallel.quantize import quantize
from torchtitan.parallel.tensor import apply_tensor_parallel
from torchtitan.utils.logging import logger
from torchtitan.utils.torch_compat import must_save_attention, silence_false_alarms


def parallelize(
    config: Config,
    spec: ModelSpec,
    args: Any,
    stages: StagePlan | None,
    mesh: Mesh,
    device: torch.device,
    *,
    fill: Callable[..., None] = materialize,
) -> list[FSDPModule]:
    """This rank's part of the model, sharded and with its initial weights: one module, or one for
    each pipeline stage.

    Nothing is allocated before `fill`, and nothing is communicated.

    Args:
        args: the family's hyper-parameters.
        device: where this rank computes.
        fill: allocates and initializes the sharded model; called as `materialize` is.
    """
    training = config.training
    p = config.parallelism
    tp_degree = mesh.size("tp")
    sharded_loss = not p.disable_loss_parallel
    float8 = uses(config, FLOAT8)
    save_attention = must_save_attention(compiled=compiles_blocks(config), tp_degree=tp_degree)
    home = torch.device("cpu") if training.enable_cpu_offload else device
    silence_false_alarms()
    configure_compiler(config, mesh)
    attend = build_attention(mesh, p, device)  # context parallelism
    apart = mesh.expert_fsdp is not None
    models = []
    parameters = 0
    for modules in stage_modules(stages, mesh.rank("pp")):
        with torch.device("meta"):
            model: Any = spec.build(args, attend)
        parameters = sum(weight.numel() for weight in model.parameters())
        keep_modules(model, modules)
        model.to(getattr(torch, training.dtype))
        quantize(model, config, tp_degree)
        apply_expert_parallel(model, mesh, balance_of(config))
        apply_tensor_parallel(
            model, mesh.tp, spec.tensor_parallel_styles, sharded_loss=sharded_loss, float8=float8
        )
        apply_activation_checkpoint(
            model, config.activation_checkpoint, save_attention=save_attention, experts_apart=apart
        )
        apply_compile(model, config, experts_apart=apart)
        apply_activation_offload(model, config.activation_checkpoint)
        apply_fsdp(
            model, mesh, training, p.fsdp_reshard_after_forward, pipelined=stages is not None
        )
        fill(model, home, device, config.debug.seed, lambda fqn: spec.init(fqn, args))
        models.append(model)
    layout = layout_name(layout_degrees(p))
    logger.info(
        f"Model {config.model.name} {config.model.flavor}: {parameters:,} parameters on {layout}"
    )
    return models
