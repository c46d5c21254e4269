"""The contents of each kind of block, for the planner's formulas: linear layers, token mixing and
vectors.

Widths are the whole model's, per token unless stated otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtitan.models.args import DecoderArgs, LayerKind, Mixer
from torchtitan.models.delta.args import delta_flops

Split = Literal["columns", "rows", "tokens", "experts"]
"""Dimension of a linear layer that ranks share: its outputs, inputs, tokens, or experts."""


FORMULA_FIELDS = frozenset(
    {
        *("vocab_size", "max_seq_len", "dim", "n_layers", "layer_pattern", "tie_embeddings"),
        *("n_heads", "n_kv_heads", "head_size", "window", "sinks", "gated_attention"),
        *("qk_norm", "qk_norm_whole", "qkv_bias", "wo_bias"),
        *("kv_lora_rank", "q_lora_rank", "rope_head_size", "value_head_size"),
        *("delta_key_heads", "delta_value_heads", "delta_key_size", "delta_value_size"),
        *("delta_conv_size", "norm_placement", "norm_weights"),
        *("ffn_dim", "activation", "ffn_bias", "n_mtp"),
        *("n_experts", "experts_per_token", "expert_dim", "n_dense_layers", "router_bias"),
        *("shared_expert_dim", "shared_expert_gate"),
    }
)
"""Hyper-parameters in the closed forms. A model with another one, which isn't in
`DecoderArgs.free_of_cost` either, is refused.
"""


@dataclass(frozen=True)
class Kind:
    """The properties by which the blocks of a model differ."""

    mixing: LayerKind
    experts: bool
    joins: bool
    """The block predicts further tokens, and first joins embeddings and hidden states."""


def kind_of(args: DecoderArgs, layer: int) -> Kind:
    """The kind of the block of this index."""
    return Kind(args.kind(layer), args.has_experts(layer), joins=layer >= args.n_layers)


@dataclass(frozen=True)
class Layer:
    """A linear layer."""

    name: str
    inputs: int
    outputs: int
    split: Split


@dataclass(frozen=True)
class Mixing:
    """A block's mixing of tokens: attention or a linear recurrence."""

    module: Mixer
    queries: int
    """Width of all queries."""
    keys: int
    values: int
    """Widths of all keys and values that attention reads, and context parallelism sends."""
    out: int
    """Width of the output projection's input."""
    sums: int
    """Heads whose log-sum-exp the backward needs."""
    flops: float
    """FLOPs of the forward."""
    backward: float
    """FLOPs of the backward per FLOP of the forward."""
    gathered_widths: tuple[int, ...]
    """Widths that tensor parallelism gathers along the sequence."""
    extra_elements: int = 0
    """Elements that the backward needs besides queries, keys, values, outputs and `input_elements`.
    """
    input_elements: int = 0
    """Elements of gathered inputs that nothing else keeps; each rank keeps its shard."""
    gates: int = 0
    """Gates that the heads of Gated DeltaNet read."""
    split_norms: int = 0
    """Norms over features of several ranks."""
    copy_width: int = 0
    """Width of the keys and values that are copies for the query heads that share them."""


def mixing_of(args: DecoderArgs, kind: LayerKind, seq_len: int, kv_repeated: bool) -> Mixing:
    """
    Args:
        kv_repeated: keys and values are copied for every query head.
    """
    if kind == "delta":
        return _delta(args, seq_len)
    window = seq_len
    if kind == "window" and args.window is not None:
        window = min(args.window, seq_len)
    span = 2 * window - window**2 / seq_len
    queries = args.n_heads * args.head_dim
    value_dim = args.value_dim
    # the unmasked half of two products
    flops = span * args.n_heads * (args.head_dim + value_dim)
    # Scores again, gradients of queries and keys; of values and weights (Dao, arXiv:2307.08691).
    backward = (3 * args.head_dim + 2 * value_dim) / (args.head_dim + value_dim)
    if args.kv_lora_rank:
        return _latent(args, queries, flops, backward)
    kv = queries if kv_repeated else args.n_kv_heads * args.head_dim
    gated = args.gated_attention
    return Mixing(
        "attention",
        queries,
        keys=kv,
        values=kv,
        out=queries,
        sums=args.n_heads,
        flops=flops,
        backward=backward,
        gathered_widths=(args.dim,),
        extra_elements=2 * queries if gated else 0,  # gates, and their products
        input_elements=args.dim,
        split_norms=2 if args.qk_norm_whole else 0,
        copy_width=2 * (kv - args.n_kv_heads * args.head_dim),
    )


def _latent(args: DecoderArgs, queries: int, flops: float, backward: float) -> Mixing:
    """Latent attention. Ranks gather the narrow projections, and normalize their own tokens."""
    narrow = args.kv_lora_rank + args.rope_head_size
    values = args.n_heads * args.value_dim
    query_input = args.q_lora_rank or args.dim
    return Mixing(
        "latent_attention",
        queries,
        keys=queries,
        values=values,
        out=values,
        sums=args.n_heads,
        flops=flops,
        backward=backward,
        gathered_widths=(query_input, narrow),
        extra_elements=args.dim + narrow + 2 * args.q_lora_rank + args.kv_lora_rank,
        input_elements=narrow + args.q_lora_rank,
    )


