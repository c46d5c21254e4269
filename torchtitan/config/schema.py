"""The configuration: one class per section, one documented field per key.

The text below a field is its documentation everywhere: `--help`, `docs/config.md` and the JSON Schema
are generated from it. Keys and meanings follow the TOML convention of TorchTitan 0.2. This module
imports no torch, so that a mistake is answered in milliseconds.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Dtype = Literal["bfloat16", "float32"]


class Section(BaseModel):
    """A strict, immutable group of keys: unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Job(Section):
    """What the run is called and where its files go."""

    config_file: str | None = None
    """The TOML file to read. `--config` is the same flag."""
    dump_folder: str = "./outputs"
    """Folder for everything the run writes: checkpoints, metrics, traces, the effective configuration."""
    description: str = "default job"
    """One line about the run, shown in the log and in W&B."""
    print_config: bool = False
    """Print the effective configuration as TOML before training."""
    save_config_file: str | None = None
    """Also write the effective configuration to this file, relative to `dump_folder`."""


class Profiling(Section):
    """torch profiler traces and memory snapshots, taken on a schedule."""

    enable_profiling: bool = False
    """Record a torch profiler trace (Chrome format) every `profile_freq` steps, on every rank."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces, relative to `job.dump_folder`."""
    profile_freq: PositiveInt = 10
    """Steps from the start of one trace to the start of the next."""
    profiler_active: PositiveInt = 1
    """Steps recorded in each trace."""
    profiler_warmup: NonNegativeInt = 3
    """Steps before each recording in which the profiler runs but discards what it sees."""
    enable_memory_snapshot: bool = False
    """Record the history of CUDA allocations every `profile_freq` steps, and when memory runs out (CUDA only)."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the memory snapshots, relative to `job.dump_folder`."""


class Metrics(Section):
    """What is logged, how often, and to where. `metrics.jsonl` is always written."""

    log_freq: PositiveInt = 10
    """Steps between two logged lines. The first and the last step are always logged."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard files, relative to `job.dump_folder`."""
    disable_color_printing: bool = False
    """Print plain lines: no colors and no live progress line."""
    save_for_all_ranks: bool = False
    """Let every rank write TensorBoard and W&B records of its own instead of rank 0 alone."""
    enable_wandb: bool = False
    """Log to Weights & Biases (needs the `wandb` package; project and entity from `WANDB_PROJECT`, `WANDB_TEAM`)."""


class Model(Section):
    """Which model is trained."""

    name: str = "llama3"
    """Model family."""
    flavor: str = "debugmodel"
    """Size of the model, one of the family's flavors (llama3: debugmodel, 1B, 3B, 8B, 70B, 405B)."""
    hf_assets_path: str = "./tests/assets/tokenizer"
    """Folder with the tokenizer (`tokenizer.json` or a tiktoken `.model`) and, if wanted, Hugging Face weights.
    A relative path that does not exist here is looked up in the project's own folder too."""
    converters: list[Literal["float8", "mx", "quantize.linear.float8", "quantize.linear.mx"]] = []
    """What is done to the model before it is distributed: `float8` or `mx` (`[quantize.linear.*]`)."""
    print_after_conversion: bool = False
    """Show the model's modules after that."""
    overrides: dict[str, Any] = {}
    """Fields of the flavor to replace, as a table: `[model.overrides]` then `n_layers = 4`."""


class Float8(Section):
    """Linear layers in Float8, with `model.converters = ["float8"]`."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """How values are scaled into Float8's range: one scale for a tensor (`tensorwise`, the default: fastest), one for
    each row (`rowwise`: more exact), or that with the weights' gradients in bf16 (`rowwise_with_gw_hp`)."""
    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers the weights in Float8, half the bytes of bf16. `tensorwise` only."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights in one reduction after each update, for `enable_fsdp_float8_all_gather`."""
    filter_fqns: list[str] = []
    """Leave out linear layers whose name contains one of these, for example `output`. `auto_filter_small_kn` leaves
    out those too small to gain. Sizes that 16 (x tensor-parallel degree) does not divide are left out always."""
    emulate: bool = False
    """Round to Float8, but multiply in the original type: the same numbers on hardware without Float8, and slow."""


