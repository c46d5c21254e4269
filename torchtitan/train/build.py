"""Build the parts of a run from a checked configuration."""

import math
import os
import random
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.derive import replace, stages_of, validation_rows
from torchtitan.config.sections.data import ValidationSet
from torchtitan.config.sections.schema import Config, Debug
from torchtitan.config.sections.training import Training, Validation
from torchtitan.data.loader import StepLoader, build_loader
from torchtitan.data.spec import data_spec
from torchtitan.data.text.tokenizer import Tokenizer
from torchtitan.optim.ema import WeightAverage
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.optim.loss import RowLoss, SourceTally, build_loss
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.qk_clip import QKClip
from torchtitan.parallel.compile import compiled_loss
from torchtitan.parallel.context import layout_of
from torchtitan.parallel.context_layout import attending_positions, local_positions
from torchtitan.parallel.fsdp import accumulation
from torchtitan.parallel.mesh import Mesh, build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.pipeline import Pipeline, StageShapes
from torchtitan.train.forward import Compute, ModelLoss
from torchtitan.train.logits import Probe
from torchtitan.train.mtp import MTPLoss
from torchtitan.train.preflight import Setup
from torchtitan.train.state import Parts
from torchtitan.train.validation import HeldOut, Validator


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


def build(
    config: Config,
    setup: Setup,
    device: torch.device,
    *,
    make_mesh: Callable[..., Mesh] | None = None,
    make_data: Callable[..., StepLoader] | None = None,
    make_models: Callable[..., list[FSDPModule]] | None = None,
) -> Parts:
    """Everything the trainer works with. The default process group must exist.

    Args:
        make_mesh: instead of `build_mesh`; called with the same arguments.
        make_data: instead of `build_data`.
        make_models: instead of `parallelize`.
    """
    mesh = (make_mesh or build_mesh)(config, device.type, experts=setup.n_experts > 0)
    share = mesh.dp_rank, mesh.dp_degree
    data = make_data or build_data
    loader = data(config, "training", setup.tokenizer, share)
    held_out = []
    if config.validation.enable:
        held_out = build_held_out(config, setup.tokenizer, share, data)
    for one in held_out:
        loader.record.add_held_out(one.loader.record)
    shard = make_models or parallelize
    models = shard(config, setup.spec, setup.args, setup.stages, mesh, device)
    names = [source.name for source in config.training.sources]
    tally = SourceTally(len(names), setup.tokenizer.byte_lengths(), device) if names else None

    current = setup.args

    def compute_of(stage: int) -> Compute:
        nonlocal current
        args = setup.args_of(stage)
        if args != current:
            for model in models:
                model.change_positions(args)
            current = args
        section = stages_of(config)[stage].training
        return build_compute(config, setup, mesh, device, models, section, tally=tally)

    optimizer = build_optimizer(models, config.optimizer, config.custom, setup.width_ratio)
    schedule = LRSchedule(
        optimizer,
        config.optimizer.lr,
        config.lr_scheduler,
        config.custom,
        stages=config.training.stages,
    )
    validation = None
    if held_out:
        section = config.validation.model_copy(update={"local_batch_size": validation_rows(config)})
        forward = build_compute(config, setup, mesh, device, models, section, trains=False)
        lengths = setup.tokenizer.byte_lengths()
        validation = Validator(forward, held_out, mesh, device, lengths)
    experts = _expert_balance(config, setup, models, device) if setup.n_experts else None
    qk_clip = _qk_clip(config, setup, mesh, models, device) if config.optimizer.qk_clip else None
    average = WeightAverage(models, config.ema) if config.ema.enable else None
    probe = None
    if config.eval.enable or config.sampling.prompts:
        probe = build_probe(config, setup, mesh, device, models)
    return Parts(
        mesh,
        device,
        models,
        optimizer,
        schedule,
        loader,
        compute_of(0),
        validation,
        experts,
        average,
        probe,
        qk_clip=qk_clip,
        compute_of=compute_of,
    )


def _qk_clip(
    config: Config, setup: Setup, mesh: Mesh, models: list[FSDPModule], device: torch.device
) -> QKClip:
    cp_group = mesh.group("cp")
    balanced = bool(config.parallelism.context_parallel_load_balancer)
    return QKClip(
        models,
        config.optimizer.qk_clip,
        layers=setup.args.n_layers + setup.n_mtp,
        heads=setup.args.n_heads,
        tp=(mesh.rank("tp"), mesh.size("tp")),
        layout=None if cp_group is None else layout_of(cp_group, balanced),
        device=device,
    )


def _expert_balance(
    config: Config, setup: Setup, models: list[FSDPModule], device: torch.device
) -> ExpertBalance:
    rate = config.moe.balance_bias_rate
    return ExpertBalance(models, _blocks(setup), setup.n_experts, rate, device)


