"""Models of Hugging Face's classes against transformers: read, computed, differentiated, written.

Each file in `tests/assets/tiny_models` is the `config.json` of a small model. To cover another
class, or another setting of it, add a file.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import families
from torchtitan.checkpoint.hf.export import HFExport
from torchtitan.checkpoint.hf.weights import load_hf
from torchtitan.checkpoint.state import read_weights
from torchtitan.commands import ckpt
from torchtitan.config.load.decode import load_config
from torchtitan.config.registry import model_families
from torchtitan.models import all_families, export_problems, get_spec, parameter_names, spec_of_hf
from torchtitan.models.attention.backend import attention_backend
from torchtitan.optim.loss import cross_entropy
from torchtitan.utils.errors import ConfigError

TINY_MODELS = sorted((Path(__file__).parents[1] / "assets/tiny_models").glob("*.json"))
LIMIT = 1e-5
"""Largest difference of logits and of a gradient, relative to the largest element."""
TOKENS = (2, 96)


def assert_close(ours: Tensor, theirs: Tensor, of: str) -> None:
    off = (ours - theirs).abs().max() / theirs.abs().max()
    assert off < LIMIT, f"{of}: off by {off:.1e} of the largest element"


@pytest.fixture
def exact_deltas(monkeypatch):
    """transformers' Gated DeltaNet token by token: the decays of its chunks are off by 2e-5."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    exact = modeling.torch_recurrent_gated_delta_rule
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", exact)


@pytest.mark.usefixtures("exact_deltas")
@pytest.mark.parametrize("file", TINY_MODELS, ids=lambda file: file.stem)
def test_a_model_equals_transformers_and_is_written_back(tmp_path, file):
    torch.manual_seed(0)
    config = json.loads(file.read_text())
    theirs = families.random_twin(config, attn_implementation="eager")
    theirs.save_pretrained(tmp_path / "hf")
    # Of these, none has two experts with scores that rounding could exchange.
    tokens = torch.randint(0, config["vocab_size"], TOKENS)

    spec = spec_of_hf(config)
    args = spec.hf.args(json.loads((tmp_path / "hf/config.json").read_text()))
    assert args == spec.hf.args(config), "as written by transformers, and as in the file"
    names = spec.hf.names(args)
    ckpt.main(["from-hf", str(tmp_path / "hf"), str(tmp_path)])
    step = tmp_path / "step-0"
    written = load_config([f"--config={tmp_path / 'train.toml'}"]).config.model
    assert spec.args(written.flavor, written.overrides, max_seq_len=args.max_seq_len) == args
    ours, loaded = (spec.build(args, attention_backend("cpu")) for _ in range(2))
    assert {name for name, _ in ours.named_parameters()} == set(parameter_names(spec, args))
    read_weights([ours], step)
    load_hf([loaded], tmp_path / "hf", spec, args)
    for name, value in ours.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name

    expected = theirs(tokens, labels=tokens)
    logits = ours(tokens)
    loss = cross_entropy(logits[:, :-1], tokens[:, 1:]).sum() / tokens[:, 1:].numel()
    assert_close(logits, expected.logits, "logits")
    assert_close(loss, expected.loss, "loss")
    loss.backward()
    expected.loss.backward()
    gradients = families.as_ours(names, theirs, gradients=True)
    for name, param in ours.named_parameters():
        assert gradients[name].abs().max() > 0, f"{name} has no gradient in transformers"
        assert_close(param.grad, gradients[name], name)

    HFExport(step, tmp_path / "back", spec, args, None, None, check=False).write()
    assert spec.hf.args(json.loads((tmp_path / "back/config.json").read_text())) == args
    before = load_file(tmp_path / "hf/model.safetensors")
    after = load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value, after[name]), name


