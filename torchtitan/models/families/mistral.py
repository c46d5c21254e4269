"""Mistral (Jiang et al., "Mistral 7B", arXiv:2310.06825). Only version 0.1 has a sliding window."""

from functools import partial

from torchtitan.models.args import DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.windows import OneWindow


class _Config(OneWindow):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


_mistral = partial(DecoderArgs, n_heads=32, n_kv_heads=8, rope_theta=1e6)

FLAVORS = {
    "debugmodel": _mistral(**DEBUG_SIZES, n_layers=6, n_heads=8, n_kv_heads=4, head_size=64),
    "7B-v0.1": _mistral(
        vocab_size=32000,
        dim=4096,
        n_layers=32,
        ffn_dim=14336,
        rope_theta=1e4,
        layer_pattern=("window",),
        window=4096,
    ),
    "7B-v0.3": _mistral(vocab_size=32768, dim=4096, n_layers=32, ffn_dim=14336),
    "Nemo-12B": _mistral(vocab_size=131072, dim=5120, n_layers=40, head_size=128, ffn_dim=14336),
    "Small-24B": _mistral(
        vocab_size=131072, dim=5120, n_layers=40, head_size=128, ffn_dim=32768, rope_theta=1e8
    ),
}

spec = register_decoder("mistral", FLAVORS, _Config)
