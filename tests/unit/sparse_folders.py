"""Folders of large models of Hugging Face without their bytes: real headers over sparse files."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape by name."""


def write_sparse(folder: Path, config: Mapping[str, Any], tensors: Tensors, files: int) -> int:
    """Write `config.json`, the index, and so many safetensors, all of whose values are zero.

    Returns:
        The size of the weights in bytes.
    """
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    each = -(-len(names) // files)
    total = 0
    places = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:06}.safetensors"
        end = 0
        header = {}
        for name in names[i * each : (i + 1) * each]:
            dtype, shape = tensors[name]
            start = end
            end += BYTES[dtype] * _count(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            places[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + end)
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def gpt_oss(config: Mapping[str, Any]) -> Tensors:
    """The tensors of the published checkpoints, by transformers' names."""
    dim = config["hidden_size"]
    width = config["intermediate_size"]
    experts = config["num_local_experts"]
    head = config["head_dim"]
    sizes = {"q": config["num_attention_heads"] * head}
    sizes |= dict.fromkeys("kv", config["num_key_value_heads"] * head)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
        "self_attn.sinks": (config["num_attention_heads"],),
        "self_attn.o_proj.weight": (dim, sizes["q"]),
        "self_attn.o_proj.bias": (dim,),
        "mlp.router.weight": (experts, dim),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * width),
        "mlp.experts.down_proj_bias": (experts, dim),
    }
    for x, size in sizes.items():
        shapes[f"self_attn.{x}_proj.weight"] = (size, dim)
        shapes[f"self_attn.{x}_proj.bias"] = (size,)
    packed = {
        "gate_up_proj_blocks": (experts, 2 * width, dim // 32, 16),
        "gate_up_proj_scales": (experts, 2 * width, dim // 32),
        "down_proj_blocks": (experts, dim, width // 32, 16),
        "down_proj_scales": (experts, dim, width // 32),
    }
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (config["vocab_size"], dim)),
        "model.norm.weight": ("BF16", (dim,)),
        "lm_head.weight": ("BF16", (config["vocab_size"], dim)),
    }
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        found |= {place + name: ("BF16", shape) for name, shape in shapes.items()}
        found |= {f"{place}mlp.experts.{name}": ("U8", shape) for name, shape in packed.items()}
    return found


def deepseek_v3(config: Mapping[str, Any]) -> Tensors:
    """The tensors of the published checkpoints, as DeepSeek-V3's README_WEIGHTS.md lists them."""
    dim = config["hidden_size"]
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (config["vocab_size"], dim)),
        "model.norm.weight": ("BF16", (dim,)),
        "lm_head.weight": ("BF16", (config["vocab_size"], dim)),
    }
    layers = config["num_hidden_layers"]
    for layer in range(layers + config["num_nextn_predict_layers"]):
        place = f"model.layers.{layer}."
        for name, shape in _matrices(config, layer):
            found[place + name] = ("BF16", shape)
            if config.get("quantization_config"):
                found[place + name] = ("F8_E4M3", shape)
                blocks = tuple(-(-size // 128) for size in shape)
                found[f"{place}{name}_scale_inv"] = ("F32", blocks)
        norms = {
            "input_layernorm": dim,
            "post_attention_layernorm": dim,
            "self_attn.kv_a_layernorm": config["kv_lora_rank"],
        }
        if config["q_lora_rank"]:
            norms["self_attn.q_a_layernorm"] = config["q_lora_rank"]
        if layer >= layers:
            norms |= {"enorm": dim, "hnorm": dim, "shared_head.norm": dim}
            found[f"{place}eh_proj.weight"] = ("BF16", (dim, 2 * dim))
            for copy in ("embed_tokens", "shared_head.head"):
                found[f"{place}{copy}.weight"] = ("BF16", (config["vocab_size"], dim))
        if layer >= config["first_k_dense_replace"]:
            experts = config["n_routed_experts"]
            found[f"{place}mlp.gate.weight"] = ("BF16", (experts, dim))
            found[f"{place}mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
        for name, size in norms.items():
            found[f"{place}{name}.weight"] = ("BF16", (size,))
    return found


def _matrices(config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Those that are fp8."""
    dim = config["hidden_size"]
    heads = config["num_attention_heads"]
    keys = config["qk_nope_head_dim"]
    query = heads * (keys + config["qk_rope_head_dim"])
    if rank := config["q_lora_rank"]:
        yield "self_attn.q_a_proj.weight", (rank, dim)
        yield "self_attn.q_b_proj.weight", (query, rank)
    else:
        yield "self_attn.q_proj.weight", (query, dim)
    latent = config["kv_lora_rank"]
    values = config["v_head_dim"]
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + config["qk_rope_head_dim"], dim)
    yield "self_attn.kv_b_proj.weight", (heads * (keys + values), latent)
    yield "self_attn.o_proj.weight", (dim, heads * values)
    networks = {"mlp.": config["intermediate_size"]}
    if layer >= config["first_k_dense_replace"]:
        width = config["moe_intermediate_size"]
        networks = {f"mlp.experts.{e}.": width for e in range(config["n_routed_experts"])}
        networks["mlp.shared_experts."] = width * config["n_shared_experts"]
    for place, width in networks.items():
        yield f"{place}gate_proj.weight", (width, dim)
        yield f"{place}up_proj.weight", (width, dim)
        yield f"{place}down_proj.weight", (dim, width)
