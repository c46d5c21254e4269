"""Hyper-parameters of a decoder-only transformer.

A family is a set of such hyper-parameters and a map to Hugging Face's names. Imports no torch.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from torchtitan.config.types import Heads, Layers, LayersOrZero, SeqLen, VocabSize, Width
from torchtitan.models.rope_scaling import AnyScaling, Scale, YarnScaling
from torchtitan.models.spec import ModelArgs

Experts = Annotated[int, Field(ge=0, le=2**14)]
HeadsOrZero = Annotated[int, Field(ge=0, le=2**14)]
WidthOrZero = Annotated[int, Field(ge=0, le=2**20)]
RopeTheta = Annotated[float, Field(gt=0, le=10**12)]
Epsilon = Annotated[float, Field(gt=0, le=1)]

LayerKind = Literal["full", "window", "nope", "delta"]
"""Ways in which a block mixes tokens.

    full     attention to all earlier tokens
    window   attention to the last tokens only
    nope     attention to all earlier tokens, without positions (Kazemnejad et al.,
             arXiv:2305.19466)
    delta    Gated DeltaNet (Yang et al., arXiv:2412.06464)
"""
Mixer = Literal["attention", "latent_attention", "delta"]
"""Modules that mix tokens, by their names in a block."""
Activation = Literal["swiglu", "geglu", "relu2", "clamped_swiglu"]
"""Ways in which a feed-forward network combines gate g and up u, two projections of its input.

    swiglu           silu(g) u (Shazeer, arXiv:2002.05202)
    geglu            gelu(g) u, with the tanh approximation (ibid.)
    relu2            relu(g)^2, without u (So et al., arXiv:2109.08668)
    clamped_swiglu   g sigmoid(1.702 g) (u + 1), with g at most 7 and u from -7 to 7 (OpenAI,
                     arXiv:2508.10925)
"""


DEBUG_SIZES: Mapping[str, int] = {"vocab_size": 2048, "dim": 256, "ffn_dim": 768}
"""Sizes of a family's `debugmodel`."""
DEBUG_EXPERTS: Mapping[str, int] = {
    "n_layers": 4,
    "n_experts": 16,
    "experts_per_token": 4,
    "expert_dim": 128,
}
"""Depth and experts of a `debugmodel` with experts."""


def mean_span(seq_len: int, window: int | None) -> float:
    """Twice the mean number of tokens that a token of a row sees, itself included."""
    if window is None or window >= seq_len:
        return seq_len
    return 2 * window - window**2 / seq_len


