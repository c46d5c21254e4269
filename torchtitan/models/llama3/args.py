"""Llama 3's hyper-parameters, and what follows from them: initialization, FLOPs, sharding. Imports no torch."""

import math
from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator, model_validator

from torchtitan.config.types import Heads, Layers, SeqLen, VocabSize, Width
from torchtitan.models.spec import Init, ModelArgs, ShardingStyle

Scale = Annotated[float, Field(gt=0, le=10**6)]


class RopeScaling(BaseModel):
    """Llama 3.1's scaling of RoPE's low frequencies for longer contexts (arXiv:2407.21783, section 3.4.2)."""

    model_config = ModelArgs.model_config

    factor: Scale = 8.0
    """Factor by which long wavelengths are stretched."""
    low_freq_factor: Scale = 1.0
    """Wavelengths above `original_max_seq_len / low_freq_factor` are stretched by `factor`."""
    high_freq_factor: Scale = 4.0
    """Wavelengths below `original_max_seq_len / high_freq_factor` are unchanged."""
    original_max_seq_len: SeqLen = 8192
    """Context length of the first pretraining stage."""

    @model_validator(mode="after")
    def _ordered(self) -> "RopeScaling":
        if self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(f"low_freq_factor {low:g} must be less than high_freq_factor {high:g}")
        return self


class LlamaArgs(ModelArgs):
    """Hyper-parameters of a Llama 3 model."""

    vocab_size: VocabSize = 128256
    max_seq_len: SeqLen = 8192
    dim: Width = 4096
    """Width of the residual stream."""
    n_layers: Layers = 32
    """Number of transformer blocks."""
    n_heads: Heads = 32
    """Number of query heads."""
    n_kv_heads: Heads = 8
    """Number of key and value heads (grouped-query attention)."""
    ffn_dim: Width = 14336
    """Inner width of the feed-forward network."""
    norm_eps: float = Field(default=1e-5, gt=0, le=1)
    """Added to the mean square in RMSNorm."""
    rope_theta: float = Field(default=500_000.0, gt=0, le=10**12)
    """Base of the RoPE frequencies."""
    rope_scaling: RopeScaling | None = RopeScaling()
    """Llama 3.1 frequency scaling. `"none"`: plain RoPE, as in Llama 3.0."""
    tie_embeddings: bool = False
    """Use the token embedding as the output projection, as in 1B and 3B."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _plain_rope(cls, value: Any) -> Any:
        return None if value == "none" else value  # TOML has no null

    @model_validator(mode="after")
    def _divisible(self) -> "LlamaArgs":
        if self.dim % self.n_heads or self.head_dim % 2:
            raise ValueError(f"dim {self.dim} must be n_heads {self.n_heads} times an even head size")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")
        return self


FLAVORS = {
    "debugmodel": LlamaArgs(
        vocab_size=2048, dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, rope_scaling=None
    ),
    "1B": LlamaArgs(dim=2048, n_layers=16, ffn_dim=8192, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "3B": LlamaArgs(
        dim=3072, n_layers=28, n_heads=24, ffn_dim=8192, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True
    ),
    "8B": LlamaArgs(),
    "70B": LlamaArgs(dim=8192, n_layers=80, n_heads=64, ffn_dim=28672),
    "405B": LlamaArgs(dim=16384, n_layers=126, n_heads=128, ffn_dim=53248),
}


def init(fqn: str, args: LlamaArgs) -> Init:
    """Initialization of the parameter called `fqn`.

    Matrices that write into the residual stream are scaled by 1/sqrt(2 * depth), as in GPT-2, which bounds the stream's
    variance. The output projection has standard deviation 1/sqrt(dim): logits start with unit variance, and the first
    loss is ln(vocab) + 1/2.
    """
    parts = fqn.split(".")
    if "norm" in parts[-2]:
        return Init("ones")
    if parts[0] == "tok_embeddings":
        # A tied embedding is also the output projection, so it gets that scale.
        return Init("normal", args.dim**-0.5 if args.tie_embeddings else 1.0)
    if parts[0] == "output":
        return Init("normal", args.dim**-0.5)
    if parts[-2] in ("wo", "w2"):
        return Init("normal", 0.02 / math.sqrt(2 * (int(parts[1]) + 1)))
    return Init("normal", 0.02)


def module_flops(args: LlamaArgs, seq_len: int) -> dict[str, float]:
    """FLOPs per token of each module's forward and backward, in execution order.

    `6 N + 12 L H D T` (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B): each of N matrix weights costs 2 FLOPs
    forward and 4 backward; each of L layers with H heads of size D computes two products over T positions. By the
    convention for model FLOPs utilization, the masked half of attention counts; embedding lookups and norms don't.
    """
    attention = args.dim * args.head_dim * (2 * args.n_heads + 2 * args.n_kv_heads)
    block = 6 * (attention + 3 * args.dim * args.ffn_dim) + 12 * args.dim * seq_len
    layers = {f"layers.{i}": float(block) for i in range(args.n_layers)}
    return {"tok_embeddings": 0.0, **layers, "norm": 0.0, "output": 6.0 * args.dim * args.vocab_size}


def tied_modules(args: LlamaArgs) -> tuple[str, ...]:
    """Modules that share a weight, and therefore can't be on different pipeline stages."""
    return ("tok_embeddings", "output") if args.tie_embeddings else ()


def tiny(args: LlamaArgs, layers: int, heads: int) -> dict[str, int]:
    """Overrides that shrink the model to `layers` blocks and `heads` key-value heads, for fast tests on a CPU."""
    groups = min(args.n_heads // args.n_kv_heads, 2)
    width = 16 * groups * heads
    return {"n_layers": layers, "n_heads": groups * heads, "n_kv_heads": heads, "dim": width, "ffn_dim": 2 * width}


TENSOR_PARALLEL_STYLES: dict[str, ShardingStyle] = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.wq": "columns",
    "layers.*.attention.wk": "columns",
    "layers.*.attention.wv": "columns",
    "layers.*.attention.wo": "rows",
    "layers.*.ffn_norm": "norm",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "columns",
    "layers.*.feed_forward.w2": "rows",
    "layers.*.feed_forward.w3": "columns",
    "norm": "norm",
    "output": "output",
}
"""How tensor parallelism splits each module."""


def tensor_parallel_sizes(args: LlamaArgs) -> dict[str, int]:
    """Sizes that the tensor-parallel degree must divide."""
    return {name: getattr(args, name) for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")}