WINDOWS = {"layer_pattern": ["window", "full"], "window": 8}
ROPES = {"window_rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("family", "overrides", "lost"),
    [
        ("llama3", WINDOWS, ["layer_pattern"]),
        ("mistral", WINDOWS, ["layer_pattern"]),
        ("mistral", WINDOWS | {"layer_pattern": ["window"]}, []),
        ("qwen3", WINDOWS, []),
        ("qwen3", WINDOWS | {"layer_pattern": ["window", "nope"]}, ["layer_pattern"]),
        ("qwen3", WINDOWS | ROPES, ["window_rope_theta"]),
        ("olmo3", ROPES | {"scale_window_rope": True}, []),
        ("gemma3", ROPES | {"attention_scale": 1 / 3}, []),
        ("gemma3", {"attention_scale": 0.07}, ["attention_scale"]),
        ("gpt_oss", {"rope_scaling": "none"}, []),
        ("gpt_oss", {"wo_bias": False}, ["qkv_bias"]),  # one key for both
        ("gpt_oss", {"n_experts": 0}, ["n_experts"]),
        ("mixtral", {"n_experts": 0}, ["n_experts"]),
        ("mixtral", WINDOWS, ["layer_pattern"]),
        ("mixtral", {"normalize_expert_weights": False}, ["normalize_expert_weights"]),
        ("olmo2", WINDOWS, ["layer_pattern"]),
        ("olmo2", {"norm_placement": "both"}, ["norm_placement"]),
        ("phi4", {"rope_scaling": {"type": "yarn"}}, ["rope_scaling"]),
        ("phi4", {"rope_fraction": 0.75}, []),
        ("phi4", {"qkv_bias": True}, ["qkv_bias"]),
        ("qwen2_moe", WINDOWS | {"qkv_bias": False}, []),
        ("qwen2_moe", {"shared_expert_gate": False}, ["shared_expert_gate"]),
        ("smollm3", WINDOWS, ["layer_pattern"]),
        ("smollm3", {"layer_pattern": ["nope", "full"], "init_std": 0.1}, []),
    ],
)
def test_what_config_json_cannot_say_is_named(family, overrides, lost):
    spec = get_spec(family)
    problems = export_problems(spec, spec.args("debugmodel", overrides))
    assert [problem.split(":")[0] for problem in problems] == [
        f"model.overrides.{name}" for name in lost
    ]


BUILT_IN = [spec for spec in all_families() if spec.name in model_families.built_in]


@pytest.mark.parametrize("spec", BUILT_IN, ids=lambda spec: spec.name)
def test_all_sizes_pass_through_transformers_configuration(spec):
    transformers = pytest.importorskip("transformers")
    for flavor, args in spec.flavors.items():
        config = spec.hf.config(args, "bfloat16")
        about = transformers.AutoConfig.for_model(**config).to_dict()
        assert spec.hf.args(about) == spec.hf.args(config), flavor
        padding = about.get("pad_token_id")  # its embedding must exist
        assert padding is None or padding < args.vocab_size, flavor
        assert export_problems(spec, args) == [], flavor


PUBLISHED = json.loads((TINY_MODELS[0].parents[1] / "published_models.json").read_text())
"""FAMILY/SIZE to the keys of its published `config.json` that decide what it computes."""
OWN = {"30M", "125M", "350M"}
"""Sizes of `llama3` that nobody published with their vocabulary."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_size_is_the_published_one(name):
    family, flavor = name.split("/")
    published = spec_of_hf(PUBLISHED[name]).hf.args(PUBLISHED[name])
    # The length follows from the run, and further predictions are chosen by it.
    from_run = {"max_seq_len": published.max_seq_len, "n_mtp": published.n_mtp}
    assert get_spec(family).args(flavor, from_run) == published


def test_every_size_is_compared_with_a_published_one():
    sizes = {f"{spec.name}/{size}" for spec in BUILT_IN for size in spec.flavors.keys() - OWN}
    assert sizes - {f"{spec.name}/debugmodel" for spec in BUILT_IN} == PUBLISHED.keys()


def test_the_nearest_families_of_refused_types_exist():
    page = (Path(__file__).parents[2] / "docs/reference/models.md").read_text()
    _, table = page.split("## The nearest family\n")
    rows = re.findall(r"^\| (`.*`) \| (\w+) \| [a-z].+ \|$", table, re.MULTILINE)
    assert len(rows) > 30
    families_by_name = {spec.name for spec in all_families()}
    for types, family in rows:
        assert family in families_by_name
        for kind in re.findall(r"`(\w+)`", types):
            with pytest.raises(
                ConfigError, match=rf"got {kind!r}, .*'smollm3'; docs/reference/models"
            ):
                spec_of_hf({"model_type": kind})


def test_gemma_with_a_vision_tower_is_read_as_its_text_model(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = json.loads((TINY_MODELS[0].parent / "gemma3.json").read_text())
    text["final_logit_softcapping"] = None  # the class with the tower computes none
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1}
    vision = {"hidden_size": 16, "intermediate_size": 32, "image_size": 28, "patch_size": 14}
    about = transformers.Gemma3Config(
        text_config=text, vision_config=vision | heads, mm_tokens_per_image=4
    )
    theirs = transformers.Gemma3ForConditionalGeneration(about).eval()
    theirs.save_pretrained(tmp_path / "hf")
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert any("vision_tower" in name for name in stored)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["model_type"] == "gemma3"
    spec = spec_of_hf(config)
    args = spec.hf.args(config)
    assert args == spec.hf.args(text)
    ckpt.main(["from-hf", str(tmp_path / "hf"), str(tmp_path)])
    assert "vision_tower" in capsys.readouterr().out
    ours = spec.build(args, attention_backend("cpu"))
    read_weights([ours], tmp_path / "step-0")
    tokens = torch.randint(0, args.vocab_size, (2, 32))
    with torch.no_grad():
        assert_close(ours(tokens), theirs(tokens).logits, "logits")


def test_every_tiny_model_is_found():
    assert len(TINY_MODELS) >= 2
