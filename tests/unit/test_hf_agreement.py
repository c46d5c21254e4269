"""A folder that says the same thing twice, or on which transformers decides otherwise than one
one would think: read as transformers does, or refused.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests import families
from tests.unit.test_from_hf import write_model
from torchtitan.checkpoint.hf.opening import open_hf
from torchtitan.commands import ckpt
from torchtitan.inference.load import find
from torchtitan.models import export_problems, get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.utils.errors import ConfigError, UserError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
FULL = ["full_attention"] * 3


def config_of(family, changes):
    args = families.build(family).args if family in families.SIZES else None
    spec = get_spec(family)
    config = spec.hf.config(args or next(iter(spec.flavors.values())), "float32")
    config |= changes
    return spec, {key: value for key, value in config.items() if value != "absent"}


TWICE = {
    "base": ("llama3", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, "rope_theta"),
    "scaling": ("llama3", {"rope_scaling": YARN, "rope_parameters": LINEAR}, r"\.rope_type"),
    "type": (
        "llama3",
        {"rope_scaling": YARN | {"type": "linear"}},
        "rope_type is 'yarn', but type",
    ),
    "length": (
        "llama3",
        {"rope_scaling": YARN, "original_max_position_embeddings": 64},
        "original_max_position_embeddings is 64, but rope_scaling",
    ),
    "share": (
        "glm4_moe",
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor is 0.5, but rope_parameters",
    ),
    "by layer": (
        "gemma3",
        {"rope_local_base_freq": 3e4},
        "rope_local_base_freq is 30000.0, but rope_parameters.sliding_attention.rope_theta",
    ),
    "experts": (
        "qwen3_moe",
        {"num_local_experts": 9},
        "num_experts is 8, but num_local_experts is 9",
    ),
    "chosen": (
        "gpt_oss",
        {"experts_per_token": 1},
        "num_experts_per_tok is 3, but experts_per_token",
    ),
    "modules": (
        "deepseek_v3",
        {"num_mtp_layers": 2, "num_nextn_predict_layers": 1},
        "num_nextn_predict_layers is 1, but num_mtp_layers is 2",
    ),
    "text": ("gemma3", {"text_config": {"vocab_size": 99}}, "vocab_size is 160, but text_config"),
    "period": (
        "gemma3",
        {"sliding_window_pattern": 2, "layer_types": FULL},
        "layer_types contradicts sliding_window_pattern 2",
    ),
    "windows": (
        "qwen3",
        {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
        "layer_types has 'sliding_attention', but use_sliding_window is false",
    ),
    "no size": ("gpt_oss", {"sliding_window": None}, "sliding_window is null, but layers have"),
}


@pytest.mark.parametrize("case", TWICE)
def test_contradictions_are_refused(case):
    family, changes, message = TWICE[case]
    spec, config = config_of(family, changes)
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        spec.hf.args(config)


AGREE = {
    "base": ("llama3", {"rope_theta": 2e4, "rope_parameters": {"rope_theta": 2e4}}),
    "scaling": ("llama3", {"rope_scaling": YARN, "rope_parameters": YARN | {"type": "yarn"}}),
    "empty": ("llama3", {"rope_scaling": {}, "rope_parameters": YARN}),
    "experts": ("qwen3_moe", {"num_local_experts": 8}),
    "other name": ("qwen3_moe", {"num_experts": "absent", "num_local_experts": 8}),
    "text": ("gemma3", {"text_config": {"vocab_size": 160}}),
    "sizes": ("llama3", {"rope_scaling": YARN, "original_max_position_embeddings": 32}),
}


@pytest.mark.parametrize("case", AGREE)
def test_what_agrees_is_read(case):
    family, changes = AGREE[case]
    spec, config = config_of(family, changes)
    args = spec.hf.args(config)
    plain = spec.hf.args(config_of(family, {})[1])
    assert args.n_experts == plain.n_experts
    assert args.vocab_size == plain.vocab_size
    if "rope_theta" in changes:
        assert args.rope_theta == 2e4
    if YARN in changes.values():
        assert (args.rope_scaling.factor, args.rope_scaling.original_max_seq_len) == (4.0, 32)


# ---- as transformers computes it


BY_LAYER = {"full_attention": YARN | {"rope_theta": 1e4}}
EQUAL = {
    "window layers have a base of their own": (
        "olmo3",
        {"rope_parameters": BY_LAYER, "rope_theta": "absent"},
    ),
    "no base": ("olmo3", {"rope_parameters": {"full_attention": YARN}, "rope_theta": "absent"}),
    "gemma's, too": (
        "gemma3",
        {"rope_parameters": BY_LAYER, "rope_theta": "absent", "rope_local_base_freq": "absent"},
    ),
}


@pytest.mark.parametrize("case", EQUAL)
def test_transformers_computes_the_same(case):
    torch.manual_seed(0)
    family, changes = EQUAL[case]
    spec, config = config_of(family, changes | {"rope_scaling": "absent"})
    theirs = families.random_twin(json.loads(json.dumps(config)), attn_implementation="eager")
    args = spec.hf.args(config)
    ours = spec.build(args, attention_backend("cpu"))
    with torch.no_grad():
        for name, value in families.as_ours(spec.hf.names(args), theirs).items():
            ours.get_parameter(name).copy_(value)
        tokens = torch.randint(0, 160, (2, 96))
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


REFUSED = {
    "truncate by layer": (
        "olmo3",
        {"rope_parameters": {"full_attention": YARN | {"truncate": False}}, "rope_theta": "absent"},
        "truncate of YaRN must be true",
    ),
    "truncate of version 4": (
        "gemma3",
        {"rope_parameters": "absent", "rope_scaling": YARN | {"truncate": False}},
        "truncate of YaRN must be true",
    ),
    "a base that versions use differently": (
        "olmo3",
        {"rope_parameters": "absent", "rope_theta": 1e4},
        "rope_theta is 10000: in layers with a window, transformers 4 uses it, too",
    ),
    "windows of SmolLM3": (
        "smollm3",
        {"layer_types": ["sliding_attention", *FULL[1:]], "use_sliding_window": False},
        "layer_types: got 'sliding_attention', must be one of 'full_attention'",
    ),
    "scores": (
        "deepseek_v3",
        {"rope_scaling": LINEAR | {"mscale_all_dim": 1.0}},
        "mscale_all_dim of RoPE scaling of type 'linear'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_computes_otherwise_is_refused(case):
    family, changes, message = REFUSED[case]
    spec, config = config_of(family, changes)
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        spec.hf.args(config)


def test_truncate_by_layer_is_not_exported():
    spec = get_spec("olmo3")
    yarn = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 32}
    assert export_problems(spec, spec.args("debugmodel", {"rope_scaling": yarn})) == []
    args = spec.args("debugmodel", {"rope_scaling": yarn | {"truncate": False}})
    assert [p.partition(":")[0] for p in export_problems(spec, args)] == [
        "model.overrides.rope_scaling"
    ]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {"layer_pattern": ["full"]}) for family in ("gpt_oss", "olmo3", "gemma3")),
        ("olmo3", {"layer_pattern": ["full"], "window": None}),
        ("qwen3_moe", {"expert_dim": 33}),
    ],
)
def test_unusual_models_are_exported(tmp_path, capsys, family, overrides):
    """Without the windows whose mask transformers builds anyway, and with experts of a width that
    its grouped products don't take.
    """
    write_model(tmp_path / "hf", family, **overrides)
    assert ckpt.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    argv = ["to-hf", str(tmp_path / "ours"), str(tmp_path / "back"), "--check"]
    assert ckpt.main(argv) == 0
    assert "Largest logit difference to transformers" in capsys.readouterr().out


def test_an_error_inside_transformers_deletes_no_export(tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path / "hf", "llama3")
    ckpt.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "ours")])

    def fail(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fail)
    argv = ["to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]
    assert ckpt.main(argv) == 0
    assert "Warning: logits not compared: transformers can't run" in capsys.readouterr().out
    assert (tmp_path / "back/model.safetensors").is_file()
    with pytest.raises(UserError, match="RuntimeError: 'no such kernel'"):
        ckpt.main([*argv[:2], str(tmp_path / "checked"), "--check"])
    assert not (tmp_path / "checked").exists()


# ---- other files


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "NVFP4"}},
            "'NVFP4' can't be read",
        ),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "says nothing of it"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "'bits': 4"),
        ("quant_config.json", {"w_bit": 4, "zero_point": True}, "'w_bit': 4"),
    ],
)
@pytest.mark.parametrize("door", [open_hf, lambda folder: find(str(folder))])
def test_a_quantizers_own_file_is_looked_at(tmp_path, name, content, message, door):
    write_model(tmp_path, "llama3")
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{name}: weights quantized as .*{message}.*bfloat16"):
        door(tmp_path)


def test_a_quantized_cache_is_no_quantized_weight(tmp_path):
    write_model(tmp_path, "llama3")
    about = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    open_hf(tmp_path)


def test_every_end_of_text_counts(tmp_path):
    write_model(tmp_path, "llama3", {"eos_token_id": 5})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7, 999999]}')
    assert open_hf(tmp_path).ends == [5, 7]
    (tmp_path / "generation_config.json").write_text('{"stop_strings": ["NaN"]}')
    assert open_hf(tmp_path).generation == {"stop_strings": ["NaN"]}
    (tmp_path / "generation_config.json").write_text('{"temperature": 1e999}')
    with pytest.raises(UserError, match=r"generation_config.json holds NaN or Infinity"):
        open_hf(tmp_path)


def test_a_whole_model_beside_an_index_of_another_is_refused(tmp_path):
    write_model(tmp_path, "llama3")
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model-1.safetensors")
    with pytest.raises(UserError, match=r"holds two models: model\.safetensors, which"):
        open_hf(tmp_path)
