"""Initialization, FLOPs and sharding of a decoder, from its hyper-parameters; and
`register_decoder`, which makes it a family. Imports no torch.
"""

import math
from collections.abc import Mapping
from typing import Any

from torchtitan.models.args import DecoderArgs, mean_span, unused
from torchtitan.models.decoder import mup
from torchtitan.models.delta.args import TENSOR_PARALLEL_STYLES as DELTA_STYLES
from torchtitan.models.delta.args import delta_flops, delta_init
from torchtitan.models.hf.config import HFConfig
from torchtitan.models.spec import Init, ModelSpec, register
from torchtitan.models.spec import ShardingStyle as Style


def init(fqn: str, args: DecoderArgs) -> Init:
    """Initialization of the parameter called `fqn`.

    Matrices that write into the residual stream are scaled by 1/sqrt(2 * depth), as in GPT-2, which
    bounds the stream's variance. The output projection has standard deviation 1/sqrt(dim): logits
    start with unit variance, and the first loss is ln(vocab) + 1/2.

    A tied embedding has at most `init_std`, as in published models. At 1/sqrt(dim), the embedding
    would dominate the stream of a narrow model, which then predicts every token to repeat, with a
    logit of sqrt(dim). With `init_std`, the first loss is ln(vocab) to ln(vocab) + 1/2.
    """
    path = fqn.split(".")
    if "delta" in path:
        delta = delta_init(path[-2], args)
        if delta is not None:
            return delta
    if "norm" in path[-2]:
        return Init("zeros" if args.norm_plus_one else "ones")
    if path[-1] in ("bias", "b1", "b2", "b3") or path[-2] == "sinks":
        return Init("zeros")
    output = (args.mup_base_dim or args.dim) ** -0.5
    if path[0] == "tok_embeddings":
        return Init("normal", min(args.init_std, output) if args.tie_embeddings else 1.0)
    if path[0] == "output":
        return Init("normal", output)
    std = args.init_std * mup.std_factor(fqn, args)
    if path[-2] in ("wo", "w2", "out_proj") or path[-1] == "w2":
        return Init("normal", std / math.sqrt(2 * (int(path[1]) + 1)))
    return Init("normal", std)


def module_flops(args: DecoderArgs, seq_len: int) -> dict[str, float]:
    """FLOPs per token of each module's forward and backward, in execution order.

    `6 N + 12 L H D T` (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B): each of N matrix
    weights costs 2 FLOPs forward and 4 backward; each of L layers with H heads of size D computes
    two products over T positions. By the convention for model FLOPs utilization, the masked half of
    attention counts; embedding lookups and norms don't. A mixture of experts counts its router, its
    shared expert and the experts that a token is sent to. Modules that predict further tokens
    count, with the output projection of each. With a window of w, `2 w - w^2 / T` replaces T: twice
    the mean number of tokens that a token sees.
    """
    layers = {}
    for i in range(args.n_layers + args.n_mtp):
        weights = _feed_forward_weights(args, args.has_experts(i))
        if i >= args.n_layers:  # `eh_proj` joins embeddings and hidden states
            weights += 2 * args.dim**2
        layers[f"layers.{i}"] = 6.0 * weights + _mixing_flops(args.layer_args(i), seq_len)
    modules = {f"layers.{i}": layers.pop(f"layers.{i}") for i in args.mtp_layers}
    return {
        "tok_embeddings": 0.0,
        **layers,
        "norm": 0.0,
        **modules,
        "output": 6.0 * args.dim * args.vocab_size * (1 + args.n_mtp),
    }


def _mixing_flops(args: DecoderArgs, seq_len: int) -> float:
    """FLOPs per token of a layer's mixer: everything but its feed-forward network."""
    (kind,) = args.layer_pattern
    if kind == "delta":
        return delta_flops(args, seq_len)
    span = mean_span(seq_len, args.window if kind == "window" else None)
    scores = 6 * args.n_heads * (args.head_dim + args.value_dim) * span
    return 6.0 * _attention_weights(args) + scores


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


