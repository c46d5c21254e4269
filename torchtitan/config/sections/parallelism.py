"""The sections `[parallelism]`, `[activation_checkpoint]` and `[compile]`."""

from typing import Annotated, Literal

from pydantic import Field

from torchtitan.config.types import (
    Degree,
    Fraction,
    Layers,
    LayersOrAll,
    LayersOrZero,
    LocalPathOrEmpty,
    Name,
    Rows,
    Section,
)


class Parallelism(Section):
    """Parallelism degrees and options. The product of the degrees is the number of ranks."""

    data_parallel_replicate_degree: Degree = 1
    """Replicas of the (sharded) model: DDP if the shard degree is 1, otherwise HSDP."""
    data_parallel_shard_degree: Annotated[int, Field(ge=-1, le=2**20)] = -1
    """Shard parameters, gradients and optimizer state over this many ranks (FSDP2). -1: all ranks
    left by the other degrees.
    """
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free each block's gathered parameters after its forward. `default`: yes, except under
    pipeline parallelism, whose schedule keeps them for all microbatches of a stage; and except on
    one rank, whose bf16 copies of fp32 weights are made once a step.
    """
    fsdp_buffers: Literal["default", "symmetric_memory", "two_reductions"] = "default"
    """Buffers of FSDP's collectives, an experiment. `symmetric_memory`: in NCCL's symmetric memory,
    where copy engines may move them. `two_reductions`: the backward goes on while two reductions
    run, which costs the bytes of one more block's gradients. Neither is measured on GPU yet.
    """
    fsdp_reduce_once_per_step: bool = False
    """Under gradient accumulation, sum whole gradients and reduce them over ranks after the last
    batch, instead of after each. Saves communication, and costs 4 bytes per parameter (of the
    rank's part under tensor parallelism) on every rank. Pipelines always reduce after each batch.
    """
    tensor_parallel_degree: Degree = 1
    """Split each matrix over this many ranks, and the sequence between matrices (sequence
    parallelism).
    """
    disable_loss_parallel: bool = False
    """Gather the logits on every tensor-parallel rank instead of computing the loss on shards of
    the vocabulary.
    """
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with the matrix products next to it. Needs
    `compile.enable`; no effect at degree 1.
    """
    context_parallel_degree: Degree = 1
    """Split each row's sequence over this many ranks."""
    context_parallel_method: Literal["ring", "ulysses"] = "ring"
    """Choose how attention sees whole rows. `ring`: each rank keeps its queries; keys and values
    travel. `ulysses`: an all-to-all gives each rank whole rows of some heads; the degree must
    divide the heads of a tensor-parallel rank.
    """
    context_parallel_load_balancer: Literal["headtail", ""] | None = "headtail"
    """Choose how to split a row. `headtail`: each rank gets one chunk from the start and one from
    the end, which balances causal attention. Empty: one chunk each.
    """
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """Exchange keys and values in a ring all at once (`allgather`), or step by step
    while attention is computed (`alltoall`).
    """
    expert_parallel_degree: Degree = 1
    """Split the experts of a mixture of experts over this many ranks, which it shares with the
    data-parallel shard, context-parallel and tensor-parallel degrees; must divide their product.
    The product of all other degrees is still the number of ranks.
    """
    pipeline_parallel_degree: Degree = 1
    """Split the layers over this many ranks."""
    pipeline_parallel_schedule: Literal[
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "FlexibleInterleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
        "PipelineScheduleSingle",
        "PipelineScheduleMulti",
    ] = "1F1B"
    """Order of forwards and backwards. GPipe and 1F1B have one stage per rank, ZBVZeroBubble and
    DualPipeV two, the others two or more. The last two stand for a schedule from
    `pipeline_parallel_schedule_csv`.
    """
    pipeline_parallel_schedule_csv: LocalPathOrEmpty | None = ""
    """Read the schedule from this file instead: one row per rank, with entries such as `0F3`
    (stage; F, B, I or W; microbatch).
    """
    pipeline_parallel_microbatch_size: Rows = 1
    """Rows per pipeline microbatch. Must divide `training.local_batch_size`."""
    pipeline_parallel_layers_per_stage: Layers | None = None
    """Put this many layers on each stage. Default: one or two stages per rank, balanced by FLOPs.
    """
    pipeline_parallel_first_stage_less_layers: LayersOrZero | None = None
    """Split by number of layers, with this many fewer on the first stage, to make up for the
    embedding. Default: split by FLOPs; 1 if another key asks for a split by layers.
    """
    pipeline_parallel_last_stage_less_layers: LayersOrZero | None = None
    """Likewise for the last stage, to make up for the output projection."""
    module_fqns_per_model_part: list[list[Name]] | list[Name] | None = None
    """List each stage's modules (`tok_embeddings`, `layers.0`, ..., `norm`, `output`), or give a
    flat list of the modules that start a new stage.
    """


class ActivationCheckpoint(Section):
    """Activation checkpointing: recompute in the backward instead of keeping in memory."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """`none`: keep all activations. `full`: keep only each block's input. `selective`: see
    `selective_ac_option`. `memory_budget`: let the compiler choose within `memory_budget` (needs
    `compile.enable`).
    """
    selective_ac_option: Name = "2"
    """A number k: checkpoint every k-th block. `op`: in every block, keep attention, communication
    and every second matrix product, and recompute the rest.
    """
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[Name] = ["moe.router.gate"]
    """Always recompute matrix products whose weight has the shape of one of these, given as
    substrings of parameters' names. For `op`.
    """
    offload_blocks: LayersOrAll = 0
    """Move what this many blocks keep for the backward to host memory, and back, while other blocks
    compute. They are the first blocks of each pipeline stage, whose backward comes last. -1: all.
    0: none.
    """
    early_stop: bool = False
    """Stop recomputing a block as soon as its backward has what it needs."""
    memory_budget: Fraction = 0.5
    """Activation memory to allow, from the memory of `full` (0) to the memory of `none` (1).
    For `memory_budget`.
    """
    visualize_memory_budget_pareto: bool = False
    """Plot run time against memory for all budgets, in `<job.dump_folder>/memory_budget` (needs
    matplotlib). For `memory_budget`.
    """
    preserve_rng_state: bool = True
    """Use the forward's random numbers when recomputing. Costs nothing in models that draw none."""
    determinism_check: Literal["default", "none"] = "default"
    """`default`: compare shapes and types of recomputed tensors to the forward's. `none`: don't."""
    debug: bool = False
    """Report which operations differ between forward and recomputation. Slow."""


class Compile(Section):
    """`torch.compile` of each transformer block and of the loss."""

    enable: bool = False
    """Compile. The first steps take longer."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """Compile these: the blocks of the `model`, the `loss`."""
    backend: Name = "inductor"
    """Compiler backend. `inductor` needs a C++ compiler on the CPU; `aot_eager` is for debugging
    and not faster.
    """