class DecoderArgs(ModelArgs):
    """Hyper-parameters of a decoder."""

    # ---- size
    vocab_size: VocabSize
    max_seq_len: SeqLen = 8192
    dim: Width
    """Width of the residual stream."""
    n_layers: Layers
    """Number of transformer blocks."""
    layer_pattern: Annotated[
        tuple[LayerKind, ...], Field(min_length=1, max_length=512, strict=False)
    ] = ("full",)
    """Kinds of the blocks, repeated over the layers: `full`, `window`, `nope` (full attention
    without positions) or `delta` (Gated DeltaNet).
    """

    # ---- attention
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
    """Multiply each feature of the heads' outputs by a sigmoid gate, which `wg` computes from the
    block's input (Qiu et al., arXiv:2505.06708).
    """
    attention_scale: Scale | None = None
    """Multiplies attention's scores. `"none"`: `head_size^-0.5`."""
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys, before RoPE."""
    qk_norm_whole: bool = False
    """Normalize all heads of a token together if `qk_norm` is on (OLMo 2, arXiv:2501.00656)."""
    qkv_bias: bool = False
    """Biases on the projections to queries, keys and values."""
    wo_bias: bool = False
    """A bias on attention's output projection."""

    # ---- latent attention
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

    # ---- Gated DeltaNet
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

    # ---- rotary positions
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
    """Use `rope_scaling` also in `window` layers."""

    # ---- norms and feed-forward
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

    # ---- embedding, output, initialization, further predictions
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
    """Standard deviation of the initial weights, except an untied embedding and output."""
    n_mtp: Annotated[int, Field(ge=0, le=16)] = 0
    """Modules that predict further tokens in training (multi-token prediction, DeepSeek-V3,
    arXiv:2412.19437, section 2.2).
    """

    # ---- mixture of experts
    n_experts: Experts = 0
    """Experts in each mixture-of-experts block. 0: a dense model."""
    experts_per_token: Experts = 0
    """Experts that each token is sent to."""
    expert_dim: Width = 1
    """Inner width of an expert."""
    n_dense_layers: LayersOrZero = 0
    """The first blocks, which have a feed-forward network of `ffn_dim` instead of experts."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns a router's logits into weights of experts. A softmax over only the chosen
    experts is `softmax` with `normalize_expert_weights`.
    """
    router_bias: bool = False
    """A bias on the router's logits."""
    normalize_expert_weights: bool = True
    """Divide the weights of a token's experts by their sum."""
    route_scale: Scale = 1.0
    """Multiplies the weights of a token's experts."""
    n_expert_groups: Annotated[int, Field(ge=1, le=2**14)] = 1
    """Groups of experts. A token chooses groups first, then experts in them."""
    expert_groups_per_token: Annotated[int, Field(ge=1, le=2**14)] = 1
    """Groups that a token chooses."""
    shared_expert_dim: WidthOrZero = 0
    """Inner width of the expert that all tokens share, or the sum of several. 0: none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by a sigmoid gate for each token."""

    # ---- maximal update parametrization
    mup_base_dim: Width | None = None
    """Scale initial weights, learning rates and logits so that a learning rate found at this `dim`
    is right at every other (muP, Yang et al., arXiv:2203.03466). `"none"`: don't.
    """
    mup_base_head_size: Width | None = None
    """Head size of muP's base model. `"none"`: this model's, which has more heads instead."""

    # ---- derived

    @property
    def mixer(self) -> Mixer:
        """Name of the module that mixes tokens, given the `layer_args` of a layer."""
        if self.layer_pattern[0] == "delta":
            return "delta"
        return "latent_attention" if self.kv_lora_rank else "attention"

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
        """Factor of attention's scores."""
        scale = self.attention_scale or self.head_dim**-0.5
        if self.mup_base_dim and self.mup_base_head_size:
            scale = self.mup_base_head_size**0.5 / self.head_dim
        if self.kv_lora_rank and isinstance(self.rope_scaling, YarnScaling):
            return scale * self.rope_scaling.score_factor
        return scale

    @property
    def logit_factor(self) -> float:
        """Factor of the logits."""
        return self.logit_scale / self.width_multiple

    @property
    def width_multiple(self) -> float:
        """How many times wider the model is than muP's base model; 1 without muP."""
        return self.dim / self.mup_base_dim if self.mup_base_dim else 1.0

    def kind(self, layer: int) -> LayerKind:
        """The kind of the block of this index. Modules that predict further tokens have the indices
        after the last block, and its kind.
        """
        return self.layer_pattern[min(layer, self.n_layers - 1) % len(self.layer_pattern)]

    def layer_args(self, layer: int) -> Self:
        """The hyper-parameters of one block, whose `layer_pattern` is only that block's kind."""
        return self.model_copy(update={"layer_pattern": (self.kind(layer),)})

    @property
    def has_window_rope(self) -> bool:
        """Whether `window` layers have rotary positions that differ from other layers'."""
        other_theta = self.window_rope_theta not in (None, self.rope_theta)
        plain = self.rope_scaling is not None and not self.scale_window_rope
        return "window" in self.layer_pattern and (other_theta or plain)

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


# ---- what is wrong with hyper-parameters, or has no effect


_MATTER_WITH: Mapping[str, Collection[str]] = {
    "n_experts": (
        "experts_per_token",
        "expert_dim",
        "n_dense_layers",
        "router_scores",
        "router_bias",
        "normalize_expert_weights",
        "route_scale",
        "n_expert_groups",
        "expert_groups_per_token",
        "shared_expert_dim",
        "shared_expert_gate",
    ),
    "kv_lora_rank": ("q_lora_rank", "rope_head_size", "value_head_size", "latent_norm_eps"),
    "qk_norm": ("qk_norm_whole",),
    "mup_base_dim": ("mup_base_head_size",),
}
"""Hyper-parameters that matter only where another one is set."""
_MATTER_IN_LAYERS: Mapping[LayerKind, Collection[str]] = {
    "window": ("window", "window_rope_theta", "scale_window_rope"),
    "delta": (
        "delta_key_heads",
        "delta_value_heads",
        "delta_key_size",
        "delta_value_size",
        "delta_conv_size",
    ),
}
"""Hyper-parameters that matter only in one kind of layer."""