def _blocks(setup: Setup) -> int:
    """Blocks of the whole model."""
    return sum(name.startswith("layers.") for name in setup.spec.module_flops(setup.args, 1))


def build_held_out(
    config: Config, tokenizer: Tokenizer, share: tuple[int, int], data: Callable[..., StepLoader]
) -> list[HeldOut]:
    """The validation sets.

    Args:
        share: as for `build_data`.
        data: called as `build_data` is.
    """
    section = config.validation
    if not section.sets:
        return [HeldOut("", data(config, "validation", tokenizer, share), section.steps)]
    sets = []
    for one in section.sets:
        loader = data(config, "validation", tokenizer, share, held_out=one)
        sets.append(HeldOut(one.name, loader, section.steps if one.steps is None else one.steps))
    return sets


def build_data(
    config: Config,
    key: Literal["training", "validation"],
    tokenizer: Tokenizer,
    share: tuple[int, int] = (0, 1),
    *,
    held_out: ValidationSet | None = None,
) -> StepLoader:
    """The loader of `[training]` or `[validation]`. By default this rank reads every row of a step.

    Args:
        share: this rank's index among those that read different rows, and their number.
        held_out: one of several validation sets.
    """
    comm = config.comm
    first = comm.init_timeout_seconds if key == "training" else comm.train_timeout_seconds
    limits = first / 2, comm.train_timeout_seconds / 2
    return build_loader(
        data_spec(config, key, tokenizer, held_out),
        dp_rank=share[0],
        dp_degree=share[1],
        limits=limits,
    )


def row_unit(config: Config) -> int:
    """What the length of a row must be a multiple of."""
    p = config.parallelism
    cp = config.parallelism.context_parallel_degree
    chunks = 2 * cp if cp > 1 and p.context_parallel_load_balancer else cp
    return math.lcm(chunks, cp * p.tensor_parallel_degree * config.training.loss_chunks)


def build_probe(
    config: Config,
    setup: Setup,
    mesh: Mesh,
    device: torch.device,
    models: list[FSDPModule],
    *,
    longest: int | None = None,
) -> Probe:
    """Build what reads the logits of `models`, in batches of `training.local_batch_size` rows.

    Args:
        longest: tokens of the longest text; None: as many as the model supports.
    """
    training = config.training
    whole = replace(config, "training.document_mask", False)  # a text is one document

    def build(length: int, read: RowLoss) -> Compute:
        section = training.model_copy(update={"seq_len": length})
        return build_compute(whole, setup, mesh, device, models, section, loss=read, trains=False)

    return Probe(
        build,
        mesh,
        device,
        rows=training.local_batch_size,
        unit=row_unit(config),
        max_seq_len=longest or setup.args.max_seq_len,
        compiled=config.compile.enable,
    )


def build_compute(
    config: Config,
    setup: Setup,
    mesh: Mesh,
    device: torch.device,
    models: list[FSDPModule],
    section: Training | Validation,
    *,
    loss: RowLoss | None = None,
    tally: SourceTally | None = None,
    trains: bool = True,
) -> Compute:
    """Build what runs `models` on batches of `[training]` or `[validation]`.

    Args:
        loss: instead of the one that `training.loss` names.
        trains: also run the modules that predict further tokens, if the model has some.
    """
    p = config.parallelism
    training = config.training
    balanced = bool(p.context_parallel_load_balancer)
    positions = local_positions(section.seq_len, mesh.size("cp"), mesh.rank("cp"), balanced).to(
        device
    )
    further = setup.n_mtp if trains else 0
    attending = attending_positions(positions, p)
    model_loss = ModelLoss(
        compiled_loss(
            loss or build_loss(training.loss, config.custom, training.z_loss), config.compile
        ),
        chunks=training.loss_chunks,
        tp_degree=mesh.size("tp"),
        sharded=mesh.size("tp") > 1 and not p.disable_loss_parallel,
        mtp=MTPLoss(further, training.mtp_loss_weight, device) if further else None,
    )
    pipeline = None
    pp_group = mesh.group("pp")
    dtype = getattr(torch, training.mixed_precision_param)
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
            further=further,
        )
        pipeline = Pipeline(models, setup.stages, shapes, positions, attending, pp_group)
    document_end = setup.tokenizer.eos_id if training.document_mask else None
    pin = section.dataloader.pin_memory and device.type != "cpu"
    return Compute(
        models,
        positions,
        pipeline,
        model_loss,
        accumulation(config),
        batch_size=section.local_batch_size,
        attending=attending,
        document_end=document_end,
        dtype=dtype,
        pin=pin,
        weighs_tokens=setup.n_experts > 0,
        tally=tally,
    )
