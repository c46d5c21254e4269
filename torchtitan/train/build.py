"""Build the components of a run from a checked configuration."""

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.checkpoint.backend import Storage
from torchtitan.config.derive import replace, stages_of, validation_rows
from torchtitan.config.sections.data import ValidationSet
from torchtitan.config.sections.schema import Comm, Config, Debug
from torchtitan.config.sections.training import Training, Validation
from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.data.loader import StepLoader, build_loader
from torchtitan.data.spec import data_spec
from torchtitan.models.attention.backend import document_mask
from torchtitan.models.attention.interface import reads_documents, windows_of
from torchtitan.optim.ema import WeightAverage
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.optim.loss import RowLoss, SourceTally, build_loss
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.qk_clip import QKClip
from torchtitan.parallel.compile import compiled_loss
from torchtitan.parallel.context.attention import build_row_layout
from torchtitan.parallel.context.layout import attending_positions, local_positions
from torchtitan.parallel.fsdp import expect_backward
from torchtitan.parallel.groups import init_distributed
from torchtitan.parallel.mesh import Mesh, build_mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.pipeline.pipeline import Pipeline, StageShapes
from torchtitan.train.engine import Engine
from torchtitan.train.forward import Compute, ModelLoss
from torchtitan.train.logits import Probe
from torchtitan.train.mtp_loss import MTPLoss
from torchtitan.train.preflight import Setup
from torchtitan.train.validation import ValidationData, Validator


def set_determinism(debug: Debug) -> None:
    """Seed every generator and, if asked, allow only deterministic algorithms."""
    random.seed(debug.seed)
    np.random.seed(debug.seed % 2**32)
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
        # A search for reads of uninitialized memory, which costs a kernel for each allocation.
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def build(
    config: Config, setup: Setup, device: torch.device, builders: "Builders | None" = None
) -> Engine:
    """Build everything that the training step needs. The default process group must exist."""
    builders = builders or Builders()
    mesh = builders.mesh(config, device.type, experts=setup.n_experts > 0)
    share = mesh.dp_rank, mesh.dp_degree
    loader = builders.data(config, "training", setup.tokenizer, share)
    validation_sets = []
    if config.validation.enable:
        validation_sets = build_validation_data(config, setup.tokenizer, share, builders.data)
    for validation_set in validation_sets:
        loader.record.add_validation_set(validation_set.loader.record)
    models = builders.models(
        config, setup.spec, setup.args, stages=setup.stages, mesh=mesh, device=device
    )
    computes = StageComputes(config, setup, mesh, device=device, models=models)
    optimizer = build_optimizer(models, config.optimizer, config.custom, setup.width_ratio)
    schedule = LRSchedule(
        optimizer,
        config.optimizer.lr,
        config.lr_scheduler,
        config.custom,
        stages=config.training.stages,
    )
    experts = _build_expert_balance(config, setup, models, device) if setup.n_experts else None
    qk_clip = None
    if config.optimizer.qk_clip:
        qk_clip = _build_qk_clip(config, setup, mesh, device=device, models=models)
    validation = None
    if validation_sets:
        validation = _build_validator(
            config, setup, validation_sets, mesh=mesh, device=device, models=models
        )
    probe = None
    if config.eval.enable or config.sampling.prompts:
        probe = build_probe(config, setup, mesh, device=device, models=models)
    return Engine(
        config,
        setup,
        mesh,
        device,
        models=models,
        optimizer=optimizer,
        schedule=schedule,
        loader=loader,
        compute=computes(0),
        validation=validation,
        experts=experts,
        average=WeightAverage(models, config.ema) if config.ema.enable else None,
        probe=probe,
        qk_clip=qk_clip,
        build_stage_compute=computes,
    )


