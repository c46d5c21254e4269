"""What is compiled for a GPU, and what is expected of it on every release of torch."""

from dataclasses import dataclass, field, replace

_EVERY = (
    "--model.hf_assets_path=tests/assets/tokenizer",
    "--training.dataset=demo",
    "--checkpoint.enable=false",
    "--compile.enable=true",
    "--activation_checkpoint.mode=none",
    "--training.mixed_precision_param=bfloat16",
)
_DOCUMENTS = "--training.document_mask=true"
_READ = "utils/device.py:LateValues.numbers: value"
"""The read of loss and norm once the next step is queued, and with several ranks of the vote to
stop, for which the device must have begun the step. By design, a dense model has no other waits.
"""
_NEW_COMPUTE = {
    "train/build.py:build_compute: copy to the GPU": 1,
    "train/forward.py:Compute.__post_init__: copy to the host": 1,
}
_NEW_STAGE = {_READ: 1} | _NEW_COMPUTE
_VALIDATION = {"train/validation.py:Validator._validate: value": 1}
_SAMPLES = {  # for each token: what to read of the logits, and the token
    "inference/generator.py:continue_prompts: value": 3,
    "train/logits.py:Probe._take: value": 3,
}
_VALIDATES = (
    "--validation.enable=true",
    "--validation.steps=2",
    "--validation.dataset=demo_validation",
)

_KERNELS = {
    *("mm", "mm_dtype", "addmm", "bmm", "_scaled_mm", "_scaled_grouped_mm"),
    *("aten.topk", "aten.sort.stable"),
    # Adds up rows by index: how the rows of experts are combined.
    *("aten._embedding_bag", "aten._embedding_bag_forward_only"),
    *(
        f"aten._scaled_dot_product_{kernel}_attention{direction}"
        for kernel in ("cudnn", "efficient", "flash")
        for direction in ("", "_backward")
    ),
}
_NAMESPACES = ("torchtitan.", "torchao.", "_c10d_functional.", "symm_mem.")


def is_fast(call: str) -> bool:
    """Whether a call belongs into a compiled region: a product, attention, a collective, or an
    operator of the project or of torchao.
    """
    return call in _KERNELS or call.startswith(_NAMESPACES)


@dataclass(frozen=True)
class Configuration:
    """A run whose training step is compiled."""

    name: str
    flags: tuple[str, ...]
    graphs: int
    """Compiled in the first step."""
    world: int = 1
    waits: dict[str, int] = field(default_factory=dict)
    """Waits of the host for the GPU in each step, besides `_READ`."""
    later_graphs: dict[str, int] = field(default_factory=dict)
    """Compiled in later passes, by the pass; in all others none is."""
    other_waits: dict[str, dict[str, int]] = field(default_factory=dict)
    """Waits of passes that don't wait like an equal step, by the pass."""
    sm: int = 90
    """Compute capability, of a GPU that tests/cuda/gpu.py has."""
    other_calls: frozenset[str] = frozenset()
    """Calls of compiled regions that `is_fast` doesn't know."""
    quick: bool = False
    """Whether it is compiled before each change lands."""

    @property
    def arguments(self) -> list[str]:
        return [str(self.world), *_EVERY, *self.flags]

    def waits_of(self, name: str) -> dict[str, int]:
        equal = {_READ: 1 if self.world == 1 else 2} | self.waits
        return dict(sorted(self.other_waits.get(name, equal).items()))


def _llama(name: str, *flags: str, graphs: int = 4, **options: object) -> Configuration:
    return Configuration(name, ("--model.name=llama3", *flags), graphs, **options)  # type: ignore[arg-type]


