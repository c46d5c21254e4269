"""Hyper-parameters of a decoder-only transformer, and what follows from them: initialization,
FLOPs, sharding.

A family is a set of such hyper-parameters and a map to Hugging Face's names. Imports no torch.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from torchtitan.config.sections.types import Heads, Layers, LayersOrZero, SeqLen, VocabSize, Width
from torchtitan.models import mup
from torchtitan.models.decoder_checks import problems
from torchtitan.models.rope_scaling import AnyScaling, Scale, YarnScaling
from torchtitan.models.spec import Init, ModelArgs, ShardingStyle

Experts = Annotated[int, Field(ge=0, le=2**14)]
HeadsOrZero = Annotated[int, Field(ge=0, le=2**14)]
WidthOrZero = Annotated[int, Field(ge=0, le=2**20)]
RopeTheta = Annotated[float, Field(gt=0, le=10**12)]
Epsilon = Annotated[float, Field(gt=0, le=1)]

LayerKind = Literal["full", "window", "nope", "delta"]
"""How a block mixes tokens.

    full     attention to all earlier tokens
    window   attention to the last tokens only
    nope     attention to all earlier tokens, without positions (Kazemnejad et al.,
             arXiv:2305.19466)
    delta    Gated DeltaNet (Yang et al., arXiv:2412.06464)
"""
Activation = Literal["swiglu", "geglu", "relu2", "clamped_swiglu"]
"""How a feed-forward network combines gate g and up u, two projections of its input.

    swiglu           silu(g) u (Shazeer, arXiv:2002.05202)
    geglu            gelu(g) u, with the tanh approximation (ibid.)
    relu2            relu(g)^2, without u (So et al., arXiv:2109.08668)
    clamped_swiglu   g sigmoid(1.702 g) (u + 1), with g at most 7 and u from -7 to 7 (OpenAI,
                     arXiv:2508.10925)