def tiny(args: DecoderArgs, layers: int, heads: int) -> dict[str, Any]:
    """Overrides that shrink the model to `layers` blocks and `heads` key-value heads, for fast
    tests on a CPU.
    """
    groups = 1 if args.kv_lora_rank else min(args.n_heads // args.n_kv_heads, 2)
    width = 16 * groups * heads
    sizes: dict[str, Any] = {
        "n_layers": layers,
        "layer_pattern": list(dict.fromkeys(args.layer_pattern)),  # each kind in few layers
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
    if "delta" in args.layer_pattern:
        sizes |= {
            "delta_key_heads": heads,
            "delta_value_heads": 2 * heads,
            "delta_key_size": 8,
            "delta_value_size": 8,
        }
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


TENSOR_PARALLEL_STYLES: dict[str, Style] = {
    "tok_embeddings": Style.EMBEDDING,
    "layers.*.attention_norm": Style.NORM,
    "layers.*.attention": Style.GATHER_SEQUENCE,
    "layers.*.attention.wq": Style.COLUMNS,
    "layers.*.attention.wk": Style.COLUMNS,
    "layers.*.attention.wv": Style.COLUMNS,
    "layers.*.attention.wg": Style.COLUMNS,
    "layers.*.attention.q_norm": Style.HEAD_NORM,
    "layers.*.attention.k_norm": Style.HEAD_NORM,
    "layers.*.attention.wq_norm": Style.WHOLE_NORM,
    "layers.*.attention.wk_norm": Style.WHOLE_NORM,
    "layers.*.attention.sinks": Style.PER_HEAD,
    "layers.*.attention.wo": Style.ROWS,
    "layers.*.latent_attention.wq": Style.COLUMNS_OF_SEQUENCE,
    "layers.*.latent_attention.wq_a": Style.GATE,
    "layers.*.latent_attention.q_norm": Style.NORM,
    "layers.*.latent_attention.wq_b": Style.COLUMNS_OF_SEQUENCE,
    "layers.*.latent_attention.wkv_a": Style.GATE,
    "layers.*.latent_attention.kv_norm": Style.NORM,
    "layers.*.latent_attention.latent": Style.GATHER_SEQUENCE,
    "layers.*.latent_attention.wkv_b": Style.COLUMNS,
    "layers.*.latent_attention.shared_key": Style.SHARED_KEY,
    "layers.*.latent_attention.wo": Style.ROWS,
    **{f"layers.*.delta{name}": style for name, style in DELTA_STYLES.items()},
    "layers.*.attention_post_norm": Style.NORM,
    "layers.*.ffn_norm": Style.NORM,
    "layers.*.feed_forward": Style.GATHER_SEQUENCE,
    "layers.*.feed_forward.w1": Style.COLUMNS,
    "layers.*.feed_forward.w2": Style.ROWS,
    "layers.*.feed_forward.w3": Style.COLUMNS,
    "layers.*.ffn_post_norm": Style.NORM,
    "layers.*.moe.router": Style.ROUTER,
    "layers.*.moe.router.gate": Style.GATE,
    "layers.*.moe.experts": Style.EXPERTS,
    "layers.*.moe.shared": Style.GATHER_SEQUENCE,
    "layers.*.moe.shared.w1": Style.COLUMNS,
    "layers.*.moe.shared.w2": Style.ROWS,
    "layers.*.moe.shared.w3": Style.COLUMNS,
    "layers.*.moe.shared_gate": Style.GATE,
    "layers.*.enorm": Style.NORM,
    "layers.*.hnorm": Style.NORM,
    "layers.*.eh_proj": Style.GATE,
    "layers.*.output_norm": Style.NORM,
    "norm": Style.NORM,
    "output": Style.OUTPUT,
}
"""Style of tensor parallelism of each module."""


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


def register_decoder(
    name: str, flavors: Mapping[str, DecoderArgs], hf: type[HFConfig]
) -> ModelSpec:
    """Make a family of decoders available as `model.name`."""
    return register(
        ModelSpec(
            name=name,
            flavors=flavors,
            build=_build,
            init=init,
            module_flops=module_flops,
            tied_modules=tied_modules,
            tensor_parallel_styles=TENSOR_PARALLEL_STYLES,
            tensor_parallel_sizes=tensor_parallel_sizes,
            tiny=tiny,
            hf=hf.map(),
            expert_sizes=expert_sizes,
            context_parallel_sizes=context_parallel_sizes,
            mtp_modules=lambda args: args.n_mtp,
            unused=unused,
            width_ratio=mup.width_ratio,
        )
    )


def is_decoder(spec: ModelSpec) -> bool:
    """Whether a family is the plain decoder: it has its own sizes and flags, but no code."""
    return spec.build is _build and spec.module_flops is module_flops


def _build(args: DecoderArgs, attend: Any) -> Any:
    # imports torch, which checking a configuration must not
    from torchtitan.models.decoder.model import Decoder

    return Decoder(args, attend)
