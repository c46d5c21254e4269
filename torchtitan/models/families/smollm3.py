"""SmolLM3 (Bakouch et al., Hugging Face, 2025): every fourth layer has no positions."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from torchtitan.models.args import DEBUG_SIZES, DecoderArgs, LayerKind
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.config import HFConfig, LayerTypes, all_kinds


class _Config(HFConfig):
    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    default_theta = 2e6
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    """Without the key, transformers has an embedding of token 128004, which small vocabularies
    lack.
    """
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    layer_types: LayerTypes = None
    kinds = ("full",)
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Annotated[int, Field(ge=1)] = 4

    def layer_kinds(self) -> Sequence[LayerKind]:
        if self.layer_types is not None:
            super().layer_kinds()  # refuses windows
        n = self.num_hidden_layers
        rotated = self.no_rope_layers
        if rotated is None:
            rotated = [(i + 1) % self.no_rope_layer_interval for i in range(n)]
        return ["full" if positions else "nope" for positions in rotated[:n]]

    @classmethod
    def write_layers(cls, args: DecoderArgs) -> dict[str, Any]:
        return {"no_rope_layers": [int(kind != "nope") for kind in all_kinds(args)]}


_smollm3 = partial(
    DecoderArgs,
    layer_pattern=("full", "full", "full", "nope"),
    n_heads=16,
    n_kv_heads=4,
    rope_theta=5e6,
    norm_eps=1e-6,
)

FLAVORS = {
    "debugmodel": _smollm3(**DEBUG_SIZES, n_layers=8),
    "3B": _smollm3(vocab_size=128256, dim=2048, n_layers=36, ffn_dim=11008, tie_embeddings=True),
}

spec = register_decoder("smollm3", FLAVORS, _Config)
