"""The sections `[optimizer]`, `[lr_scheduler]` and `[ema]`."""

from typing import Annotated, Literal

from pydantic import Field

from torchtitan.config.registry import optimizers, schedules
from torchtitan.config.types import (
    Decay,
    Dtype,
    Factor,
    Fraction,
    LearningRate,
    Name,
    Section,
    Steps,
    StepsOrZero,
)


class ParamGroup(Section):
    """A group of parameters with its own learning rate or weight decay."""

    pattern: Name
    """Names of parameters, with `*` and `?` as wildcards: `layers.*.attention.wq.weight`. Must
    match at least one.
    """
    lr_scale: Factor = 1.0
    """Multiply the group's learning rate by this."""
    weight_decay: Factor | None = None
    """Weight decay of the group. Default: as for other parameters of its kind."""


class Optimizer(Section):
    """The optimizer. Norm weights and biases get no weight decay."""

    name: Annotated[Name, Field(examples=[*optimizers.built_in])] = "AdamW"
    """`Adam`, `AdamW`, `Muon` (trains the blocks' matrices, and AdamW the other parameters), or an
    optimizer that `experimental.custom_import` registers.
    """
    lr: LearningRate = 8e-4
    """Peak learning rate."""
    beta1: Decay = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Decay = 0.95
    """Decay of the running mean of the squared gradient."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator of the update. With zero, a parameter whose gradient is always zero
    becomes NaN.
    """
    weight_decay: Factor = 0.1
    """Weight decay of matrices: decoupled in AdamW and Muon, an L2 penalty in Adam."""
    state_dtype: Dtype = "float32"
    """Type of Adam's and AdamW's two running means. `bfloat16` halves their memory, but with beta2
    above 0.99 rounding loses small changes.
    """
    muon_momentum: Decay = 0.95
    """Decay of Muon's running mean of the gradient. Muon's updates are scaled to the size of
    AdamW's, so both share `lr` and `weight_decay`.
    """
    muon_ns_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """Newton-Schulz iterations that orthogonalize each of Muon's updates."""
    qk_clip: Factor = 0.0
    """After a step in which a head's largest attention score exceeded this, scale the head's
    projections to queries and keys so that it would not (QK-clip, Kimi K2, arXiv:2507.20534; there
    100, with Muon). 0: don't.
    """
    param_groups: Annotated[list[ParamGroup], Field(max_length=300)] = []
    """Give parameters their own learning rate or weight decay: a list of tables `{pattern =
    "layers.*.attention.wq.weight", lr_scale = 0.5, weight_decay = 0.0}`. The first match applies.
    """
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Run the update in one kernel for all tensors (`fused`), one per operation (`foreach`), or
    one per tensor.
    """
    early_step_in_backward: bool = False
    """Update each parameter in the backward and free its gradient at once. Saves the memory of all
    gradients, but rules out clipping, gradient accumulation and skipping bad steps.
    """


class LRScheduler(Section):
    """Learning rate schedule: linear warm-up, constant, decay."""

    name: Annotated[Name, Field(examples=[*schedules.built_in])] | None = None
    """`cosine`, `linear` or `sqrt`: decay in this shape from the end of warm-up on. `wsd`: stay
    constant, then decay over the last `decay_ratio` of the steps (default 0.2). `constant`: never
    decay. Or a schedule that `experimental.custom_import` registers. Default: by `decay_ratio`
    and `decay_type`.
    """
    warmup_steps: StepsOrZero = 200
    """Steps of linear warm-up from zero. Cut to `total_steps`, with a warning, if longer."""
    total_steps: Steps | None = None
    """Length of the schedule in steps. Default: `training.steps`."""
    decay_ratio: Fraction | None = None
    """Fraction of the steps that decay, at the end; before them the rate is constant. Cut to the
    steps after warm-up, with a warning, if longer. Default: every step after warm-up.
    """
    decay_type: Literal["linear", "sqrt", "cosine"] | None = None
    """Shape of the decay. Default: by `name`, or `linear`."""
    min_lr_factor: Fraction = 0.0
    """Final learning rate, as a fraction of the peak."""


class EMA(Section):
    """An exponential moving average of the weights, in fp32 and sharded like them."""

    enable: bool = False
    """Keep the average. Costs 4 bytes per parameter of a rank's shard."""
    decay: Decay = 0.999
    """Share of the average that an update keeps; the rest comes from the weights."""
    warmup: bool = True
    """Keep at most (1 + n) / (10 + n) in update n, so that the average soon forgets the first
    weights.
    """
    start_step: Steps = 1
    """First step that is averaged. Until then the average equals the weights."""
    every: Steps = 1
    """Update the average after every this many updates of the weights. Skipped steps don't count.
    """
    validation: bool = False
    """Also validate the average: `validation_loss_ema`."""
    export: bool = False
    """Write the average instead of the weights in the exports of `checkpoint.last_save_model_only`
    and `checkpoint.last_save_in_hf`."""
