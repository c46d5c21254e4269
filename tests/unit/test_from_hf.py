"""`ckpt from-hf`: the TOML that it writes trains the model that it read."""

import json
import shutil

import pytest
import torch

from tests import families
from tests.hf_folders import SHIPPED
from torchtitan.commands import ckpt
from torchtitan.config import resolve
from torchtitan.config.registry import model_families
from torchtitan.inference.load import find, open_tokenizer
from torchtitan.models import get_spec
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

pytest.importorskip("transformers")
SCALING = {"factor": 4.0, "original_max_seq_len": 32}
MODELS = {
    "llama3": ("llama3", {}),
    "llama3 scaled, tied": ("llama3", {"rope_scaling": SCALING, "tie_embeddings": True}),
    "mistral": ("mistral", {"head_size": None}),
    "mistral wide": ("mistral", {"head_size": 12}),
    "qwen2_5": ("qwen2_5", {}),
    "qwen3": ("qwen3", {"head_size": 8}),
    "qwen3_moe": ("qwen3_moe", {"head_size": 8}),
    "qwen3_moe whole": ("qwen3_moe", {"n_dense_layers": 0, "normalize_expert_weights": False}),
}


def write_model(folder, family="mistral", changes=None, tokenizer=True, **overrides):
    """A model of transformers with random weights, and the shipped tokenizer; the model here."""
    torch.manual_seed(0)
    model = families.build(family, **{"vocab_size": 2048} | overrides)
    families.twin(family, model).save_pretrained(folder)
    if tokenizer:
        for file in SHIPPED.glob("*.json"):
            shutil.copy(file, folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | (changes or {})))
    return model


def convert(tmp_path):
    return ckpt.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "ours")])


def test_a_family_of_your_own_is_imported(tmp_path, monkeypatch):
    write_model(tmp_path / "hf", "olmo3", {"model_type": "olmo3_of_mine"})
    (tmp_path / "my_olmo.py").write_text(
        "from torchtitan.models.decoder.traits import register_decoder\n"
        "from torchtitan.models.families import olmo3\n"
        "class Config(olmo3._Config):\n"
        "    model_type = 'olmo3_of_mine'\n"
        "register_decoder('my_olmo', olmo3.FLAVORS, Config)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="model_type: got 'olmo3_of_mine'"):
        convert(tmp_path)
    argv = ["from-hf", str(tmp_path / "hf"), str(tmp_path / "ours"), "--custom-import=my_olmo"]
    assert ckpt.main(argv) == 0
    assert settings(tmp_path).spec.name == "my_olmo"
    del model_families._entries["my_olmo"]


def settings(tmp_path, *argv):
    """What a run with the written TOML trains, checked as when it starts."""
    return preflight(
        resolve([f"--config={tmp_path / 'ours/train.toml'}", *argv], 1).config, output=False
    )


@pytest.mark.parametrize("case", MODELS)
def test_the_toml_describes_the_model(tmp_path, capsys, case):
    family, overrides = MODELS[case]
    model = write_model(tmp_path / "hf", family, **overrides)
    assert convert(tmp_path) == 0
    assert "Train from it: torchtitan train" in capsys.readouterr().out
    assert 'initial_load_path = "{here}/step-0"' in (tmp_path / "ours/train.toml").read_text()
    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "ours").rename(tmp_path / "moved")  # with its TOML and tokenizer
    tokenizer = open_tokenizer(find(str(tmp_path / "moved")), None)
    assert tokenizer.path == tmp_path / "moved/tokenizer/tokenizer.json"
    (tmp_path / "moved").rename(tmp_path / "ours")
    setup = settings(tmp_path)
    assert setup.spec.name == family
    built = setup.spec.build(setup.args, None)
    assert {n: p.shape for n, p in built.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    for name in (
        "norm_eps",
        "rope_theta",
        "head_dim",
        "n_dense_layers",
        "normalize_expert_weights",
    ):
        assert getattr(setup.args, name) == getattr(model.args, name), name


def test_a_model_of_no_known_size_is_described(tmp_path, capsys):
    write_model(tmp_path / "hf", "llama3")
    convert(tmp_path)
    assert "llama3, 3 layers of width 64, 348,608 parameters" in capsys.readouterr().out
    section = resolve(["--model.flavor=30M"], 1).config.model
    assert section.label == "llama3 30M"
    assert (
        section.model_copy(update={"overrides": {"dim": 64}}).label == "llama3 30M with overrides"
    )


def test_a_missing_head_size_is_none_in_the_toml_and_on_the_command_line(tmp_path):
    """The nearest flavor has heads of its own size."""
    write_model(tmp_path / "hf", "mistral", head_size=None)
    convert(tmp_path)
    assert 'head_size = "none"' in (tmp_path / "ours/train.toml").read_text()
    assert settings(tmp_path).args.head_size is None
    argv = [
        "--model.name=mistral",
        "--model.overrides.head_size",
        "none",
        "--model.overrides.rope_scaling=none",
    ]
    args = preflight(resolve(argv, 1).config, output=False).args
    assert (args.head_size, args.head_dim, args.rope_scaling) == (None, 32, None)
    with pytest.raises(ConfigError, match=r"model\.overrides\.n_layers"):
        preflight(resolve(["--model.overrides.n_layers=none"], 1).config, output=False)


def test_a_run_that_could_not_start_is_said_before_anything_is_written(tmp_path):
    write_model(tmp_path / "hf", vocab_size=160)
    with pytest.raises(
        ConfigError, match="the tokenizer has 2048 entries, more than vocab_size 160"
    ):
        convert(tmp_path)
    assert not (tmp_path / "ours").exists()


def test_a_folder_without_a_tokenizer_is_converted(tmp_path, capsys):
    write_model(tmp_path / "hf", tokenizer=False)
    assert convert(tmp_path) == 0
    out = capsys.readouterr().out
    assert "has no tokenizer: set model.hf_assets_path in" in out
    assert "Train from it" not in out
    assert settings(tmp_path, f"--model.hf_assets_path={SHIPPED}").args.dim == 64


def test_dropout_in_training_is_said(tmp_path, capsys):
    write_model(tmp_path / "hf", changes={"attention_dropout": 0.1})
    convert(tmp_path)
    assert "warning: config.json: attention_dropout is 0.1" in capsys.readouterr().out


@pytest.mark.parametrize("layers", [[0, 1], [1, 0], [1, 0, 1, 0]])
def test_the_first_layers_may_be_listed_in_any_order(layers):
    hf = get_spec("qwen3_moe").hf
    config = hf.config(get_spec("qwen3_moe").flavors["debugmodel"], "float32")
    assert hf.args(config | {"mlp_only_layers": layers}).n_dense_layers == 2


@pytest.mark.parametrize("layers", [[1], [0, 2], [False, 1], ["0"], [[0]], {"0": 1}, [0, -1]])
def test_other_layers_are_refused(layers):
    hf = get_spec("qwen3_moe").hf
    config = hf.config(get_spec("qwen3_moe").flavors["debugmodel"], "float32")
    with pytest.raises(
        ConfigError, match=r"mlp_only_layers: got .*, must be a list of the first layers"
    ):
        hf.args(config | {"mlp_only_layers": layers})
