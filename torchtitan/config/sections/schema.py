"""The configuration: one class per section, one documented field per key.

`--help`, the reference page and the JSON Schema are generated from the docstrings below the fields.
Keys and meanings follow the TOML convention of TorchTitan 0.2. Imports no torch, so mistakes are
reported in milliseconds.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from torchtitan.config.registry import Custom
from torchtitan.config.sections.evals import Eval, Sampling
from torchtitan.config.sections.metrics import Metrics
from torchtitan.config.sections.optim import EMA, LRScheduler, Optimizer
from torchtitan.config.sections.parallelism import ActivationCheckpoint, Compile, Parallelism
from torchtitan.config.sections.quantize import Quantize
from torchtitan.config.sections.training import MoE, Training, Validation
from torchtitan.config.types import (
    Factor,
    Few,
    FilePrefix,
    InDumpFolder,
    LocalPath,
    Name,
    NameOrEmpty,
    Seconds,
    Section,
    Steps,
    StepsOrDefault,
    StepsOrZero,
    Text,
    not_empty,
)


class Job(Section):
    """Name of the run, and where its files go."""

    config_file: LocalPath | None = None
    """Read this TOML file. `--config` is a shorter spelling."""
    dump_folder: LocalPath = "./outputs"
    """Write everything here: checkpoints, metrics, traces, the effective configuration."""
    description: Annotated[Text, AfterValidator(not_empty)] = "default job"
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
    8B, 70B, 405B, and Llama 2 and Code Llama by name).
    """
    hf_assets_path: LocalPath = "./tests/assets/tokenizer"
    """Folder with the tokenizer (`tokenizer.json`, a `.model` of SentencePiece or tiktoken, or
    Mistral's `tekken.json`) and, optionally, Hugging Face weights. A relative path that does not
    exist is also looked up in the project's folder.
    """
    tokenizer: Name | None = None
    """A tokenizer that `experimental.custom_import` registers; it gets `hf_assets_path`. Default:
    the one in that folder.
    """
    end_of_document: Annotated[str, AfterValidator(not_empty)] | None = None
    """The token that ends documents, such as `<|endoftext|>` in a folder of an instruct model whose
    `eos_token` ends a turn. Default: the `eos_token` of the folder.
    """
    chat_template: LocalPath | None = None
    """File of the chat template for conversations. Default: the one in the tokenizer's folder."""
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
    delta_rule: Literal["torch", "fla"] = "torch"
    """What computes Gated DeltaNet: plain PyTorch, or on CUDA the kernels of flash-linear-attention
    (`pip install titan-pretrain[fla]`).
    """
    print_after_conversion: bool = False
    """Print the model's modules after conversion."""
    overrides: dict[str, Any] = {}
    """Replace fields of the flavor, as a table: `[model.overrides]` then `n_layers = 4`."""

    @property
    def label(self) -> str:
        """The model in messages. With overrides it may be far from its flavor."""
        return f"{self.name} {self.flavor}{' with overrides' if self.overrides else ''}"


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in `folder`."""
    folder: LocalPath = "checkpoint"
    """Save checkpoints here, relative to `job.dump_folder`, or to a URL: `s3://bucket/run`,
    `gs://bucket/run`.
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
    overlaps that copy with the next step's forward and backward. Both keep a copy of a rank's
    weights and optimizer state there from the first save on; on CUDA the latter pins it.
    """
    keep_latest_k: StepsOrZero = 10
    """Keep this many of the newest checkpoints and delete older ones. 0: keep all. 1 isn't allowed:
    a failure while the next one is written could lose it.
    """
    keep_every_n: StepsOrZero = 0
    """Also keep, forever, the checkpoints at multiples of this many steps. 0: none."""
    load_step: StepsOrDefault = -1
    """Resume from this step, and abandon later ones. The same command then continues what it has
    saved since. -1: resume from the newest complete checkpoint.
    """
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
    every rank dumps its state and one rank reports which rank blocks the rest. With compilation, it
    is multiplied by the number of pipeline stages, which compile one after another.
    """
    train_timeout_seconds: Seconds = 100
    """Timeout of collectives after the first step. While validation, samples or `[eval]` run for
    the first time, and may compile, the timeout of the first step applies.
    """
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
    """Steps between comparisons, by hash, of weights and optimizer state that several ranks hold
    copies of. A difference is an error. 0: never compare.
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
    """Send tokens to the experts of a mixture in turn, regardless of the router. For measuring
    speed: which expert gets a token depends on the layout.
    """
    report_device_syncs: bool = False
    """Warn, with the call site, about operations after the first step that make the host wait for
    the GPU and so leave it idle. Reading the loss and the vote to stop isn't reported.
    """


class Experimental(Section):
    """Extension points."""

    custom_import: NameOrEmpty = ""
    """Import this Python module first. It can register models, optimizers, schedules, losses, data
    sources, tokenizers, metric sinks and callbacks, which the configuration then chooses by name.
    """


class Config(Section):
    """The whole configuration of a run."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
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
