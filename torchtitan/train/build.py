"""From a checked configuration to the parts of a run."""

import os
import random
from collections.abc import Callable

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.derive import axis_degrees, layout_name
from torchtitan.config.schema import Comm, Config, Debug, Training, Validation
from torchtitan.data.loader import StepLoader, build_loader
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.layers import attention_backend
from torchtitan.optim.loss import LossSum, cross_entropy_sum
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.schedule import LRSchedule
from torchtitan.parallel.activation_checkpoint import use_memory_budget
from torchtitan.parallel.compile import compiled_loss, configure_compiler
from torchtitan.parallel.context import local_positions, ring_attention_backend
from torchtitan.parallel.init import materialize
from torchtitan.parallel.mesh import Mesh, build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.pipeline import Pipeline, keep_modules
from torchtitan.train.compute import Compute
from torchtitan.train.preflight import Setup
from torchtitan.train.state import Parts
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


def build_models(
    config: Config, setup: Setup, mesh: Mesh, device: torch.device, *, fill: Callable[..., None] = materialize
) -> list[FSDPModule]:
    """The sharded model with its initial weights; of a pipeline, this rank's stages.

    Args:
        fill: gives the sharded model on the meta device its memory; called as `materialize` is.
    """
    p = config.parallelism
    if mesh.size("cp") > 1:
        balanced = bool(p.context_parallel_load_balancer)
        attend = ring_attention_backend(mesh.group("cp"), p.context_parallel_rotate_method, balanced)
    else:
        attend = attention_backend(device.type)
    parts = [setup.stages.modules[i] for i in setup.stages.stages_of(mesh.rank("pp"))] if setup.stages else [None]
    home = torch.device("cpu") if config.training.enable_cpu_offload else device
    if config.compile.enable:
        torch._dynamo.reset()  # what an earlier run in this process compiled would count against its limit of graphs
        configure_compiler(mesh.size("tp"))
        use_memory_budget(config.activation_checkpoint, os.path.join(config.job.dump_folder, "memory_budget"))
    models, count = [], 0
    for part in parts:
        with torch.device("meta"):
            model = setup.spec.build(setup.args, attend)
        count = sum(weight.numel() for weight in model.parameters())
        if part is not None:
            keep_modules(model, part)
        parallelize(model, mesh, config, setup.spec.tensor_parallel_styles)
        fill(model, home, device, config.debug.seed, lambda fqn: setup.spec.init(fqn, setup.args))
        models.append(model)
    layout = layout_name(axis_degrees(p))
    logger.info(f"Model {config.model.name} {config.model.flavor}: {count:,} parameters on {layout}")
    return models


def build_compute(
    config: Config,
    setup: Setup,
    mesh: Mesh,
    device: torch.device,
    models: list[FSDPModule],
    section: Training | Validation,
    *,
    loss: LossSum = cross_entropy_sum,
) -> Compute:
    """What runs `models` on batches of `[training]` or `[validation]`."""
    p, training = config.parallelism, config.training
    balanced = mesh.size("cp") > 1 and bool(p.context_parallel_load_balancer)
    positions = local_positions(section.seq_len, mesh.size("cp"), mesh.rank("cp"), balanced).to(device)
    pipeline = None
    if setup.stages is not None:
        widths = setup.args.dim, setup.args.vocab_size
        dtype = getattr(torch, training.mixed_precision_param)
        pipeline = Pipeline(
            models,
            setup.stages,
            mesh.group("pp"),
            device,
            section.local_batch_size,
            positions,
            widths,
            mesh.size("tp"),
            dtype,
            project=training.loss_chunks == 1,
        )
    sharded_loss = mesh.size("tp") > 1 and not p.disable_loss_parallel
    document_end = setup.tokenizer.eos_id if training.document_mask else None
    return Compute(
        models,
        positions,
        pipeline,
        compiled_loss(loss, config.compile),
        loss_chunks=training.loss_chunks,
        tp_degree=mesh.size("tp"),
        sharded_loss=sharded_loss,
        document_end=document_end,
    )


def build_data(
    key: str,
    section: Training | Validation,
    rows: int,
    tokenizer: Tokenizer,
    mesh: Mesh,
    seed: int,
    comm: Comm = Comm(),  # noqa: B008 - immutable
) -> StepLoader:
    """The loader of `[training]` or `[validation]`; `rows` per step over all ranks."""
    first = comm.init_timeout_seconds if key == "training" else comm.train_timeout_seconds
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
        local_batch_size=section.local_batch_size,
        limits=(first / 2, comm.train_timeout_seconds / 2),
    )


def build(config: Config, setup: Setup, device: torch.device) -> Parts:
    """Everything the trainer works with. The default process group must exist."""
    mesh = build_mesh(config.parallelism, device.type)
    seed, validation = config.debug.seed, config.validation
    rows, comm = config.training.global_batch_size, config.comm
    loader = build_data("training", config.training, rows, setup.tokenizer, mesh, seed, comm)
    validation_loader = None
    if validation.enable:
        rows = validation.local_batch_size * mesh.dp_degree
        validation_loader = build_data("validation", validation, rows, setup.tokenizer, mesh, seed, comm)
    models = build_models(config, setup, mesh, device)
    compute = build_compute(config, setup, mesh, device, models, config.training)
    optimizer = build_optimizer(models, config.optimizer)
    schedule = LRSchedule(optimizer, config.optimizer.lr, config.lr_scheduler)
    held_out = None
    if validation_loader is not None:
        held_out = validation_loader, build_compute(config, setup, mesh, device, models, validation)
    return Parts(mesh, device, models, optimizer, schedule, loader, compute, held_out)