def unused(args: DecoderArgs) -> dict[str, str]:
    """Hyper-parameters without effect on a model, each with what the model lacks for it."""
    lacks: dict[str, str] = {}
    for switch, names in _MATTER_WITH.items():
        if not getattr(args, switch):
            lacks |= dict.fromkeys(names, switch)
    for kind, names in _MATTER_IN_LAYERS.items():
        if kind not in args.kinds:
            lacks |= dict.fromkeys(names, f'"{kind}" in layer_pattern')
    if args.n_experts and not args.n_dense_layers:
        lacks["ffn_dim"] = "n_dense_layers"
    return lacks


def problems(args: DecoderArgs) -> list[str]:
    """Reasons why no decoder can have these hyper-parameters; empty if one can."""
    return [*_attention_problems(args), *_expert_problems(args)]


def _attention_problems(args: DecoderArgs) -> Iterator[str]:
    if args.head_size is None and (args.dim % args.n_heads or args.head_dim % 2):
        yield f"dim {args.dim} must be n_heads {args.n_heads} times an even head size"
    if args.head_dim % 2:
        yield f"head_size {args.head_size} must be even"
    if args.n_heads % args.n_kv_heads:
        yield f"n_heads {args.n_heads} must be a multiple of n_kv_heads {args.n_kv_heads}"
    if "window" in args.layer_pattern and args.window is None:
        yield "layer_pattern has window layers, so window must be set"
    if args.rope_dim % 2:
        yield (
            f"rope_fraction {args.rope_fraction:g} of head_size {args.head_dim} must be an even "
            "number of features"
        )
    if args.qk_norm_whole and not args.qk_norm:
        yield "qk_norm_whole needs qk_norm = true"
    if args.attention_scale and args.mup_base_head_size:
        yield "attention_scale and mup_base_head_size both set the scale of scores: set one"
    if args.kv_lora_rank:
        yield from _latent_problems(args)
    elif args.q_lora_rank or args.rope_head_size or args.value_head_size:
        yield "q_lora_rank, rope_head_size and value_head_size need latent attention: kv_lora_rank"
    if "delta" in args.layer_pattern:
        sizes = (args.delta_key_heads, args.delta_value_heads)
        if not all((*sizes, args.delta_key_size, args.delta_value_size)):
            yield (
                "layer_pattern has delta layers, so delta_key_heads, delta_value_heads, "
                "delta_key_size and delta_value_size must be set"
            )
        elif sizes[1] % sizes[0]:
            yield f"delta_value_heads {sizes[1]} must be a multiple of delta_key_heads {sizes[0]}"


def _latent_problems(args: DecoderArgs) -> Iterator[str]:
    if not 0 < args.rope_head_size < args.head_dim:
        yield (
            f"rope_head_size {args.rope_head_size} must be 1 to head_size {args.head_dim} - 1 with "
            "latent attention"
        )
    if args.n_kv_heads != args.n_heads:
        yield f"n_kv_heads {args.n_kv_heads} must be n_heads {args.n_heads} with latent attention"
    if args.rope_fraction != 1:
        yield "rope_fraction is not for latent attention (kv_lora_rank), which has rope_head_size"
    ordinary = ("sinks", "gated_attention", "qk_norm", "qkv_bias", "wo_bias")
    for name in ordinary:
        if getattr(args, name):
            yield f"{name} is not for latent attention (kv_lora_rank)"


def _expert_problems(args: DecoderArgs) -> Iterator[str]:
    if not args.n_experts:
        return
    n = args.n_experts
    k = args.experts_per_token
    groups = args.n_expert_groups
    if not 1 <= k <= n:
        yield f"experts_per_token {k} must be 1 to n_experts {n}"
    if n % groups:
        yield f"n_experts {n} must be a multiple of n_expert_groups {groups}"
    elif args.expert_groups_per_token > groups:
        groups_per_token = args.expert_groups_per_token
        yield f"expert_groups_per_token {groups_per_token} must be at most n_expert_groups {groups}"
    elif k > args.expert_groups_per_token * (n // groups):
        yield (
            f"experts_per_token {k} must be at most the {n // groups} experts of each of the "
            f"{args.expert_groups_per_token} groups of a token"
        )
    if args.shared_expert_gate and not args.shared_expert_dim:
        yield "shared_expert_gate needs shared_expert_dim"
