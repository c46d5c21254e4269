"""From a checked configuration to the parts of a run."""

import os
import random

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.components.data import StepLoader, build_loader
from torchtitan.components.optimizer import LRSchedule, build_optimizer
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.schema import Config, Debug, Training, Validation
from torchtitan.distributed.init import materialize
from torchtitan.distributed.mesh import Mesh, build_mesh
from torchtitan.distributed.parallelize import parallelize
from torchtitan.models.layers import attention_backend
from torchtitan.trainer.preflight import Plan
from torchtitan.trainer.state import Parts
from torchtitan.utils.logging import logger


def set_determinism(debug: Debug) -> None:
    """Seed every generator and, if asked, allow only deterministic algorithms."""
    random.seed(debug.seed)
    np.random.seed(debug.seed % 2**32)
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def build_model(config: Config, plan: Plan, mesh: Mesh, device: torch.device) -> FSDPModule:
    """The sharded model with its initial weights."""
    with torch.device("meta"):
        model = plan.spec.build(plan.args, attention_backend(device.type))
    parallelize(model, mesh, config.training, config.parallelism)
    home = torch.device("cpu") if config.training.enable_cpu_offload else device
    materialize(model, home, device, config.debug.seed, lambda fqn: plan.spec.init(fqn, plan.args))
    count = sum(p.numel() for p in model.parameters())
    logger.info(f"Model {config.model.name} {config.model.flavor}: {count:,} parameters on {mesh.dp_degree} rank(s)")
    return model


def build_data(
    key: str, section: Training | Validation, rows: int, tokenizer: Tokenizer, mesh: Mesh, seed: int
) -> StepLoader:
    """The loader of `[training]` or `[validation]`; `rows` per step over all ranks."""
    return build_loader(
        dataset=section.dataset,
        dataset_path=section.dataset_path,
        tokenizer=tokenizer,
        seq_len=section.seq_len,
        rows_per_step=rows,
        dp_rank=mesh.dp_rank,
        dp_degree=mesh.dp_degree,
        seed=seed,
        dataloader=section.dataloader,
        infinite=key == "training",
        key_prefix=key,
    )


def build(config: Config, plan: Plan, device: torch.device) -> Parts:
    """Everything the trainer works with. The default process group must exist."""
    mesh = build_mesh(config.parallelism, device.type)
    seed, validation = config.debug.seed, config.validation
    loader = build_data("training", config.training, config.training.global_batch_size, plan.tokenizer, mesh, seed)
    validation_loader = None
    if validation.enable:
        rows = validation.local_batch_size * mesh.dp_degree
        validation_loader = build_data("validation", validation, rows, plan.tokenizer, mesh, seed)
    model = build_model(config, plan, mesh, device)
    optimizer = build_optimizer(model, config.optimizer)
    schedule = LRSchedule(optimizer, config.optimizer.lr, config.lr_scheduler)
    return Parts(mesh, device, model, optimizer, schedule, loader, validation_loader)