"""


class DecoderArgs(ModelArgs):
    """Hyper-parameters of a decoder."""

    vocab_size: VocabSize
    max_seq_len: SeqLen = 8192
    dim: Width
    """Width of the residual stream."""
    n_layers: Layers
    """Number of transformer blocks."""
    layer_pattern: Annotated[
        tuple[LayerKind, ...],
        Field(min_length=1, max_length=512, strict=False),
    ] = ("full",)
    """How each block mixes tokens, repeated over the blocks: `full`, `window`, `nope` (full
    attention without positions) or `delta` (Gated DeltaNet).
    """
    n_heads: Heads
    """Number of query heads."""
    n_kv_heads: Heads
    """Number of key and value heads (grouped-query attention)."""
    head_size: Width | None = None
    """Width of a head. `"none"`: `dim / n_heads`."""
    window: SeqLen | None = None
    """Tokens that a token sees in `window` layers: itself and those just before."""
    sinks: bool = False
    """A learned logit for each head, which takes its share of the softmax and adds nothing (OpenAI,
    arXiv:2508.10925).
    """
    gated_attention: bool = False
    """Multiply each head's output by a sigmoid gate (Qiu et al., arXiv:2505.06708). The gates come
    from `wq`, which is twice as wide.
    """
    attention_scale: Scale | None = None
    """Multiplies attention's scores. `"none"`: `head_size^-0.5`."""
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys, before RoPE."""
    qk_norm_whole: bool = False
    """With `qk_norm`: over all heads of a token together (OLMo 2, arXiv:2501.00656)."""
    qkv_bias: bool = False
    """Biases on the projections to queries, keys and values."""
    wo_bias: bool = False
    """A bias on attention's output projection."""
    kv_lora_rank: WidthOrZero = 0
    """Width of the latent vector that keys and values are computed from (multi-head latent
    attention, DeepSeek-V2, arXiv:2405.04434). 0: ordinary attention. `head_size` is then the width
    of queries and keys, `n_kv_heads` is `n_heads`.
    """
    q_lora_rank: WidthOrZero = 0
    """Width of the latent vector that queries are computed from. 0: from the block's input."""
    rope_head_size: WidthOrZero = 0
    """Features of latent attention's heads that carry positions; their keys are shared."""
    value_head_size: Width | None = None
    """Width of latent attention's values. `"none"`: `head_size`."""
    latent_norm_eps: Epsilon = 1e-6
    """`norm_eps` of the norms of latent vectors."""
    delta_key_heads: HeadsOrZero = 0
    """Number of query and key heads of Gated DeltaNet."""
    delta_value_heads: HeadsOrZero = 0
    """Number of value heads of Gated DeltaNet, a multiple of `delta_key_heads`."""
    delta_key_size: WidthOrZero = 0
    """Width of Gated DeltaNet's queries and keys."""
    delta_value_size: WidthOrZero = 0
    """Width of Gated DeltaNet's values."""
    delta_conv_size: Annotated[int, Field(ge=1, le=64)] = 4
    """Tokens that Gated DeltaNet's convolution spans."""
    rope_theta: RopeTheta = 500_000.0
    """Base of the RoPE frequencies."""
    rope_scaling: AnyScaling | None = None
    """Scaling of the RoPE frequencies, of `type` `llama3`, `yarn` or `linear`. `"none"`: plain
    RoPE.
    """
    rope_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's features that are rotated, the first ones."""
    rope_interleaved: bool = False
    """Rotate features 2i and 2i + 1 together, instead of i and i + half."""
    window_rope_theta: RopeTheta | None = None
    """`rope_theta` of `window` layers. `"none"`: the same."""
    scale_window_rope: bool = True
    """Use `rope_scaling` in `window` layers, too."""
    norm_eps: Epsilon = 1e-5
    """Added to the mean square in RMSNorm."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Where a block normalizes: what attention and feed-forward read, what they add to the residual
    stream, or both.
    """
    norm_plus_one: bool = False
    """Norms multiply by 1 + weight."""
    norm_weights: bool = True
    """Norms have weights."""
    ffn_dim: Width
    """Inner width of the feed-forward network."""
    activation: Activation = "swiglu"
    """Activation of feed-forward networks and experts."""
    ffn_bias: bool = False
    """Biases in feed-forward networks and experts."""
    tie_embeddings: bool = False
    """Use the token embedding as the output projection."""
    embedding_scale: Scale = 1.0
    """Multiplies the token embeddings."""
    embedding_norm: bool = False
    """RMSNorm, without weights, on the token embeddings."""
    logit_scale: Scale = 1.0
    """Multiplies the logits."""
    logit_softcap: Scale | None = None
    """Largest absolute logit: `cap tanh(logit / cap)` (Gemma 2, arXiv:2408.00118)."""
    init_std: Scale = 0.02
    """Standard deviation of the initial weights, but for the embedding and the output."""
    n_mtp: Annotated[int, Field(ge=0, le=16)] = 0
    """Modules that predict further tokens in training (multi-token prediction, DeepSeek-V3,
    arXiv:2412.19437, section 2.2).
    """
    n_experts: Experts = 0
    """Experts in each mixture-of-experts block. 0: a dense model."""
    experts_per_token: Experts = 0
    """Experts that each token is sent to."""
    expert_dim: Width = 1
    """Inner width of an expert."""
    n_dense_layers: LayersOrZero = 0
    """The first blocks, which have a feed-forward network of `ffn_dim` instead of experts."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """How a router's logits become weights of experts. A softmax over the chosen experts alone is
    `softmax` with `normalize_expert_weights`.
    """
    router_bias: bool = False
    """A bias on the router's logits."""
    normalize_expert_weights: bool = True
    """Divide the weights of a token's experts by their sum."""
    route_scale: Scale = 1.0
    """Multiplies the weights of a token's experts."""
    n_expert_groups: Annotated[int, Field(ge=1, le=2**14)] = 1
    """Groups of experts, of which a token chooses some first."""
    expert_groups_per_token: Annotated[int, Field(ge=1, le=2**14)] = 1
    """Groups that a token's experts are in."""
    shared_expert_dim: WidthOrZero = 0
    """Inner width of the expert that all tokens share, or the sum of several. 0: none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by a sigmoid gate for each token."""
    mup_base_dim: Width | None = None
    """Scale initial weights, learning rates and logits so that a learning rate found at this `dim`
    is right at every other (muP, Yang et al., arXiv:2203.03466). `"none"`: don't.
    """
    mup_base_head_size: Width | None = None
    """Head size of muP's base model. `"none"`: this model's, which has more heads instead."""

    @property
    def head_dim(self) -> int:
        return self.head_size or self.dim // self.n_heads

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.value_head_size or self.head_dim

    @property
    def rope_dim(self) -> int:
        """Features of a head that are rotated."""
        return self.rope_head_size or int(self.head_dim * self.rope_fraction)

    @property
    def score_scale(self) -> float:
        """What attention's scores are multiplied by."""
        scale = self.attention_scale or self.head_dim**-0.5
        if self.mup_base_dim and self.mup_base_head_size and not self.attention_scale:
            scale = self.mup_base_head_size**0.5 / self.head_dim
        if self.kv_lora_rank and isinstance(self.rope_scaling, YarnScaling):
            return scale * self.rope_scaling.on_scores
        return scale

    @property
    def logit_factor(self) -> float:
        """What logits are multiplied by."""
        return self.logit_scale / mup.multiple(self)

    def kind(self, layer: int) -> LayerKind:
        """How the block of this index mixes tokens. Modules that predict further tokens come after
        the last block, and are like it.
        """
        return self.layer_pattern[min(layer, self.n_layers - 1) % len(self.layer_pattern)]

    def of_layer(self, layer: int) -> Self:
        """The hyper-parameters of one block, whose `layer_pattern` is its kind."""
        return self.model_copy(update={"layer_pattern": (self.kind(layer),)})

    @property
    def has_window_rope(self) -> bool:
        """Whether `window` layers have other rotary positions than the rest."""
        other = self.window_rope_theta not in (None, self.rope_theta)
        plain = self.rope_scaling is not None and not self.scale_window_rope
        return "window" in self.layer_pattern and (other or plain)

    @property
    def feed_forward_options(self) -> dict[str, Any]:
        """Arguments of feed-forward networks and experts that aren't the defaults."""
        options: dict[str, Any] = {}
        if self.activation != "swiglu":
            options["activation"] = self.activation
        if self.ffn_bias:
            options["bias"] = True
        return options

    @property
    def kinds(self) -> set[LayerKind]:
        """The kinds of all blocks."""
        return {self.kind(layer) for layer in range(self.n_layers)}

    def has_experts(self, layer: int) -> bool:
        """Whether the block of this index is a mixture of experts."""
        return self.n_experts > 0 and min(layer, self.n_layers - 1) >= self.n_dense_layers

    @property
    def mtp_layers(self) -> range:
        """The indices of the modules that predict further tokens."""
        return range(self.n_layers, self.n_layers + self.n_mtp)

    @model_validator(mode="after")
    def _check(self) -> "DecoderArgs":
        for problem in problems(self):
            raise ValueError(problem)
        return self