@dataclass
class StageComputes:
    """Builds the `Compute` of each stage of the data, whose rows may have another length."""

    config: Config
    setup: Setup
    mesh: Mesh
    device: torch.device
    models: list[FSDPModule]

    def __post_init__(self) -> None:
        sources = len(self.config.training.sources)
        self.tally = None
        if sources:
            self.tally = SourceTally(sources, self.setup.tokenizer.byte_lengths(), self.device)
        self.args = self.setup.args
        """The hyper-parameters that the positions of `models` currently fit."""

    def __call__(self, stage: int) -> Compute:
        args = self.setup.args_of(stage)
        if args != self.args:
            for model in self.models:
                model.change_positions(args)
            self.args = args
        return build_compute(
            self.config,
            self.setup,
            self.mesh,
            self.device,
            models=self.models,
            section=stages_of(self.config)[stage].training,
            tally=self.tally,
        )


def _build_validator(
    config: Config,
    setup: Setup,
    sets: list[ValidationData],
    *,
    mesh: Mesh,
    device: torch.device,
    models: list[FSDPModule],
) -> Validator:
    section = config.validation.model_copy(update={"local_batch_size": validation_rows(config)})
    compute = build_compute(
        config, setup, mesh, device, models=models, section=section, trains=False
    )
    lengths = torch.from_numpy(setup.tokenizer.byte_lengths())
    return Validator(compute, sets, mesh, device, lengths.to(device))


def _build_qk_clip(
    config: Config, setup: Setup, mesh: Mesh, *, device: torch.device, models: list[FSDPModule]
) -> QKClip:
    cp_group = mesh.group("cp")
    balanced = bool(config.parallelism.context_parallel_load_balancer)
    return QKClip(
        models,
        config.optimizer.qk_clip,
        layers=setup.args.n_layers + setup.n_mtp,
        heads=setup.args.n_heads,
        tp=(mesh.rank("tp"), mesh.size("tp")),
        layout=None if cp_group is None else build_row_layout(cp_group, balanced),
        device=device,
    )


def _build_expert_balance(
    config: Config, setup: Setup, models: list[FSDPModule], device: torch.device
) -> ExpertBalance:
    modules = setup.spec.module_flops(setup.args, 1)
    blocks = sum(name.startswith("layers.") for name in modules)  # of all pipeline stages
    return ExpertBalance(
        models, blocks, setup.n_experts, config.moe.balance_bias_rate, device=device
    )


def build_validation_data(
    config: Config, tokenizer: Tokenizer, share: tuple[int, int], data: Callable[..., StepLoader]
) -> list[ValidationData]:
    """The validation sets.

    Args:
        share: as for `build_data`.
        data: builds each loader; called as `build_data` is.
    """
    section = config.validation
    data_of_sets = []
    tables: Sequence[ValidationSet | None] = section.sets or (None,)
    for table in tables:
        loader = data(config, "validation", tokenizer, share, validation_set=table)
        steps = section.steps if table is None or table.steps is None else table.steps
        data_of_sets.append(ValidationData(table.name if table else "", loader, steps))
    return data_of_sets


def build_data(
    config: Config,
    key: Literal["training", "validation"],
    tokenizer: Tokenizer,
    share: tuple[int, int] = (0, 1),
    *,
    validation_set: ValidationSet | None = None,
) -> StepLoader:
    """Build the loader of `[training]` or `[validation]`; by default it reads all rows of a step.

    Args:
        share: this rank's index among those that read different rows, and their number.
        validation_set: the set to read, if there are several.
    """
    comm = config.comm
    first = comm.init_timeout_seconds if key == "training" else comm.train_timeout_seconds
    limits = first / 2, comm.train_timeout_seconds / 2  # fail before a collective does
    return build_loader(
        data_spec(config, key, tokenizer, validation_set),
        dp_rank=share[0],
        dp_degree=share[1],
        limits=limits,
    )


def row_unit(config: Config) -> int:
    """The number that must divide the length of a row."""
    p = config.parallelism
    cp = p.context_parallel_degree
    chunks = 2 * cp if cp > 1 and p.context_parallel_load_balancer else cp
    return math.lcm(chunks, cp * p.tensor_parallel_degree * config.training.loss_chunks)


