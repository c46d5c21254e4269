"""Llama 3 (Llama Team, "The Llama 3 Herd of Models", arXiv:2407.21783), and by their full names
Llama 2 (Touvron et al., arXiv:2307.09288) and Code Llama (Rozière et al., arXiv:2308.12950).
"""

from functools import partial
from typing import Literal

from torchtitan.models.args import DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.config import HFConfig
from torchtitan.models.rope_scaling import RopeScaling


class _Config(HFConfig):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False


_llama = partial(DecoderArgs, vocab_size=128256, n_kv_heads=8, rope_scaling=RopeScaling())
_small = partial(_llama, ffn_dim=8192, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True)
_llama2_7b = partial(
    DecoderArgs,
    vocab_size=32000,
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    ffn_dim=11008,
    rope_theta=1e4,
)
_llama2_13b = partial(_llama2_7b, dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_dim=13824)
_llama2_70b = partial(_llama2_7b, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672)
_code = {"vocab_size": 32016, "rope_theta": 1e6}
_tiny = partial(DecoderArgs, rope_theta=10_000.0, tie_embeddings=True)

FLAVORS = {
    "debugmodel": DecoderArgs(**DEBUG_SIZES, n_layers=6, n_heads=16, n_kv_heads=16),
    # The 42M of llama2.c (github.com/karpathy/llama2.c, README), with 8,192 entries instead of
    # 32,000, which would be more than a third of the parameters.
    "30M": _tiny(vocab_size=8192, dim=512, n_layers=8, n_heads=8, n_kv_heads=8, ffn_dim=1376),
    # MobileLLM 125M and 350M (Liu et al., arXiv:2402.14905). With 49,152 entries they are the
    # shapes of SmolLM 135M and 360M.
    "125M": _tiny(vocab_size=32000, dim=576, n_layers=30, n_heads=9, n_kv_heads=3, ffn_dim=1536),
    "350M": _tiny(vocab_size=32000, dim=960, n_layers=32, n_heads=15, n_kv_heads=5, ffn_dim=2560),
    "1B": _small(dim=2048, n_layers=16, n_heads=32),
    "3B": _small(dim=3072, n_layers=28, n_heads=24),
    "8B": _llama(dim=4096, n_layers=32, n_heads=32, ffn_dim=14336),
    "70B": _llama(dim=8192, n_layers=80, n_heads=64, ffn_dim=28672),
    "405B": _llama(dim=16384, n_layers=126, n_heads=128, ffn_dim=53248),
    "Llama-2-7B": _llama2_7b(),
    "Llama-2-13B": _llama2_13b(),
    "Llama-2-70B": _llama2_70b(),
    "CodeLlama-7B": _llama2_7b(**_code),
    "CodeLlama-13B": _llama2_13b(**_code),
    "CodeLlama-34B": _llama2_70b(n_layers=48, ffn_dim=22016, rope_theta=1e6),
    "CodeLlama-70B": _llama2_70b(**_code),
}

spec = register_decoder("llama3", FLAVORS, _Config)