def init(fqn: str, args: DecoderArgs) -> Init:
    """Initialization of the parameter called `fqn`.

    Matrices that write into the residual stream are scaled by 1/sqrt(2 * depth), as in GPT-2, which
    bounds the stream's variance. The output projection has standard deviation 1/sqrt(dim): logits
    start with unit variance, and the first loss is ln(vocab) + 1/2.
    """
    parts = fqn.split(".")
    if "norm" in parts[-2]:
        return Init("zeros" if args.norm_plus_one else "ones")
    if parts[-1] in ("bias", "b1", "b2", "b3") or parts[-2] == "sinks":
        return Init("zeros")
    output = (args.mup_base_dim or args.dim) ** -0.5
    if parts[0] == "tok_embeddings":
        # A tied embedding is also the output projection, so it gets that scale.
        return Init("normal", output if args.tie_embeddings else 1.0)
    if parts[0] == "output":
        return Init("normal", output)
    std = args.init_std * mup.std_factor(fqn, args)
    if parts[-2] in ("wo", "w2") or parts[-1] == "w2":
        return Init("normal", std / math.sqrt(2 * (int(parts[1]) + 1)))
    return Init("normal", std)


def module_flops(args: DecoderArgs, seq_len: int) -> dict[str, float]:
    """FLOPs per token of each module's forward and backward, in execution order.

    `6 N + 12 L H D T` (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B): each of N matrix
    weights costs 2 FLOPs forward and 4 backward; each of L layers with H heads of size D computes
    two products over T positions. By the convention for model FLOPs utilization, the masked half of
    attention counts; embedding lookups and norms don't. Of a mixture of experts, the router, the
    shared expert and a token's own experts count. Modules that predict further tokens count, with
    the output projection of each. A window w is a T of `2 w - w^2 / T`: twice the
    mean number of tokens that a token sees.
    """
    layers = {}
    for i in range(args.n_layers + args.n_mtp):
        weights = _attention_weights(args) + _feed_forward_weights(args, args.has_experts(i))
        span = float(seq_len)
        if args.kind(i) == "window" and args.window is not None and args.window < seq_len:
            span = 2 * args.window - args.window**2 / seq_len
        scores = 6 * args.n_heads * (args.head_dim + args.value_dim) * span
        joining = 0 if i < args.n_layers else 2 * args.dim**2
        layers[f"layers.{i}"] = 6.0 * (weights + joining) + scores
    modules = {f"layers.{i}": layers.pop(f"layers.{i}") for i in args.mtp_layers}
    return {
        "tok_embeddings": 0.0,
        **layers,
        "norm": 0.0,
        **modules,
        "output": 6.0 * args.dim * args.vocab_size * (1 + args.n_mtp),
    }


def _attention_weights(args: DecoderArgs) -> int:
    """Elements of the matrices that each token is multiplied by in attention."""
    queries = args.n_heads * args.head_dim
    keys = args.n_kv_heads * args.head_dim
    if not args.kv_lora_rank:
        return args.dim * ((3 if args.gated_attention else 2) * queries + 2 * keys)
    q = args.q_lora_rank
    values = args.n_heads * args.value_dim
    expanded = args.n_heads * (args.head_dim - args.rope_head_size) + values
    return (
        (q * (args.dim + queries) if q else args.dim * queries)
        + args.dim * (args.kv_lora_rank + args.rope_head_size)
        + args.kv_lora_rank * expanded
        + values * args.dim
    )


