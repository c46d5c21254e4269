"""Build the parts of a run from a checked configuration."""

import os
import random
from typing import Literal

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.derive import data_parallel_degree
from torchtitan.config.schema import Config, Debug, Training, Validation
from torchtitan.data.loader import StepLoader, build_loader
from torchtitan.data.sources import DataSpec
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.optim.loss import LossSum, cross_entropy_sum
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.schedule import LRSchedule
from torchtitan.parallel.compile import compiled_loss
from torchtitan.parallel.context import local_positions
from torchtitan.parallel.fsdp import accumulation
from torchtitan.parallel.mesh import Mesh, build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.pipeline import Pipeline, StageShapes
from torchtitan.train.compute import Compute, ModelLoss
from torchtitan.train.preflight import Setup
from torchtitan.train.state import Parts


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


def build(config: Config, setup: Setup, device: torch.device) -> Parts:
    """Everything the trainer works with. The default process group must exist."""
    mesh = build_mesh(config, device.type, experts=setup.n_experts > 0)
    share = {"dp_rank": mesh.dp_rank, "dp_degree": mesh.dp_degree}
    loader = build_data(config, "training", setup.tokenizer, **share)
    held_out = build_data(config, "validation", setup.tokenizer, **share) if config.validation.enable else None
    models = parallelize(config, setup.spec, setup.args, setup.stages, mesh, device)
    compute = build_compute(config, setup, mesh, device, models, config.training)
    optimizer = build_optimizer(models, config.optimizer)
    schedule = LRSchedule(optimizer, config.optimizer.lr, config.lr_scheduler)
    validation = None
    if held_out is not None:
        validation = held_out, build_compute(config, setup, mesh, device, models, config.validation)
    experts = None
    if setup.n_experts:
        blocks = sum(name.startswith("layers.") for name in setup.spec.module_flops(setup.args, 1))
        experts = ExpertBalance(models, blocks, setup.n_experts, config.moe.balance_bias_rate, device)
    return Parts(mesh, device, models, optimizer, schedule, loader, compute, validation, experts)


def build_data(
    config: Config,
    key: Literal["training", "validation"],
    tokenizer: Tokenizer,
    *,
    dp_rank: int = 0,
    dp_degree: int = 1,
) -> StepLoader:
    """The loader of `[training]` or `[validation]`. By default this rank reads every row of a step."""
    section: Training | Validation = getattr(config, key)
    if isinstance(section, Training):
        rows, first = section.global_batch_size, config.comm.init_timeout_seconds
    else:
        rows, first = section.local_batch_size * data_parallel_degree(config), config.comm.train_timeout_seconds
    spec = DataSpec(
        dataset=section.dataset,
        dataset_path=section.dataset_path,
        tokenizer=tokenizer,
        seq_len=section.seq_len,
        rows_per_step=rows,
        seed=config.debug.seed,
        infinite=key == "training",
        options=section.dataloader,
        text_column=section.text_column,
        on_bad_document=config.training.on_bad_document,
        section=key,
    )
    limits = first / 2, config.comm.train_timeout_seconds / 2
    return build_loader(
        spec, dp_rank=dp_rank, dp_degree=dp_degree, local_batch_size=section.local_batch_size, limits=limits
    )


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
    """Build what runs `models` on batches of `[training]` or `[validation]`."""
    p, training = config.parallelism, config.training
    balanced = bool(p.context_parallel_load_balancer)
    positions = local_positions(section.seq_len, mesh.size("cp"), mesh.rank("cp"), balanced).to(device)
    model_loss = ModelLoss(
        compiled_loss(loss, config.compile),
        chunks=training.loss_chunks,
        tp_degree=mesh.size("tp"),
        sharded=mesh.size("tp") > 1 and not p.disable_loss_parallel,
    )
    pipeline, pp_group, dtype = None, mesh.group("pp"), getattr(torch, training.mixed_precision_param)
    if setup.stages is not None:
        assert pp_group is not None
        shapes = StageShapes(
            rows=section.local_batch_size,
            seq_len=len(positions),
            dim=setup.args.dim,
            vocab_size=setup.args.vocab_size,
            tp_degree=mesh.size("tp"),
            dtype=dtype,
            project=model_loss.project,
        )
        pipeline = Pipeline(models, setup.stages, shapes, positions, pp_group)
    document_end = setup.tokenizer.eos_id if training.document_mask else None
    pin = section.dataloader.pin_memory and device.type != "cpu"
    options = {"document_end": document_end, "dtype": dtype, "pin": pin, "weighs_tokens": setup.n_experts > 0}
    return Compute(models, positions, pipeline, model_loss, accumulation(config), **options)