class MXFP8(Section):
    """Linear layers in MXFP8, with `model.converters = ["mx"]`."""

    recipe_name: Literal["mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"] = "mxfp8_cublas"
    """`mxfp8_cublas` needs a Blackwell GPU; `_rceil` rounds scales up; `mxfp8_emulated` runs anywhere, slowly."""
    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """Kernel that rounds along columns."""
    filter_fqns: list[str] = ["output"]
    """Leave out linear layers whose name contains one of these. Sizes that 32 (x tensor-parallel degree) does not
    divide are left out always."""


class QuantizedLinear(Section):
    """Types of linear layers."""

    float8: Float8 = Float8()
    mx: MXFP8 = MXFP8()


class Quantize(Section):
    """Narrow types for matrix products."""

    linear: QuantizedLinear = QuantizedLinear()


class ParamGroup(Section):
    """Parameters that are trained differently."""

    pattern: str
    """Names of parameters, with `*` and `?`, as `layers.*.attention.wq.weight`. It must match at least one."""
    lr_scale: NonNegativeFloat = 1.0
    """Their learning rate, as a multiple of the schedule's."""
    weight_decay: NonNegativeFloat | None = None
    """Their weight decay. Default: as without the group."""


class Optimizer(Section):
    """The optimizer. Norm weights and biases get no weight decay."""

    name: Literal["Adam", "AdamW", "Muon"] = "AdamW"
    """Optimizer class of `torch.optim`. `Muon` trains the matrices of the blocks, AdamW beside it the rest."""
    lr: PositiveFloat = 8e-4
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the running mean of the gradient."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the running mean of the squared gradient."""
    eps: NonNegativeFloat = 1e-8
    """Added to the denominator of the update."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices (decoupled in AdamW and Muon, an L2 term in Adam)."""
    state_dtype: Dtype = "float32"
    """Type in which Adam and AdamW store their two running means. `bfloat16` halves that memory; with beta2 above 0.99
    small changes are lost in rounding."""
    muon_momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of Muon's running mean of the gradient. Its updates are scaled to the size of AdamW's, so that `lr` and
    `weight_decay` mean the same."""
    muon_ns_steps: PositiveInt = 5
    """Newton-Schulz iterations with which Muon orthogonalizes an update."""
    param_groups: list[ParamGroup] = []
    """Parameters with a learning rate or weight decay of their own: tables `{pattern = "layers.*.attention.wq.weight",
    lr_scale = 0.5, weight_decay = 0.0}`, of which the first that matches counts."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the update is executed: one kernel for all (`fused`), one per operation (`foreach`), or one per tensor."""
    early_step_in_backward: bool = False
    """Update each parameter as soon as its gradient is complete, and free the gradient: saves the memory of all
    gradients, at the price of no clipping, no accumulation and no skipping of a bad step."""


class LRScheduler(Section):
    """Learning rate over the run: linear warm-up, then stable, then decay."""

    warmup_steps: NonNegativeInt = 200
    """Steps of linear warm-up from zero. Cut to the length of the run if it is longer."""
    total_steps: PositiveInt | None = None
    """Length of the schedule in steps. Default: `training.steps`."""
    decay_ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share of the run in which the rate decays; before it the rate is stable. Default: all of it after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = Field(default=0.0, ge=0.0, le=1.0)
    """Lowest rate, as a share of the peak."""


class DataLoader(Section):
    """Reading ahead in worker processes. The batches are the same for every setting."""

    num_workers: NonNegativeInt = 0
    """Worker processes per rank. 0: one background thread prepares the next batches."""
    persistent_workers: bool = False
    """Keep the workers alive when the data is read again (validation)."""
    pin_memory: bool = False
    """Copy batches to pinned memory (CUDA only), so that the copy to the GPU overlaps with compute."""
    prefetch_factor: PositiveInt | None = None
    """Batches each worker prepares ahead. Default: 2."""
    retries: NonNegativeInt = 3
    """Times that a read is tried again after it failed or gave something that is no text."""
    retry_pause_seconds: NonNegativeFloat = 1.0
    """Pause before a read is tried again; it doubles each time."""
    timeout_seconds: PositiveFloat | None = None
    """A rank that has waited so long for its data fails and names the source, before the other ranks' collectives time
    out. Default: half of `comm.train_timeout_seconds`. The first batch may take half of `comm.init_timeout_seconds`."""


