"""Phi-4 (Abdin et al., arXiv:2412.08905), and Phi-3 for up to 4,096 tokens (arXiv:2404.14219).

Their files pack queries, keys and values, and gate and up.
"""

from functools import partial
from typing import Any, Literal

from torchtitan.models.args import DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.rope import Rope
from torchtitan.models.hf.windows import OneWindow
from torchtitan.models.hf_names import HFNames, HFSlice


class _PlainRope(Rope):
    """transformers reads other types as `longrope`, with a factor for each feature."""

    rope_type: Literal["default"] | None = None


class _Config(OneWindow):
    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    partial_rope = True
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_scaling: _PlainRope | None = None
    rope_parameters: _PlainRope | None = None
    pad_token_id: int | None = None
    """Without the key, transformers has an embedding of token 32000, which small vocabularies lack.
    """

    @classmethod
    def block_names(cls, args: DecoderArgs, layer: int) -> HFNames:
        names = super().block_names(args, layer)
        queries = args.n_heads * args.head_dim
        keys = args.n_kv_heads * args.head_dim
        rows = {"q": (0, queries), "k": (queries, queries + keys)}
        rows["v"] = (queries + keys, queries + 2 * keys)
        for x, take in rows.items():
            names[f"attention.w{x}.weight"] = HFSlice(
                "self_attn.qkv_proj.weight", take=take, of=queries + 2 * keys
            )
        width = args.ffn_dim
        for number, first in ((1, 0), (3, width)):
            names[f"feed_forward.w{number}.weight"] = HFSlice(
                "mlp.gate_up_proj.weight", take=(first, first + width), of=2 * width
            )
        return names

    @classmethod
    def write_rope(cls, args: DecoderArgs) -> dict[str, Any]:
        return {"rope_scaling": None, "partial_rotary_factor": args.rope_fraction}


_phi = partial(DecoderArgs, dim=5120, n_layers=40, n_heads=40, n_kv_heads=10, ffn_dim=17920)
_phi3 = partial(_phi, vocab_size=32064, rope_theta=1e4, layer_pattern=("window",), window=2047)

FLAVORS = {
    "debugmodel": DecoderArgs(
        **DEBUG_SIZES, n_layers=6, n_heads=8, n_kv_heads=4, rope_theta=250_000.0
    ),
    "14B": _phi(vocab_size=100352, rope_theta=250_000.0),
    "Phi-3-mini-4k": _phi3(dim=3072, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=8192),
    "Phi-3-medium-4k": _phi3(),
}

spec = register_decoder("phi4", FLAVORS, _Config)
