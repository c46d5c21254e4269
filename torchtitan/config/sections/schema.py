"""The configuration: one class per section, one documented field per key.

`--help`, the reference page and the JSON Schema are generated from the docstrings below the fields.
Keys and meanings follow the TOML convention of TorchTitan 0.2. Imports no torch, so mistakes are
reported in milliseconds.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from torchtitan.config.registry import Custom, losses
from torchtitan.config.sections.data import DataLoader, DataStage, Source, ValidationSet
from torchtitan.config.sections.evals import Eval, Sampling
from torchtitan.config.sections.metrics import Metrics, Notifications
from torchtitan.config.sections.optim import EMA, LRScheduler, Optimizer
from torchtitan.config.sections.parallelism import ActivationCheckpoint, Compile, Parallelism
from torchtitan.config.sections.quantize import Quantize
from torchtitan.config.sections.types import (
    Dtype,
    Factor,
    Few,
    FilePrefix,
    InDumpFolder,
    LocalPath,
    Name,
    Rows,
    Seconds,
    Section,
    SeqLen,
    Steps,
    StepsOrDefault,
    StepsOrZero,
    Text,
)


class Job(Section):
    """Name of the run, and where its files go."""

    config_file: LocalPath | None = None
    """Read this TOML file. `--config` is a shorter spelling."""
    dump_folder: LocalPath = "./outputs"
    """Write everything here: checkpoints, metrics, traces, the effective configuration."""
    description: Text = "default job"
    """Describe the run in one line, for the log and W&B."""
    print_config: bool = False
    """Print the effective configuration as TOML before training."""
    save_config_file: InDumpFolder | None = None
    """Also write the effective configuration to this file, relative to `dump_folder`."""


class Profiling(Section):
    """Profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Record a torch profiler trace (Chrome format) every `profile_freq` steps, on every rank."""
    save_traces_folder: InDumpFolder = "profile_traces"
    """Write traces here, relative to `job.dump_folder`."""
    profile_freq: Steps = 10
    """Steps from the start of one trace to the start of the next."""
    profiler_active: Steps = 1
    """Steps recorded in each trace."""
    profiler_warmup: StepsOrZero = 3
    """Steps before each recording during which the profiler runs but discards its events."""
    enable_memory_snapshot: bool = False
    """Write a snapshot of CUDA memory and its allocation history every `profile_freq` steps, and on
    out of memory.
    """
    save_memory_snapshot_folder: InDumpFolder = "memory_snapshot"
    """Write memory snapshots here, relative to `job.dump_folder`."""


class Logging(Section):
    """Log files: each rank writes its own. On stdout, only the ranks in `LOG_RANK` log (default:
    0).
    """

    folder: InDumpFolder = "logs"
    """Write `rank_<rank>.log` here, relative to `job.dump_folder`. A resumed run appends."""
    format: Literal["text", "json"] = "text"
    """Write lines as on stdout, or JSON objects, one per line, to `rank_<rank>.jsonl`."""
    max_megabytes: Annotated[int, Field(ge=1, le=10**6)] = 100
    """Rotate a file before it grows larger: it becomes `rank_<rank>.log.1`; a new one starts."""
    keep: Few = 3
    """Number of rotated files to keep per rank."""


class Model(Section):
    """The model to train."""

    name: Name = "llama3"
    """Model family."""
    flavor: Name = "debugmodel"
    """Size of the model, one of the family's flavors (llama3: debugmodel, 30M, 125M, 350M, 1B, 3B,
    8B, 70B, 405B).
    """
    hf_assets_path: LocalPath = "./tests/assets/tokenizer"
    """Folder with the tokenizer (`tokenizer.json` or a tiktoken `.model`) and, optionally, Hugging
    Face weights. A relative path that does not exist is also looked up in the project's folder.
    """
    tokenizer: Name | None = None
    """A tokenizer that `experimental.custom_import` registers; it gets `hf_assets_path`. Default:
    the one in that folder.
    """
    converters: list[
        Literal[
            "float8",
            "mx",
            "quantize.linear.float8",
            "quantize.linear.mx",
            "quantize.grouped_mm.float8",
            "quantize.grouped_mm.mx",
        ]
    ] = []
    """Convert the model before it is distributed: linear layers to `float8` or `mx` (see
    `[quantize.linear.*]`), and experts by `quantize.grouped_mm.float8` or `quantize.grouped_mm.mx`.
    """
    print_after_conversion: bool = False
    """Print the model's modules after conversion."""
    overrides: dict[str, Any] = {}
    """Replace fields of the flavor, as a table: `[model.overrides]` then `n_layers = 4`."""