CONFIGURATIONS = [
    _llama("llama3", quick=True),
    _llama(
        "llama3, then validation, samples, a save",
        *_VALIDATES,
        '--sampling.prompts=["def f"]',
        "--checkpoint.interval=1",
        "--checkpoint.async_mode=async_with_pinned_mem",
        later_graphs={"first validation": 2},
        other_waits={
            "first validation": _VALIDATION,
            "another validation": _VALIDATION,
            "first samples": _SAMPLES | dict.fromkeys(_NEW_COMPUTE, 2),
            "another samples": _SAMPLES,
            "first staging of a save": {},
            "another staging of a save": {},
        },
    ),
    _llama(
        "llama3, stages of the data",
        _DOCUMENTS,
        *_VALIDATES,
        "--validation.seq_len=64",
        "--training.seq_len=256",
        "--training.stages=[{from_step = 2, global_batch_size = 16}, "
        "{from_step = 3, seq_len = 512}, {from_step = 4, seq_len = 384}]",
        later_graphs={
            "16 rows of 512 tokens": 4,
            "16 rows of 384 tokens": 4,
            "first validation": 2,
        },
        other_waits={
            "16 rows of 256 tokens": _NEW_STAGE,
            "16 rows of 512 tokens": _NEW_STAGE,
            "16 rows of 384 tokens": _NEW_STAGE,
            "the first stage again": _NEW_STAGE,
            "first validation": _VALIDATION,
            "another validation": _VALIDATION,
        },
    ),
    _llama("llama3, fp32", "--training.mixed_precision_param=float32"),
    _llama("llama3, documents", _DOCUMENTS),
    Configuration(
        "qwen3_moe, ep 2",
        ("--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=2"),
        graphs=8,
        world=2,
        waits={"parallel/experts/shard.py:count_splits: value": 4},  # one per layer
    ),
    Configuration(
        "deepseek_v3, MTP, QK-clip",
        (
            "--model.name=deepseek_v3",
            "--model.overrides.n_mtp=1",
            "--optimizer.qk_clip=100",
            "--moe.balance_bias_rate=0.001",
        ),
        graphs=8,
    ),
    Configuration("gpt_oss, documents", ("--model.name=gpt_oss", _DOCUMENTS), graphs=7),
    Configuration(
        "qwen3_next, documents",
        ("--model.name=qwen3_next", _DOCUMENTS),
        graphs=6,
        other_calls=frozenset({"aten.linalg_solve_triangular"}),  # of the chunks of Gated DeltaNet
    ),
    Configuration("gemma3", ("--model.name=gemma3",), graphs=6),
    _llama(
        "llama3, Float8 tensorwise, FSDP 2",
        "--model.converters=float8",
        "--quantize.linear.float8.enable_fsdp_float8_all_gather=true",
        "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp=true",
        world=2,
    ),
    _llama(
        "llama3, Float8 rowwise",
        "--model.converters=float8",
        "--quantize.linear.float8.recipe_name=rowwise",
    ),
    Configuration(
        "qwen3_moe, Float8 experts",
        (
            "--model.name=qwen3_moe",
            "--model.converters=quantize.grouped_mm.float8",
            "--quantize.grouped_mm.float8.fqns=experts",
        ),
        graphs=4,
        other_calls=frozenset({"aten.index_add"}),  # of torch 2.11, in the backward of padding
    ),
    _llama("llama3, MXFP8", "--model.converters=mx", sm=100),
    _llama("llama3, tp 2", "--parallelism.tensor_parallel_degree=2", world=2),
    _llama(
        "llama3, async tp 2",
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.enable_async_tensor_parallel=true",
        world=2,
    ),
    _llama(
        "llama3, cp 2, documents",
        "--parallelism.context_parallel_degree=2",
        _DOCUMENTS,
        world=2,
        graphs=5,
    ),
    _llama("llama3, pp 2", "--parallelism.pipeline_parallel_degree=2", world=2, graphs=2),
    _llama("llama3, full checkpointing", "--activation_checkpoint.mode=full"),
    _llama("llama3, selective checkpointing", "--activation_checkpoint.mode=selective", graphs=6),
    _llama(
        "llama3, op checkpointing",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ),
    _llama("llama3, Muon, EMA", "--optimizer.name=Muon", "--ema.enable=true"),
    _llama("llama3, loss in 2 chunks", "--training.loss_chunks=2"),
]
_ONE_BLOCK = ("--model.overrides.n_layers=1", "--training.seq_len=2048")
_GROUPED = {  # in each of four layers
    "models/moe/grouped.py:_grouped_mm: copy to the host": 24,
    "models/moe/grouped.py:_grouped_outer: copy to the host": 12,
}
_SMALL = [
    _llama("llama3"),
    _llama("llama3, documents", _DOCUMENTS),
    Configuration("qwen3_moe", ("--model.name=qwen3_moe",), graphs=4, waits=_GROUPED),
    _llama(
        "llama3, Float8 rowwise",
        "--model.converters=float8",
        "--quantize.linear.float8.recipe_name=rowwise",
    ),
    _llama("llama3, 2,048 columns", "--model.flavor=1B", *_ONE_BLOCK),
    _llama("llama3, 4,096 columns", "--model.flavor=8B", *_ONE_BLOCK),
]
_WIDE = _llama("llama3, 8,192 columns", "--model.flavor=70B", *_ONE_BLOCK)
CONFIGURATIONS += [*_SMALL[-2:], _WIDE] + [
    replace(configuration, name=f"sm_{sm}, {configuration.name}", sm=sm)
    for sm in (89, 120)
    for configuration in _SMALL
]
