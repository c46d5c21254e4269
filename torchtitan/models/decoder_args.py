"""Hyper-parameters of a decoder-only transformer, and what follows from them: initialization,
FLOPs, sharding.

A family is a set of such hyper-parameters and a map to Hugging Face's names. Imports no torch.
"""

import math
from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from torchtitan.config.sections.types import Heads, Layers, LayersOrZero, SeqLen, VocabSize, Width
from torchtitan.models.spec import Init, ModelArgs, ShardingStyle

Scale = Annotated[float, Field(gt=0, le=10**6)]
Experts = Annotated[int, Field(ge=0, le=2**14)]


class RopeScaling(BaseModel):
    """Llama 3.1's scaling of RoPE's low frequencies for longer contexts (arXiv:2407.21783, section
    3.4.2).
    """

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
            low = self.low_freq_factor
            high = self.high_freq_factor
            raise ValueError(f"low_freq_factor {low:g} must be less than high_freq_factor {high:g}")
        return self


class DecoderArgs(ModelArgs):
    """Hyper-parameters of a decoder."""

    vocab_size: VocabSize
    max_seq_len: SeqLen = 8192
    dim: Width
    """Width of the residual stream."""
    n_layers: Layers
    """Number of transformer blocks."""
    n_heads: Heads
    """Number of query heads."""
    n_kv_heads: Heads
    """Number of key and value heads (grouped-query attention)."""
    head_size: Width | None = None
    """Width of a head. `"none"`: `dim / n_heads`."""
    ffn_dim: Width
    """Inner width of the feed-forward network."""
    norm_eps: float = Field(
        default=1e-5,
        gt=0,
        le=1,
    )
    """Added to the mean square in RMSNorm."""
    rope_theta: float = Field(
        default=500_000.0,
        gt=0,
        le=10**12,
    )
    """Base of the RoPE frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1 frequency scaling. `"none"`: plain RoPE."""
    tie_embeddings: bool = False
    """Use the token embedding as the output projection."""
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys, before RoPE."""
    qkv_bias: bool = False
    """Biases on the projections to queries, keys and values."""
    n_experts: Experts = 0
    """Experts in each mixture-of-experts block. 0: a dense model."""
    experts_per_token: Experts = 0
    """Experts that each token is sent to."""
    expert_dim: Width = 1
    """Inner width of an expert."""
    normalize_expert_weights: bool = True
    """Divide the weights of a token's experts by their sum."""
    n_dense_layers: LayersOrZero = 0
    """The first blocks, which have a feed-forward network of `ffn_dim` instead of experts."""

    @property
    def head_dim(self) -> int:
        return self.head_size or self.dim // self.n_heads

    def has_experts(self, layer: int) -> bool:
        """Whether the block of this index is a mixture of experts."""
        return self.n_experts > 0 and layer >= self.n_dense_layers

    @model_validator(mode="after")
    def _divisible(self) -> "DecoderArgs":
        if self.head_size is None and (self.dim % self.n_heads or self.head_dim % 2):
            raise ValueError(
                f"dim {self.dim} must be n_heads {self.n_heads} times an even head size"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_size {self.head_size} must be even")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.n_experts and not 1 <= self.experts_per_token <= self.n_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} must be 1 to n_experts "
                f"{self.n_experts}"
            )
        return self


def init(fqn: str, args: DecoderArgs) -> Init:
    """Initialization of the parameter called `fqn`.

    Matrices that write into the residual stream are scaled by 1/sqrt(2 * depth), as in GPT-2, which
    bounds the stream's variance. The output projection has standard deviation 1/sqrt(dim): logits
    start with unit variance, and the first loss is ln(vocab) + 1/2.
    """
    parts = fqn.split(".")
    if "norm" in parts[-2]:
        return Init("ones")
    if parts[-1] == "bias":
        return Init("zeros")
    if parts[0] == "tok_embeddings":
        # A tied embedding is also the output projection, so it gets that scale.
        return Init("normal", args.dim**-0.5 if args.tie_embeddings else 1.0)
    if parts[0] == "output":
        return Init("normal", args.dim**-0.5)
    if parts[-2] in ("wo", "w2") or parts[-1] == "w2":
        return Init("normal", 0.02 / math.sqrt(2 * (int(parts[1]) + 1)))
    return Init("normal", 0.02)


