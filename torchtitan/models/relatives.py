"""Published models that no family reads, for the message that refuses them. Imports no torch."""

_VISION = "it has a vision tower, and positions in three dimensions (M-RoPE)"
_CONSTANTS = "it multiplies embeddings, residual branches and logits by constants"
_LAYER_NORM = "its norms are LayerNorm"
_INDEXER = "an indexer chooses the tokens that each token attends to (DSA)"

RELATIVES: dict[str, tuple[str, str]] = {
    "apertus": ("llama3", "its feed-forward networks have no gate, and xIELU"),
    "arcee": ("llama3", "its feed-forward networks have no gate, and a squared ReLU"),
    "baichuan": ("llama3", "its files pack queries, keys and values into W_pack"),
    "bloom": ("llama3", f"{_LAYER_NORM}, and its positions are biases of attention (ALiBi)"),
    "cohere": ("llama3", f"{_LAYER_NORM}, and attention and feed-forward run in parallel"),
    "cohere2": ("llama3", f"{_LAYER_NORM}, and attention and feed-forward run in parallel"),
    "deepseek": ("deepseek_v2", "its attention isn't latent"),
    "deepseek_v32": ("deepseek_v3", _INDEXER),
    "ernie4_5": ("llama3", "its RoPE rotates neighbouring features"),
    "ernie4_5_moe": ("glm4_moe", "its RoPE rotates neighbouring features, its router is a softmax"),
    "exaone4": ("olmo3", "it normalizes each head, and its full layers have no positions"),
    "falcon": ("llama3", f"{_LAYER_NORM}, and its feed-forward networks have no gate"),
    "falcon_mamba": ("qwen3_next", "all its layers are Mamba's"),
    "gemma": ("gemma3", "it normalizes before a layer only, and no queries and keys"),
    "gemma2": ("gemma3", "it caps attention's scores, and doesn't normalize queries and keys"),
    "glm4": ("gemma3", "its RoPE rotates neighbouring features, its files pack gate and up"),
    "glm_moe_dsa": ("deepseek_v3", _INDEXER),
    "gpt2": ("llama3", f"{_LAYER_NORM}, its positions are learned"),
    "gpt_neox": ("llama3", f"{_LAYER_NORM}, and attention and feed-forward run in parallel"),
    "granite": ("llama3", _CONSTANTS),
    "granitemoe": ("mixtral", _CONSTANTS),
    "internlm2": ("llama3", "its files pack queries, keys and values of each group into wqkv"),
    "jamba": ("qwen3_next", "most of its layers are Mamba's"),
    "kimi_k25": ("deepseek_v3", "it has a vision tower; its text model is Kimi K2's"),
    "kimi_linear": ("qwen3_next", "its linear attention is Kimi Delta Attention, the other latent"),
    "llama4": ("qwen3_moe", "it attends within chunks, and weighs an expert's input by its score"),
    "mamba2": ("qwen3_next", "all its layers are Mamba-2's"),
    "mimo": ("qwen2_5", "modules that predict further tokens are beside its layers"),
    "minimax_m2": ("qwen3_moe", "it normalizes all heads together, its router is a sigmoid"),
    "ministral3": ("mistral", "its queries grow with the position (llama_4_scaling_beta)"),
    "mistral3": ("mistral", "it has a vision tower"),
    "nemotron": ("llama3", f"{_LAYER_NORM}, its feed-forward networks have no gate"),
    "nemotron_h": ("qwen3_next", "its layers without attention are Mamba-2's"),
    "olmo": ("olmo2", "its norms are LayerNorm, before what they normalize"),
    "olmoe": ("qwen3_moe", "it normalizes all heads together"),
    "opt": ("llama3", f"{_LAYER_NORM}, its positions are learned"),
    "phi": ("phi4", f"{_LAYER_NORM}, and attention and feed-forward run in parallel"),
    "phimoe": ("mixtral", f"{_LAYER_NORM}, and its router's softmax is sparse (SparseMixer)"),
    "qwen": ("qwen2_5", "its files pack queries, keys and values into c_attn"),
    "qwen2_5_vl": ("qwen2_5", _VISION),
    "qwen2_vl": ("qwen2_5", _VISION),
    "qwen3_5": ("qwen3_next", "it has no experts, and its files don't pack what DeltaNet projects"),
    "qwen3_5_moe": ("qwen3_next", "its files don't pack what Gated DeltaNet projects"),
    "qwen3_vl": ("qwen3", _VISION),
    "qwen3_vl_moe": ("qwen3_moe", _VISION),
    "seed_oss": ("qwen2_5", "its heads have a size of their own"),
    "stablelm": ("llama3", f"{_LAYER_NORM}, and RoPE rotates a quarter of a head"),
    "starcoder2": ("llama3", f"{_LAYER_NORM}, its feed-forward networks have no gate, and biases"),
}
"""`model_type` to the nearest family, and what differs from it."""


def nearest_family(kind: object) -> str:
    """The rest of a message that a `model_type` isn't read."""
    for name in (kind, str(kind).removesuffix("_text")):
        if isinstance(name, str) and name in RELATIVES:
            family, difference = RELATIVES[name]
            return f". The nearest family is {family}, but {difference}"
    return ""