def _delta(args: DecoderArgs, seq_len: int) -> Mixing:
    """Gated DeltaNet. Its rule runs in fp32, on copies of queries, keys and values."""
    keys = args.delta_key_heads * args.delta_key_size
    values = args.delta_value_heads * args.delta_value_size
    weights = sum(layer.inputs * layer.outputs for layer in _delta_layers(args))
    head_width = args.delta_value_heads * args.delta_key_size
    return Mixing(
        "delta",
        queries=keys,
        keys=keys,
        values=values,
        out=values,
        sums=0,
        flops=delta_flops(args, seq_len) / 3 - 2 * weights,
        backward=2.0,
        gates=2 * args.delta_value_heads,
        gathered_widths=(args.dim,),
        extra_elements=values + 2 * (2 * keys + values) + 2 * (4 * head_width + 6 * values),
        input_elements=args.dim,
    )


def block_layers(args: DecoderArgs, kind: Kind, mixing: Mixing) -> Iterator[Layer]:
    """The linear layers of a block, in the order in which they run."""
    d = args.dim
    if kind.joins:
        yield Layer("eh_proj", 2 * d, d, "tokens")
    yield from _mixing_layers(args, mixing)
    gated = args.activation != "relu2"
    if not kind.experts:
        yield from _network("feed_forward", d, args.ffn_dim, gated, rows="rows")
        return
    yield Layer("moe.router.gate", d, args.n_experts, "tokens")
    if shared := args.shared_expert_dim:
        yield from _network("moe.shared", d, shared, gated, rows="rows")
        if args.shared_expert_gate:
            yield Layer("moe.shared_gate", d, 1, "tokens")
    yield from _network("moe.experts", d, args.expert_dim, gated, rows="experts")


def _network(
    name: str, dim: int, width: int, gated: bool, rows: Literal["rows", "experts"]
) -> Iterator[Layer]:
    columns: Split = "experts" if rows == "experts" else "columns"
    yield Layer(f"{name}.w1", dim, width, columns)
    if gated:
        yield Layer(f"{name}.w3", dim, width, columns)
    yield Layer(f"{name}.w2", width, dim, rows)


def _mixing_layers(args: DecoderArgs, mixing: Mixing) -> Iterator[Layer]:
    d = args.dim
    name = mixing.module
    if name == "delta":
        yield from _delta_layers(args)
    elif name == "attention":
        yield Layer("attention.wq", d, mixing.queries, "columns")
        yield Layer("attention.wk", d, args.n_kv_heads * args.head_dim, "columns")
        yield Layer("attention.wv", d, args.n_kv_heads * args.head_dim, "columns")
        if args.gated_attention:
            yield Layer("attention.wg", d, mixing.queries, "columns")
        yield Layer("attention.wo", mixing.out, d, "rows")
    else:
        rank = args.q_lora_rank
        if rank:
            yield Layer(f"{name}.wq_a", d, rank, "tokens")
            yield Layer(f"{name}.wq_b", rank, mixing.queries, "columns")
        else:
            yield Layer(f"{name}.wq", d, mixing.queries, "columns")
        yield Layer(f"{name}.wkv_a", d, args.kv_lora_rank + args.rope_head_size, "tokens")
        plain = mixing.keys - args.n_heads * args.rope_head_size
        yield Layer(f"{name}.wkv_b", args.kv_lora_rank, plain + mixing.values, "columns")
        yield Layer(f"{name}.wo", mixing.out, d, "rows")


def _delta_layers(args: DecoderArgs) -> Iterator[Layer]:
    keys = args.delta_key_heads * args.delta_key_size
    values = args.delta_value_heads * args.delta_value_size
    yield Layer("delta.in_proj_qkvz", args.dim, 2 * (keys + values), "columns")
    yield Layer("delta.in_proj_ba", args.dim, 2 * args.delta_value_heads, "columns")
    yield Layer("delta.out_proj", values, args.dim, "rows")


def vector_params(args: DecoderArgs, kind: Kind, mixing: Mixing, tp: int, ep: int) -> int:
    """Parameters of a block that are in no matrix: norms, biases, and weights of heads,
    on one tensor- and expert-parallel rank.
    """
    d = args.dim
    norms = 4 if args.norm_placement == "both" else 2
    norms += 3 * kind.joins
    count = norms * d
    if mixing.module == "latent_attention":
        count += args.q_lora_rank + args.kv_lora_rank
    elif mixing.module == "attention" and args.qk_norm:
        whole = (mixing.queries + args.n_kv_heads * args.head_dim) // tp
        count += whole if mixing.split_norms else 2 * args.head_dim
    if not args.norm_weights:
        count = 0
    if mixing.module == "delta":
        channels = (2 * mixing.keys + mixing.values) * args.delta_conv_size
        return count + args.delta_value_size + (channels + 2 * args.delta_value_heads) // tp
    if mixing.module == "attention":
        heads = mixing.queries + 2 * args.n_kv_heads * args.head_dim
        count += heads // tp * args.qkv_bias
        count += d * args.wo_bias
        count += args.n_heads // tp * args.sinks
    return count + _network_biases(args, kind, tp, ep)


def _network_biases(args: DecoderArgs, kind: Kind, tp: int, ep: int) -> int:
    inner = 1 if args.activation == "relu2" else 2
    count = 0
    if kind.experts and args.router_bias:
        count += args.n_experts
    if not args.ffn_bias:
        return count
    if not kind.experts:
        return count + inner * args.ffn_dim // tp + args.dim
    if args.shared_expert_dim:
        count += inner * args.shared_expert_dim // tp + args.dim
    return count + args.n_experts // ep * (inner * args.expert_dim + args.dim)