class Training(Section):
    """Data, batch, precision and length of the run."""

    dataset: Name = "demo"
    """`demo` (the text of Python's standard library; alias `c4_test`), `c4`, any Hugging Face
    dataset, a source that `experimental.custom_import` registers, or a name for the files of
    `dataset_path`.
    """
    dataset_path: LocalPath | None = None
    """Read local files instead of downloading: a file, folder or glob of JSON, text, CSV, Parquet
    or Arrow, a folder of `datasets`' `save_to_disk`, or token files of `torchtitan tokenize` or
    Megatron.
    """
    text_column: Name = "text"
    """The column or JSON key that holds the text. Others are not read."""
    messages_column: Name | None = None
    """Read conversations from this column or JSON key, instead of text: lists of messages with
    `role` and `content`. The tokenizer's chat template renders them, and only the assistant's turns
    are predicted.
    """
    sources: Annotated[list[Source], Field(max_length=1000)] = []
    """Mix several sources, instead of `dataset` and `dataset_path`: `[[training.sources]]` tables.
    """
    stages: Annotated[list[DataStage], Field(max_length=1000)] = []
    """Change weights, batch size or learning rate from a step on: `[[training.stages]]` tables, in
    order.
    """
    on_bad_document: Literal["stop", "skip"] = "stop"
    """Choose what happens when a document can't be decoded or has no text: `stop` with its file and
    line, or `skip` it, counted by kind in the log and in `run.json`. Applies to validation too.
    """
    on_changed_data: Literal["stop", "continue"] = "stop"
    """Choose what happens when a run resumes and its data files differ in contents or order from
    the checkpoint's: `stop` and name them, or `continue` with a warning. Applies to validation too.
    """
    local_batch_size: Rows = 8
    """Rows per forward and backward pass on each data-parallel rank."""
    global_batch_size: Annotated[int, Field(ge=-1, le=2**30)] = -1
    """Rows per optimizer step over all ranks, reached by gradient accumulation. -1:
    `local_batch_size` x data-parallel degree.
    """
    seq_len: SeqLen = 2048
    """Tokens per row."""
    packing: Literal["stream", "best_fit"] = "stream"
    """How rows are made of documents. `stream`: cut from all documents, one after another.
    `best_fit`: every row begins with a document, and only documents longer than a row are cut
    (arXiv:2404.10830); about 1 % of the rows is padding. Token files are packed ahead, by
    `torchtitan tokenize --best-fit`.
    """
    document_mask: bool = False
    """Restrict attention to each token's own document; other documents in the row are masked."""
    loss: Annotated[Name, Field(examples=[*losses.built_in])] = "cross_entropy"
    """Loss of each token: `cross_entropy`, or one that `experimental.custom_import` registers. For
    validation too.
    """
    z_loss: Factor = 0.0
    """Coefficient of the squared log-sum-exp of each token's logits (PaLM, arXiv:2204.02311,
    section 5; OLMo: 1e-5), which keeps logits small. It adds to the gradients, not to the losses
    that are reported. 0: none.
    """
    loss_chunks: SeqLen = 1
    """Compute logits and loss in this many slices of the sequence, one at a time. Saves the memory
    of the full logits, which a large vocabulary makes big.
    """
    mtp_loss_weight: Factor = 0.3
    """Weight of the mean loss of the modules that predict further tokens (multi-token prediction,
    `n_mtp` in `[model.overrides]`), relative to the loss of the next token.
    """
    max_norm: Factor = 1.0
    """Clip gradients to this global norm. 0: measure the norm, don't clip."""
    steps: Steps = 10000
    """Optimizer steps of the whole run, including those before a resume."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    dtype: Dtype = "float32"
    """Type in which parameters and optimizer state are stored."""
    mixed_precision_param: Dtype = "bfloat16"
    """Type of parameters and activations in the forward and backward."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are reduced across ranks. `bfloat16` halves the bytes sent, but
    rounds every partial sum to 8 bits, so gradients depend on the number of ranks in the third
    digit.
    """
    gc_freq: Steps = 50
    """Steps between runs of Python's garbage collector. It is off in between, so that no single
    rank stalls.
    """
    gc_debug: bool = False
    """Report objects in reference cycles at each collection."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Choose what happens when the loss or gradient norm is NaN or infinite: `stop` with an error,
    or `skip` the optimizer step. `guard.policy` takes precedence if it is `skip` or `rewind`.
    """
    callbacks: Annotated[list[Name], Field(max_length=100)] = []
    """Call these before and after each step, in this order: callbacks that
    `experimental.custom_import` registers.
    """
    dataloader: DataLoader = DataLoader()


class MoE(Section):
    """How a mixture of experts keeps its experts equally loaded. Only for models with experts."""

    balance_bias_rate: Factor = 0.0
    """Change of each expert's routing bias after a step, up or down, by whether it had fewer or
    more rows than the mean (arXiv:2408.15664). Counts are those of the whole global batch. 0: no
    bias. Of Hugging Face's classes, DeepSeek-V3's and GLM-4.5's store the bias.
    """
    sequence_balance_loss: Factor = 0.0
    """Coefficient of the auxiliary loss that balances the experts within each row."""
    global_balance_loss: Factor = 0.001
    """Coefficient of the auxiliary loss that balances the experts over the global batch
    (arXiv:2501.11873). An expert's share of the rows is that of the step before; its probability is
    this step's.
    """
    router_z_loss: Factor = 0.0
    """Coefficient of the squared log-sum-exp of the router's scores, which keeps them small."""


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in `folder`."""
    folder: LocalPath = "checkpoint"
    """Save checkpoints here, relative to `job.dump_folder`, or to a URL: `s3://bucket/run`,
    `gs://bucket/run`.
    """
    upload_folder: LocalPath | None = None
    """Copy every checkpoint to this URL in the background, and resume from there if `folder` has
    none.
    """
    interval: Steps = 500
    """Steps between checkpoints. The last step is always saved."""
    initial_load_path: LocalPath | None = None
    """Start from this checkpoint if `folder` has none: a `step-N` folder or its URL, or a folder of
    safetensors.
    """
    initial_load_model_only: bool = True
    """Load only the weights from `initial_load_path`. false: also load optimizer, schedule and data
    position.
    """
    initial_load_in_hf: bool = False
    """Read `initial_load_path` (default: `model.hf_assets_path`) as Hugging Face safetensors."""
    last_save_model_only: bool = False
    """Save only the weights at the last step, in `export_dtype`. That checkpoint can't be resumed.
    """
    last_save_in_hf: bool = False
    """At the last step also export Hugging Face safetensors, config and tokenizer to
    `<folder>/step-N-hf`.
    """
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights in model-only checkpoints and Hugging Face exports."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write in the background. `async` first copies to host memory; `async_with_pinned_mem` also
    overlaps that copy with the next step's forward and backward.
    """
    keep_latest_k: StepsOrZero = 10
    """Keep this many of the newest checkpoints and delete older ones. 0: keep all. 1 isn't allowed:
    a failure while the next one is written could lose it.
    """
    keep_every_n: StepsOrZero = 0
    """Also keep, forever, the checkpoints at multiples of this many steps. 0: none."""
    load_step: StepsOrDefault = -1
    """Resume from this step. -1: from the newest complete checkpoint."""
    exclude_from_loading: list[
        Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state", "ema"]
    ] = []
    """Don't load these parts when resuming."""
    enable_first_step_checkpoint: bool = False
    """Also save after step 1, to find storage problems early."""
    load_only: bool = False
    """Load checkpoints but never save them."""