def module_flops(args: DecoderArgs, seq_len: int) -> dict[str, float]:
    """FLOPs per token of each module's forward and backward, in execution order.

    `6 N + 12 L H D T` (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B): each of N matrix
    weights costs 2 FLOPs forward and 4 backward; each of L layers with H heads of size D computes
    two products over T positions. By the convention for model FLOPs utilization, the masked half of
    attention counts; embedding lookups and norms don't. Of a mixture of experts, the router and a
    token's own experts count.
    """
    attention = args.dim * args.head_dim * (2 * args.n_heads + 2 * args.n_kv_heads)
    scores = 12 * args.n_heads * args.head_dim * seq_len
    layers = {}
    for i in range(args.n_layers):
        width = args.experts_per_token * args.expert_dim if args.has_experts(i) else args.ffn_dim
        router = args.n_experts if args.has_experts(i) else 0
        layers[f"layers.{i}"] = float(6 * (attention + args.dim * (3 * width + router)) + scores)
    return {
        "tok_embeddings": 0.0,
        **layers,
        "norm": 0.0,
        "output": 6.0 * args.dim * args.vocab_size,
    }


def tied_modules(args: DecoderArgs) -> tuple[str, ...]:
    """Modules that share a weight, and therefore can't be on different pipeline stages."""
    return ("tok_embeddings", "output") if args.tie_embeddings else ()


def tiny(
    args: DecoderArgs,
    layers: int,
    heads: int,
) -> dict[str, int]:
    """Overrides that shrink the model to `layers` blocks and `heads` key-value heads, for fast
    tests on a CPU.
    """
    groups = min(args.n_heads // args.n_kv_heads, 2)
    width = 16 * groups * heads
    sizes = {
        "n_layers": layers,
        "n_heads": groups * heads,
        "n_kv_heads": heads,
        "dim": width,
        "ffn_dim": 2 * width,
    }
    if args.head_size is not None:
        sizes["head_size"] = 32  # not dim / n_heads, as in the real sizes
    if args.n_experts:
        experts = {
            "n_experts": 8,
            "experts_per_token": 2,
            "expert_dim": width,
            "n_dense_layers": 0,
        }
        sizes |= experts | {"n_dense_layers": min(args.n_dense_layers, layers - 1)}
    return sizes


TENSOR_PARALLEL_STYLES: dict[str, ShardingStyle] = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.wq": "columns",
    "layers.*.attention.wk": "columns",
    "layers.*.attention.wv": "columns",
    "layers.*.attention.q_norm": "head_norm",
    "layers.*.attention.k_norm": "head_norm",
    "layers.*.attention.wo": "rows",
    "layers.*.ffn_norm": "norm",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "columns",
    "layers.*.feed_forward.w2": "rows",
    "layers.*.feed_forward.w3": "columns",
    "layers.*.moe.router": "router",
    "layers.*.moe.router.gate": "gate",
    "layers.*.moe.experts": "experts",
    "norm": "norm",
    "output": "output",
}
"""How tensor parallelism splits each module."""


def expert_sizes(args: DecoderArgs) -> dict[str, int]:
    """Sizes of the stacked weights of the experts; empty for a dense model."""
    names = ("n_experts", "dim", "expert_dim")
    return {name: getattr(args, name) for name in names} if args.n_experts else {}


def tensor_parallel_sizes(args: DecoderArgs) -> dict[str, int]:
    """Sizes that the tensor-parallel degree must divide."""
    dense = args.n_experts == 0 or args.n_dense_layers > 0
    names = ("n_heads", "n_kv_heads", *(("ffn_dim",) if dense else ()), "vocab_size")
    return {name: getattr(args, name) for name in names}