def _feed_forward_weights(args: DecoderArgs, has_experts: bool) -> int:
    matrices = 2 if args.activation == "relu2" else 3
    if not has_experts:
        return args.dim * matrices * args.ffn_dim
    width = args.experts_per_token * args.expert_dim + args.shared_expert_dim
    gate = 1 if args.shared_expert_gate else 0
    return args.dim * (matrices * width + args.n_experts + gate)


def tied_modules(args: DecoderArgs) -> tuple[str, ...]:
    """Modules that share a weight, and therefore can't be on different pipeline stages."""
    return ("tok_embeddings", "output") if args.tie_embeddings else ()


def tiny(
    args: DecoderArgs,
    layers: int,
    heads: int,
) -> dict[str, Any]:
    """Overrides that shrink the model to `layers` blocks and `heads` key-value heads, for fast
    tests on a CPU.
    """
    groups = 1 if args.kv_lora_rank else min(args.n_heads // args.n_kv_heads, 2)
    width = 16 * groups * heads
    sizes: dict[str, Any] = {
        "n_layers": layers,
        "n_heads": groups * heads,
        "n_kv_heads": heads,
        "dim": width,
        "ffn_dim": 2 * width,
    }
    if args.head_size is not None:
        sizes["head_size"] = 32  # not dim / n_heads, as in the real sizes
    if args.window is not None:
        sizes["window"] = 5
    if args.kv_lora_rank:
        sizes |= {"kv_lora_rank": 16, "rope_head_size": 8, "value_head_size": 16}
    if args.q_lora_rank:
        sizes["q_lora_rank"] = 24
    if args.n_experts:
        sizes |= {
            "n_experts": 8,
            "experts_per_token": 2,
            "expert_dim": width,
            "n_dense_layers": min(args.n_dense_layers, layers - 1),
            "n_expert_groups": min(args.n_expert_groups, 4),
            "expert_groups_per_token": min(args.expert_groups_per_token, 2),
        }
    if args.shared_expert_dim:
        sizes["shared_expert_dim"] = width
    return sizes


TENSOR_PARALLEL_STYLES: dict[str, ShardingStyle] = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.wq": "columns",
    "layers.*.attention.wk": "columns",
    "layers.*.attention.wv": "columns",
    "layers.*.attention.wg": "columns",
    "layers.*.attention.q_norm": "head_norm",
    "layers.*.attention.k_norm": "head_norm",
    "layers.*.attention.wq_norm": "whole_norm",
    "layers.*.attention.wk_norm": "whole_norm",
    "layers.*.attention.sinks": "per_head",
    "layers.*.attention.wo": "rows",
    "layers.*.latent_attention.wq": "columns_of_sequence",
    "layers.*.latent_attention.wq_a": "gate",
    "layers.*.latent_attention.q_norm": "norm",
    "layers.*.latent_attention.wq_b": "columns_of_sequence",
    "layers.*.latent_attention.wkv_a": "gate",
    "layers.*.latent_attention.kv_norm": "norm",
    "layers.*.latent_attention.latent": "gather_sequence",
    "layers.*.latent_attention.wkv_b": "columns",
    "layers.*.latent_attention.shared_key": "shared_key",
    "layers.*.latent_attention.wo": "rows",
    "layers.*.attention_post_norm": "norm",
    "layers.*.ffn_norm": "norm",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "columns",
    "layers.*.feed_forward.w2": "rows",
    "layers.*.feed_forward.w3": "columns",
    "layers.*.ffn_post_norm": "norm",
    "layers.*.moe.router": "router",
    "layers.*.moe.router.gate": "gate",
    "layers.*.moe.experts": "experts",
    "layers.*.moe.shared": "gather_sequence",
    "layers.*.moe.shared.w1": "columns",
    "layers.*.moe.shared.w2": "rows",
    "layers.*.moe.shared.w3": "columns",
    "layers.*.moe.shared_gate": "gate",
    "layers.*.enorm": "norm",
    "layers.*.hnorm": "norm",
    "layers.*.eh_proj": "gate",
    "layers.*.output_norm": "norm",
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
    names = ["n_heads", "n_kv_heads"]
    if "delta" in args.kinds:
        names.append("delta_key_heads")
    if args.n_experts == 0 or args.n_dense_layers > 0:
        names.append("ffn_dim")
    if args.shared_expert_dim:
        names.append("shared_expert_dim")
    names.append("vocab_size")
    return {name: getattr(args, name) for name in names}


def context_parallel_sizes(args: DecoderArgs) -> dict[str, int]:
    """Sizes that the context-parallel degree times the tensor-parallel degree must divide."""
    return {"delta_key_heads": args.delta_key_heads} if "delta" in args.kinds else {}