class Comm(Section):
    """Timeouts of collectives, and the watch that diagnoses hangs."""

    init_timeout_seconds: Seconds = 300
    """Timeout of collectives until the first step is complete. After three quarters of a timeout,
    every rank dumps its state and one rank reports which rank blocks the rest.
    """
    train_timeout_seconds: Seconds = 100
    """Timeout of collectives after the first step."""
    trace_buf_size: Annotated[int, Field(ge=0, le=10**7)] = 20000
    """Collectives that the Flight Recorder keeps per rank. 0: turn off the Flight Recorder and the
    watch.
    """
    save_traces_folder: InDumpFolder = "comm_traces"
    """Write the ranks' reports here after a hang, an exception or SIGUSR2, relative to
    `job.dump_folder`.
    """
    save_traces_file_prefix: FilePrefix = "rank_"
    """Name Flight Recorder dumps by this prefix and the rank."""


class FaultTolerance(Section):
    """Continuing on a different number of ranks."""

    elastic: bool = False
    """Train on any number of ranks. Only the data-parallel degrees change; the given ones are
    targets: sharding never falls below its target while enough ranks remain, and replicas never
    exceed theirs. `training.global_batch_size` must be set; gradient accumulation and, where ranks
    don't divide it, rows without labels keep it the same.
    """