class Training(Section):
    """Data, batch, precision and length of the run."""

    dataset: str = "demo"
    """`demo` (the text of Python's standard library; `c4_test` is an alias), `c4`, any Hugging Face dataset,
    or a name for the files of `dataset_path`."""
    dataset_path: str | None = None
    """Local files instead of a download: a file, folder or glob of JSONL, text, Parquet (also compressed),
    or of token files made by `torchtitan tokenize`."""
    local_batch_size: PositiveInt = 8
    """Rows of one forward and backward pass on each data-parallel rank."""
    global_batch_size: int = Field(default=-1, ge=-1)
    """Rows of one optimizer step over all ranks; reached by gradient accumulation.
    -1: `local_batch_size` x data-parallel degree."""
    seq_len: PositiveInt = 2048
    """Tokens per row."""
    document_mask: bool = False
    """Tokens attend only to their own document, not to others packed into the same row before it."""
    loss_chunks: PositiveInt = 1
    """Slices of the sequence for which logits and loss are computed one after the other, so that the logits of one
    slice only are in memory. Worth it with a large vocabulary. 1: all at once."""
    max_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this global norm. 0: the norm is measured, nothing is scaled."""
    steps: PositiveInt = 10000
    """Optimizer steps of the whole run, resumed parts included."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    dtype: Dtype = "float32"
    """Type in which parameters and optimizer state are stored."""
    mixed_precision_param: Dtype = "bfloat16"
    """Type of parameters and activations in compute."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are reduced over ranks."""
    gc_freq: PositiveInt = 50
    """Steps between two runs of Python's garbage collector, which is off in between so that ranks don't stall."""
    gc_debug: bool = False
    """Report objects found in reference cycles at each collection."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When the loss or gradient norm is NaN or infinite: `stop` with an error, or `skip` the optimizer step. With
    `guard.policy` at `skip` or `rewind` that decides instead."""
    dataloader: DataLoader = DataLoader()


