"""DeepSeek-V2 and V3, Moonlight, Kimi K2, GLM-4.5 and Qwen3-Next: sizes, FLOPs, and the keys of
`config.json`.

`test_families.py` compares what they compute with transformers.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import families
from torchtitan.checkpoint.hf.export import HFExport
from torchtitan.commands import ckpt
from torchtitan.models import get_spec, parameter_names, spec_of_hf
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.hf_names import hf_slices
from torchtitan.utils.errors import ConfigError

# Parameters, those that a token uses, and those without the input's embedding: counted on
# transformers' own models.
COUNTS = {
    ("deepseek_v2", "Lite"): (15_706_484_224, 2_661_150_208, 2_451_435_008),
    ("deepseek_v3", "671B"): (671_026_404_352, 37_552_282_624, 36_625_603_584),
    ("deepseek_v3", "Moonlight-16B-A3B"): (15_960_108_544, 2_914_774_528, 2_579_230_208),
    ("deepseek_v3", "Kimi-K2"): (1_026_408_209_408, 32_861_477_888, 31_687_072_768),
    ("glm4_moe", "106B-A12B"): (106_852_245_504, 13_424_123_904, 12_803_366_912),
    ("glm4_moe", "355B-A32B"): (352_797_814_784, 33_632_251_904, 32_856_305_664),
    ("qwen3_next", "80B-A3B"): (79_674_391_296, 3_874_929_408, 3_563_764_480),
}
FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_next")
TINY_MODELS = sorted((Path(__file__).parents[1] / "assets/tiny_models").glob("*.json"))


def sizes_of(spec, args):
    with torch.device("meta"):
        model = spec.build(args, None)
    return {name: param.numel() for name, param in model.named_parameters()}


@pytest.mark.parametrize(("family", "flavor"), COUNTS)
def test_parameters_are_those_of_transformers(family, flavor):
    spec = get_spec(family)
    args = spec.flavors[flavor]
    sizes = sizes_of(spec, args)
    assert set(sizes) == set(parameter_names(spec, args))
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    active = total - routed + routed * args.experts_per_token // args.n_experts
    without = active - sizes["tok_embeddings.weight"]
    assert (total, active, without) == COUNTS[family, flavor]


def test_every_size_is_counted():
    flavors = {(name, flavor) for name in FAMILIES for flavor in get_spec(name).flavors}
    assert flavors - {(name, "debugmodel") for name in FAMILIES} == COUNTS.keys()


def test_deepseek_v3s_module_that_predicts_further_tokens():
    spec = get_spec("deepseek_v3")
    sizes = sizes_of(spec, spec.args("671B", {"n_mtp": 1}))
    extra = sum(size for name, size in sizes.items() if name.startswith("layers.61."))
    assert extra == pytest.approx(11.5e9, rel=0.01)  # README_WEIGHTS.md of its repository


@pytest.mark.parametrize(("n_mtp", "published"), [(0, 250.4), (1, 260.0)])
def test_deepseek_v3s_flops(n_mtp, published):
    """GFLOPs per token of 4096, with half of attention's square: of arXiv:2412.19437's sizes, and
    as Megatron-Bridge's TFLOP/s and tokens/s imply, with one module that predicts further tokens.
    """
    spec = get_spec("deepseek_v3")
    args = spec.args("671B", {"n_mtp": n_mtp})
    masked = 3 * (args.n_layers + n_mtp) * args.n_heads * (192 + 128) * 4096
    flops = (spec.flops_per_token(args, 4096) - masked) / 1e9
    assert flops == pytest.approx(published, rel=0.003)


def test_without_shared_experts():
    """transformers then has weights without elements, which no file here needs."""
    config = json.loads((TINY_MODELS[0].parent / "deepseek-v3-moonlight.json").read_text())
    config |= {"n_shared_experts": 0}
    torch.manual_seed(0)
    theirs = families.random_twin(config)
    tokens = torch.randint(0, config["vocab_size"], (2, 40))
    spec = spec_of_hf(config)
    args = spec.hf.args(config)
    assert args.shared_expert_dim == 0
    ours = spec.build(args, attention_backend("cpu"))
    ours.load_state_dict(families.as_ours(spec.hf.names(args), theirs), strict=False)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


# ---- config.json


SHORT = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_mean_what_they_do_in_transformers(family):
    transformers = pytest.importorskip("transformers")
    hf = get_spec(family).hf
    short = {"model_type": hf.model_type, **SHORT}
    assert hf.args(short) == hf.args(transformers.AutoConfig.for_model(**short).to_dict())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias: got True, must be False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: got 'softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: got 2, must be 1"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 1},
            "num_key_value_heads 1 must be num_attention_heads 4",
        ),
        ("deepseek_v3", {"topk_group": 9}, "topk_group 9 must be at most"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: got True, must be False"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: got 'noaux_tc'"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func: got 'softmax'"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias: got True, must be False"),
        ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step: got 2, must be 1"),
        (
            "qwen3_next",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types: got 'sliding_attention', must be one of 'full_attention', 'linear_att",
        ),
        (
            "qwen3_next",
            {"linear_num_value_heads": 6},
            "linear_num_value_heads 6 must be a multiple",
        ),
        ("glm4_moe", {"model_type": "kimi_k2"}, "model_type: got 'kimi_k2', must be 'glm4_moe'"),
    ],
)
def test_what_a_family_cannot_represent_is_refused(family, changes, message):
    spec = get_spec(family)
    config = spec.hf.config(spec.flavors["debugmodel"], "float32")
    with pytest.raises(ConfigError, match=f"^config.json: {message}"):
        spec.hf.args(config | changes)


@pytest.mark.parametrize(
    ("family", "overrides", "other"),
    [
        ("deepseek_v3", {"shared_expert_dim": 129}, {"shared_expert_dim": 128}),
        ("deepseek_v3", {"shared_expert_dim": 0}, {}),
        ("deepseek_v3", {"n_experts": 0}, {}),
        ("deepseek_v3", {"latent_norm_eps": 1e-5}, {"latent_norm_eps": 1e-6}),
        ("deepseek_v3", {"router_bias": True}, {"router_bias": False}),
        ("deepseek_v3", {"norm_placement": "both"}, {"norm_placement": "before"}),
        ("deepseek_v2", {"normalize_expert_weights": True}, {"normalize_expert_weights": False}),
        ("deepseek_v2", {"n_mtp": 1}, {"n_mtp": 0}),
        ("deepseek_v2", {"n_expert_groups": 4, "expert_groups_per_token": 2}, {}),
        ("glm4_moe", {"rope_interleaved": True}, {"rope_interleaved": False}),
        ("glm4_moe", {"rope_fraction": 0.25, "qk_norm": False}, {}),
        ("qwen3_next", {"gated_attention": False}, {"gated_attention": True}),
        ("qwen3_next", {"shared_expert_gate": False}, {"shared_expert_gate": True}),
        ("qwen3_next", {"norm_plus_one": False}, {"norm_plus_one": True}),
        ("qwen3_next", {"n_mtp": 1}, {"n_mtp": 0}),
        ("qwen3_next", {"layer_pattern": ("full", "delta", "delta", "delta")}, {}),
        ("qwen3_next", {"n_experts": 0}, {}),
    ],
)
def test_what_can_be_written(family, overrides, other):
    """`other`: what transformers would compute with instead."""
    spec = get_spec(family)
    args = spec.args("debugmodel", overrides)
    only = spec.hf.fixed(args)
    assert {name: value for name, value in only.items() if value != getattr(args, name)} == other


def test_names_of_modules_that_predict_further_tokens():
    """Those of DeepSeek-V3's files."""
    spec = get_spec("deepseek_v3")
    args = spec.args("debugmodel", {"n_mtp": 1})
    block = {
        "input_layernorm",
        "self_attn.q_a_proj",
        "self_attn.q_a_layernorm",
        "self_attn.q_b_proj",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_a_layernorm",
        "self_attn.kv_b_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate",
    }
    matrices = ("gate_proj", "up_proj", "down_proj")
    block |= {f"mlp.shared_experts.{name}" for name in matrices}
    block |= {f"mlp.experts.{e}.{name}" for e in range(16) for name in matrices}
    own = {"embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"}
    expected = {f"{name}.weight" for name in block | own} | {"mlp.gate.e_score_correction_bias"}
    found = set()
    for theirs in spec.hf.names(args).values():
        for part in theirs if isinstance(theirs, list) else [theirs]:
            found |= {part} if isinstance(part, str) else {part.name, *part.copies}
    place = "model.layers.4."
    assert {name.removeprefix(place) for name in found if name.startswith(place)} == expected
    assert set(sizes_of(spec, args)) == set(parameter_names(spec, args))