class Validation(Section):
    """Loss on held-out data during training."""

    enable: bool = False
    """Run validation."""
    dataset: Name = "c4_validation"
    """Like `training.dataset`; also `demo_validation`, a part of the demo text that training never
    sees.
    """
    dataset_path: LocalPath | None = None
    """Like `training.dataset_path`."""
    text_column: Name = "text"
    """Like `training.text_column`."""
    messages_column: Name | None = None
    """Like `training.messages_column`."""
    sets: Annotated[list[ValidationSet], Field(max_length=1000)] = []
    """Validate on several sets, instead of `dataset` and `dataset_path`: `[[validation.sets]]`
    tables.
    """
    local_batch_size: Rows = 8
    """Rows per forward pass on each data-parallel rank, at most."""
    global_batch_size: Annotated[int, Field(ge=-1, le=2**30)] = -1
    """Rows per batch over all ranks, on any number of them. -1: `training.global_batch_size` if it
    is set, else `local_batch_size`.
    """
    seq_len: SeqLen = 2048
    """Tokens per row."""
    freq: Steps = 10
    """Steps between validations."""
    steps: StepsOrDefault = -1
    """Batches of `global_batch_size` rows per validation. -1: the whole data set once."""
    dataloader: DataLoader = DataLoader()


class Guard(Section):
    """Checks during training: loss and gradient spikes, diverged copies of weights, slow ranks."""

    policy: Literal["off", "warn", "skip", "rewind"] = "off"
    """Choose what happens when the loss or gradient norm spikes: log it (`warn`), `skip` the
    update, or go back to the newest checkpoint and continue with the data after the spike
    (`rewind`).
    """
    window: Annotated[int, Field(ge=8, le=10**6)] = 128
    """Number of recent healthy steps that define normal. Before that many, only NaN and infinity
    are spikes.
    """
    warmup_steps: StepsOrZero = 100
    """Ignore the first steps of the run when estimating what is normal."""
    loss_threshold: Factor = 6.0
    """A loss this many standard deviations above the window's median is a spike. 0: only NaN and
    infinity are.
    """
    grad_norm_threshold: Factor = 10.0
    """Likewise for the gradient norm, before clipping."""
    limit: Steps = 5
    """Fail after this many skips in a row, or rewinds with fewer than `window` healthy steps
    between them.
    """
    weight_hash_freq: StepsOrZero = 0
    """Steps between comparisons, by hash, of weights and optimizer state of which several ranks
    hold copies. A difference is an error. 0: never compare.
    """
    straggler_factor: Factor = 0.0
    """Report ranks slower than the median rank by this factor, for example 1.3. 0: never."""
    straggler_records: Steps = 3
    """Report a rank only after it was slow for this many logged steps in a row
    (`metrics.log_freq`).
    """


class Debug(Section):
    """Reproducibility and debugging."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of initialization, data order and all other randomness."""
    deterministic: bool = False
    """Use only deterministic algorithms; fail on an operation without one."""
    deterministic_warn_only: bool = False
    """Warn instead of failing on an operation without a deterministic algorithm."""
    moe_force_load_balance: bool = False
    """Send tokens to the experts of a mixture in turn, whatever the router says. For measuring
    speed: which expert gets a token depends on the layout.
    """
    report_device_syncs: bool = False
    """Warn, with the call site, about operations after the first step that make the host wait for
    the GPU and so leave it idle. The one wait per step that reads the loss isn't reported.
    """


class Experimental(Section):
    """Extension points."""

    custom_import: Name = ""
    """Import this Python module first. It can register models, optimizers, schedules, losses, data
    sources, tokenizers, metric sinks and callbacks, which the configuration then chooses by name.
    """


class Config(Section):
    """The whole configuration of a run."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    notifications: Notifications = Notifications()
    logging: Logging = Logging()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    ema: EMA = EMA()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    moe: MoE = MoE()
    checkpoint: Checkpoint = Checkpoint()
    quantize: Quantize = Quantize()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    comm: Comm = Comm()
    fault_tolerance: FaultTolerance = FaultTolerance()
    validation: Validation = Validation()
    eval: Eval = Eval()
    sampling: Sampling = Sampling()
    guard: Guard = Guard()
    debug: Debug = Debug()
    experimental: Experimental = Experimental()
    custom: Custom = Custom()