class Parallelism(Section):
    """How the work is spread over ranks. The degrees multiply to the number of ranks."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the (sharded) model: DDP when the shard degree is 1, HSDP otherwise."""
    data_parallel_shard_degree: int = Field(default=-1, ge=-1)
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2).
    -1: all ranks left by the other degrees."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free the gathered parameters of a block after its forward. `default`: yes, except under pipeline parallelism,
    where the schedule keeps them for all microbatches of a stage."""
    tensor_parallel_degree: PositiveInt = 1
    """Ranks over which each matrix is split, and the sequence between the matrices (sequence parallelism)."""
    disable_loss_parallel: bool = False
    """Gather the logits on every tensor-parallel rank, instead of computing the loss from their parts."""
    enable_async_tensor_parallel: bool = False
    """Hide tensor-parallel communication behind the matrix products it belongs to (needs `compile.enable`). Without
    effect at degree 1."""
    context_parallel_degree: PositiveInt = 1
    """Ranks over which each row's sequence is split (ring attention)."""
    context_parallel_load_balancer: Literal["headtail", ""] | None = "headtail"
    """How the sequence is dealt out: `headtail` gives each rank a chunk from the beginning and one from the end, so
    that all have the same amount of causal attention; empty: one chunk each."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """How keys and values reach the other ranks: all at once, or from rank to rank while attention is computed."""
    pipeline_parallel_degree: PositiveInt = 1
    """Ranks over which the layers are split."""
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
    """Order of forwards and backwards. GPipe and 1F1B have one stage per rank, ZBVZeroBubble and DualPipeV two, the
    others two or more. The last two stand for a schedule from `pipeline_parallel_schedule_csv`."""
    pipeline_parallel_schedule_csv: str | None = ""
    """File with a schedule of your own, used instead of a named one: a row per rank, of entries such as `0F3` (stage;
    F, B, I or W; microbatch)."""
    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Rows of one pipeline microbatch; must divide `training.local_batch_size`."""
    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Split into stages of this many layers, instead of one or two stages per rank balanced by their FLOPs."""
    pipeline_parallel_first_stage_less_layers: NonNegativeInt | None = None
    """Split by numbers of layers, with so many fewer on the first stage, for the embedding. Default: by FLOPs; 1 if
    another key asks for numbers of layers."""
    pipeline_parallel_last_stage_less_layers: NonNegativeInt | None = None
    """The same for the last stage, which has the output projection."""
    module_fqns_per_model_part: list[list[str]] | list[str] | None = None
    """The stages themselves: the names of each one's modules (`tok_embeddings`, `layers.0`, ..., `norm`, `output`); or
    a flat list of the modules before which to cut."""


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in `folder`."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, relative to `job.dump_folder`, or a URL: `s3://bucket/run`, `gs://bucket/run`."""
    interval: PositiveInt = 500
    """Steps between two checkpoints. The last step is always saved."""
    initial_load_path: str | None = None
    """Checkpoint to start from when `folder` has none: a `step-N` folder or its URL, or a folder of safetensors."""
    initial_load_model_only: bool = True
    """Take only the weights from `initial_load_path`; false: optimizer, schedule and data position too."""
    initial_load_in_hf: bool = False
    """`initial_load_path` (default: `model.hf_assets_path`) holds Hugging Face safetensors."""
    last_save_model_only: bool = False
    """Save only the weights at the last step, in `export_dtype`. Such a checkpoint can't be resumed."""
    last_save_in_hf: bool = False
    """At the last step also write Hugging Face safetensors with config and tokenizer, to `<folder>/step-N-hf`."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of weights in model-only and Hugging Face exports."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write in the background: `async` copies to host memory first, `async_with_pinned_mem` also overlaps that
    copy with the next step's forward and backward."""
    keep_latest_k: NonNegativeInt = 10
    """Keep this many newest checkpoints and delete older ones. 0: keep all. 1 is not allowed: the only
    checkpoint would be at risk while the next is written."""
    load_step: int = Field(default=-1, ge=-1)
    """Resume from this step. -1: the newest complete one."""
    exclude_from_loading: list[Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state"]] = []
    """Parts not to load when resuming."""
    enable_first_step_checkpoint: bool = False
    """Also save after step 1, to find out early whether saving works."""
    load_only: bool = False
    """Load, but never save."""


class ActivationCheckpoint(Section):
    """What the backward recomputes instead of keeping it in memory since the forward."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """`none`: keep all activations. `full`: only each block's input. `selective`: as `selective_ac_option` says.
    `memory_budget`: the compiler chooses, within `memory_budget` (needs `compile.enable`)."""
    selective_ac_option: str = "2"
    """A number k: every k-th block keeps its input only. `op`: each block keeps attention, communication and every
    second matrix product, and recomputes the rest."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = ["moe.router.gate"]
    """With `op`: recompute the matrix products with weights of the shapes that these linear layers (parts of their
    names) have."""
    early_stop: bool = False
    """Recompute a block only as far as its backward needs."""
    memory_budget: float = Field(default=0.5, ge=0, le=1)
    """With `memory_budget`: share of the activations to keep, between those of `full` (0) and of `none` (1)."""
    visualize_memory_budget_pareto: bool = False
    """With `memory_budget`: draw run time over memory for all budgets, into `<job.dump_folder>/memory_budget`
    (needs matplotlib)."""
    preserve_rng_state: bool = True
    """Recompute with the random numbers of the forward."""
    determinism_check: Literal["default", "none"] = "default"
    """`default`: compare shapes and types of what is recomputed to the forward's. `none`: don't."""
    debug: bool = False
    """Say which operations of forward and recomputation differ, if they do. Slow."""


class Compile(Section):
    """`torch.compile` of each transformer block and of the loss."""

    enable: bool = False
    """Compile. The first steps take longer."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """What to compile: the blocks of the `model`, the `loss`."""
    backend: str = "inductor"
    """Compiler backend. `inductor` needs a C++ compiler on the CPU; `aot_eager` compiles to no faster code, for
    debugging."""


class Comm(Section):
    """Process groups, their Flight Recorder, and the watch that finds out why nothing moves."""

    init_timeout_seconds: PositiveInt = 300
    """Time limit of a collective until the first step is done. After three quarters of it, here and below, every rank
    writes down where it stands, and one says who holds the others up."""
    train_timeout_seconds: PositiveInt = 100
    """Time limit of a collective after the first step."""
    trace_buf_size: NonNegativeInt = 20000
    """Collectives the Flight Recorder keeps in memory per rank. 0: off, and the watch with it."""
    save_traces_folder: str = "comm_traces"
    """Folder of what the ranks write when nothing moves, relative to `job.dump_folder`."""
    save_traces_file_prefix: str = "rank_"
    """A dump of the Flight Recorder is named by this and the rank."""


class FaultTolerance(Section):
    """Training on when ranks go and come."""

    elastic: bool = False
    """Train on whatever number of ranks there is: the other degrees stay, the data-parallel ones follow it, and are
    wishes. `data_parallel_shard_degree` is not undercut while there are ranks, and `data_parallel_replicate_degree` not
    exceeded. `training.global_batch_size` must be set, and is kept: by accumulation, and by rows without labels where
    it doesn't divide."""


class Validation(Section):
    """Loss on held-out data during training."""

    enable: bool = False
    """Run validation."""
    dataset: str = "c4_validation"
    """As `training.dataset`; also `demo_validation`, the part of the demo text that training never sees."""
    dataset_path: str | None = None
    """As `training.dataset_path`."""
    local_batch_size: PositiveInt = 8
    """Rows of one forward pass on each data-parallel rank."""
    seq_len: PositiveInt = 2048
    """Tokens per row."""
    freq: PositiveInt = 10
    """Steps between two validations."""
    steps: int = Field(default=-1, ge=-1)
    """Batches of one validation. -1: the whole data set once."""
    dataloader: DataLoader = DataLoader()


class Guard(Section):
    """What is watched while training: spikes, copies of the weights that differ, slow ranks."""

    policy: Literal["off", "warn", "skip", "rewind"] = "off"
    """When the loss or gradient norm spikes: say so (`warn`), leave the update out (`skip`), or go back to the newest
    checkpoint and on with the data that comes after the spike (`rewind`)."""
    window: int = Field(default=128, ge=8)
    """Healthy steps that tell what is normal. Nothing but NaN and infinity is a spike before there are so many."""
    warmup_steps: NonNegativeInt = 100
    """First steps of the run, which don't count as normal."""
    loss_threshold: NonNegativeFloat = 6.0
    """A loss this many standard deviations above the window's median is a spike. 0: only NaN and infinity are."""
    grad_norm_threshold: NonNegativeFloat = 10.0
    """The same for the gradient norm, before clipping."""
    limit: PositiveInt = 5
    """Skips in a row, or rewinds with less than `window` healthy steps between them, before the run ends with an
    error."""
    weight_hash_freq: NonNegativeInt = 0
    """Steps between two comparisons of what several ranks hold copies of (weights, optimizer state), by a hash of the
    bytes; a difference is an error. 0: off."""
    straggler_factor: NonNegativeFloat = 0.0
    """Name ranks that are slower than the median rank by this factor, for example 1.3. 0: off."""
    straggler_records: PositiveInt = 3
    """Logged steps in a row (`metrics.log_freq`) for which a rank must be slow to be named."""


class Debug(Section):
    """Reproducibility."""

    seed: NonNegativeInt = 0
    """Seed of initialization, data order and all other randomness."""
    deterministic: bool = False
    """Use only deterministic algorithms; an operation that has none is an error."""
    deterministic_warn_only: bool = False
    """Warn instead of failing where no deterministic algorithm exists."""
    report_device_syncs: bool = False
    """Warn, with the place, of every operation after the first step for which the host waits for the GPU: each leaves
    the GPU idle. The one wait per step that reads the loss is not reported."""


class Experimental(Section):
    """Extension points."""

    custom_import: str = ""
    """Python module to import before the model is looked up: it may register models of its own."""


class Config(Section):
    """The whole configuration of a run."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    quantize: Quantize = Quantize()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    comm: Comm = Comm()
    fault_tolerance: FaultTolerance = FaultTolerance()
    validation: Validation = Validation()
    guard: Guard = Guard()
    debug: Debug = Debug()
    experimental: Experimental = Experimental()