def test_modules_that_predict_further_tokens_are_read_and_written(tmp_path, capsys):
    """Bit for bit, with the copies of embedding and output; or left out."""
    spec = get_spec("deepseek_v3")
    sizes = {"n_layers": 2, "dim": 32, "vocab_size": 64, "ffn_dim": 48, "n_mtp": 1}
    args = spec.args("debugmodel", sizes)
    model = spec.build(args, None)
    torch.manual_seed(0)
    state = {
        name: torch.randn_like(value) * 0.1 + ("norm" in name)
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }
    tensors = {}
    for ours, theirs in spec.hf.names(args).items():
        for i, part in enumerate(hf_slices(theirs)):
            value = state[ours][i].clone() if isinstance(theirs, list) else state[ours]
            tensors |= {name: value.clone() for name in (part.name, *part.copies)}
    assert torch.equal(tensors["model.layers.2.shared_head.head.weight"], tensors["lm_head.weight"])
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = spec.hf.config(args, "float32")
    assert config["num_nextn_predict_layers"] == 1
    (folder / "config.json").write_text(json.dumps(config))

    ckpt.main(["from-hf", str(folder), str(tmp_path / "ours")])
    HFExport(tmp_path / "ours/step-0", tmp_path / "back", spec, args, None, None).write()
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], value) for name, value in tensors.items())

    capsys.readouterr()
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    ckpt.main(["from-hf", str(folder), str(tmp_path / "without")])
    assert "model.layers.2." in capsys.readouterr().out