def build_probe(
    config: Config,
    setup: Setup,
    mesh: Mesh,
    *,
    device: torch.device,
    models: list[FSDPModule],
    longest: int | None = None,
) -> Probe:
    """Build a reader of the logits of `models`, with batches of `training.local_batch_size` rows.

    Args:
        longest: length of the longest text in tokens; None: the longest that the model supports.
    """
    training = config.training
    whole = replace(config, "training.document_mask", False)  # a text is one document

    def build(length: int, read: RowLoss) -> Compute:
        section = training.model_copy(update={"seq_len": length})
        return build_compute(
            whole, setup, mesh, device, models=models, section=section, loss=read, trains=False
        )

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
    *,
    models: list[FSDPModule],
    section: Training | Validation,
    loss: RowLoss | None = None,
    tally: SourceTally | None = None,
    trains: bool = True,
) -> Compute:
    """Bind model, loss and positions to the forward and backward of one shape of batch.

    Args:
        section: `[training]` or `[validation]`, whose batches it is for.
        loss: replaces the loss that `training.loss` names.
        tally: adds up the losses of each data source.
        trains: also run the modules of multi-token prediction, if the model has some.
    """
    p = config.parallelism
    training = config.training
    balanced = bool(p.context_parallel_load_balancer)
    cp = mesh.size("cp"), mesh.rank("cp")
    positions = local_positions(section.seq_len, *cp, balanced).to(device)
    mtp_modules = setup.n_mtp if trains else 0
    model_loss = _build_model_loss(config, mesh, device, loss, mtp_modules=mtp_modules)
    dtype = getattr(torch, training.mixed_precision_param)
    mask_of = partial(
        document_mask,
        positions=positions,
        dtype=dtype,
        attending=attending_positions(positions, p),
        with_documents=any(map(reads_documents, models)),
        windows=windows_of(models),
    )
    pipeline = None
    if setup.stages is not None:
        pp_group = mesh.group("pp")
        assert pp_group is not None
        shapes = StageShapes(
            rows=section.local_batch_size,
            seq_len=len(positions),
            dim=setup.args.dim,
            vocab_size=setup.args.vocab_size,
            tp_degree=mesh.size("tp"),
            dtype=dtype,
            project=model_loss.project,
            mtp_modules=mtp_modules,
        )
        pipeline = Pipeline(
            models, setup.stages, shapes, positions, mask_of=mask_of, group=pp_group
        )
    return Compute(
        models,
        positions,
        pipeline,
        model_loss,
        expect_backward=partial(expect_backward, config=config),
        batch_size=section.local_batch_size,
        document_end=setup.tokenizer.eos_id if training.document_mask else None,
        mask_of=mask_of,
        pin=section.dataloader.pin_memory and device.type != "cpu",
        weighs_tokens=setup.n_experts > 0,
        tally=tally,
    )


def _build_model_loss(
    config: Config, mesh: Mesh, device: torch.device, loss: RowLoss | None, *, mtp_modules: int
) -> ModelLoss:
    """
    Args:
        loss: replaces the loss that `training.loss` names.
        mtp_modules: number of modules of multi-token prediction.
    """
    training = config.training
    row_loss = loss or build_loss(training.loss, config.custom, training.z_loss)
    return ModelLoss(
        compiled_loss(row_loss, config.compile),
        chunks=training.loss_chunks,
        tp_degree=mesh.size("tp"),
        sharded=mesh.size("tp") > 1 and not config.parallelism.disable_loss_parallel,
        mtp=MTPLoss(mtp_modules, training.mtp_loss_weight, device) if mtp_modules else None,
    )


@dataclass(frozen=True)
class Builders:
    """The functions that build a run's components. Rehearsals and tests of parity replace some of
    them by functions with the same arguments.
    """

    connect: Callable[[Comm, torch.device], None] = init_distributed
    """Starts the default process group, unless there is one."""
    mesh: Callable[..., Mesh] = build_mesh
    data: Callable[..., StepLoader] = build_data
    models: Callable[..., list[FSDPModule]] = parallelize
    storage: Storage | None = None
    """The storage of checkpoints; None: folders."""
