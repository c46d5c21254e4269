"""A folder whose tensors aren't the model of its `config.json`, or of the run: every command that
reads one says so.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import families
from tests.unit.test_from_hf import write_model
from torchtitan.checkpoint.hf.opening import open_hf
from torchtitan.checkpoint.hf.weights import load_hf
from torchtitan.commands import ckpt
from torchtitan.config import resolve
from torchtitan.inference.load import find
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError

transformers = pytest.importorskip("transformers")
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def change_tensors(folder, change):
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **keys):
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | keys))


def run_of(folder, family="llama3", **overrides):
    """Check a run that starts from the folder, with the sizes of `write_model`."""
    sizes = families.TINY | families.SIZES[family] | {"vocab_size": 2048} | overrides
    del sizes["max_seq_len"]
    argv = [
        f"--model.name={family}",
        f"--model.hf_assets_path={folder}",
        *(f"--model.overrides.{key}={json.dumps(value)}" for key, value in sizes.items()),
        *("--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--training.seq_len=64"),
        f"--job.dump_folder={folder.parent / 'out'}",
    ]
    return preflight(resolve(argv, 1).config, output=False)


def load_into_the_family(folder):
    spec = get_spec("llama3")
    args = families.build("llama3", vocab_size=2048).args
    load_hf([spec.build(args, None)], folder, spec, args)


DOORS = {
    "from-hf": lambda folder: ckpt.main(["from-hf", str(folder), str(folder.parent / "ours")]),
    "generate": lambda folder: find(str(folder)),
    "config": run_of,
    "train": load_into_the_family,
}


def third_layer(found):
    layer = "model.layers.2."
    found |= {
        name.replace(layer, "model.layers.3."): x + 0 for name, x in found.items() if layer in name
    }


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: f.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            r"layers\.0\.self_attn\.q_proj\.bias is unknown",
        ),
        (third_layer, r"layers\.3\..* is unknown; .*and 6 more"),
        (lambda f: f.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda f: f.update({"model.norm.weight": torch.ones(60)}), r"norm\.weight is .60.*64"),
    ],
    ids=["bias", "layer", "missing", "shape"],
)
def test_every_command_checks_the_tensors(tmp_path, door, change, message):
    write_model(tmp_path / "hf", "llama3")
    change_tensors(tmp_path / "hf", change)
    with pytest.raises(UserError, match=message):
        DOORS[door](tmp_path / "hf")
    assert not (tmp_path / "ours").exists()


def other_head(found):
    found[HEAD] = found[EMBEDDING] * 2


def test_a_head_beside_tied_embeddings_is_compared(tmp_path, capsys):
    """transformers 5 keeps both if they differ."""
    write_model(tmp_path / "hf", "llama3", tie_embeddings=True)
    change_tensors(tmp_path / "hf", lambda f: f.update({HEAD: f[EMBEDDING] + 0}))
    assert open_hf(tmp_path / "hf").notes == []
    run_of(tmp_path / "hf", tie_embeddings=True)
    run_of(tmp_path / "hf", tie_embeddings=False)

    change_tensors(tmp_path / "hf", other_head)
    assert ckpt.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert "lm_head.weight is not model.embed_tokens.weight: read" in capsys.readouterr().out
    assert "tie_embeddings" not in (tmp_path / "ours/train.toml").read_text(), "the default"
    source = find(str(tmp_path / "hf"))
    ours = source.spec.build(source.args, attention_backend("cpu"))
    load_hf([ours], tmp_path / "hf", source.spec, source.args)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.randint(0, 2048, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    run_of(tmp_path / "hf", tie_embeddings=False)
    with pytest.raises(ConfigError, match=r"lm_head.*\n.*tie_embeddings = false"):
        run_of(tmp_path / "hf", tie_embeddings=True)


def test_a_tied_model_whose_embedding_is_called_head_is_refused(tmp_path):
    write_model(tmp_path / "hf", "llama3", tie_embeddings=True)
    change_tensors(tmp_path / "hf", lambda f: f.update({HEAD: f.pop(EMBEDDING)}))
    with pytest.raises(UserError, match=r"embed_tokens\.weight is missing"):
        open_hf(tmp_path / "hf")


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"rope_theta": 12345.0}, "rope_theta = 12345.0"),
        ({"rms_norm_eps": 1e-3}, "norm_eps = 0.001"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            'rope_scaling = {type = "linear", factor = 2.0}',
        ),
    ],
)
def test_a_run_has_the_model_of_config_json(tmp_path, changes, setting):
    write_model(tmp_path / "hf", "llama3")
    run_of(tmp_path / "hf")
    change_config(tmp_path / "hf", rope_parameters=None, rope_theta=5e5)
    run_of(tmp_path / "hf")
    change_config(tmp_path / "hf", **changes)
    with pytest.raises(ConfigError) as refused:
        run_of(tmp_path / "hf")
    assert f"Set [model.overrides] {setting}." in str(refused.value)
    key, _, value = setting.partition(" = ")
    if key != "rope_scaling":
        run_of(tmp_path / "hf", **{key: json.loads(value)})


def test_all_that_differs_is_said_at_once(tmp_path):
    write_model(tmp_path / "hf", "llama3")
    change_config(tmp_path / "hf", rms_norm_eps=1e-3)
    change_tensors(tmp_path / "hf", lambda f: f.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"(?s)norm.weight is missing.*norm_eps = 0.001"):
        run_of(tmp_path / "hf")


def test_a_run_that_resumes_does_not_read_the_folder(tmp_path):
    write_model(tmp_path / "hf", "llama3")
    change_config(tmp_path / "hf", rms_norm_eps=1e-3)
    step = tmp_path / "out/checkpoint/step-1"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    run_of(tmp_path / "hf")


def test_another_family_is_refused(tmp_path):
    write_model(tmp_path / "hf", "qwen2_5")
    with pytest.raises(ConfigError, match="model_type: got 'qwen2', must be 'llama'"):
        run_of(tmp_path / "hf")


# ---- modules that predict further tokens


@pytest.fixture(params=["deepseek_v3", "glm4_moe"])
def further(request, tmp_path):
    """A folder that transformers saved: its key counts a module that it doesn't have."""
    torch.manual_seed(0)
    spec = get_spec(request.param)
    small = {"n_layers": 2, "vocab_size": 2048, "dim": 64, "ffn_dim": 96, "n_experts": 8}
    args = spec.args("debugmodel", small | {"expert_dim": 16, "shared_expert_dim": 16})
    config = spec.hf.config(args, "float32") | {"num_nextn_predict_layers": 1}
    theirs = families.random_twin(config, attn_implementation="eager")
    theirs.save_pretrained(tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_nextn_predict_layers"] == 1
    return theirs, spec


def test_modules_that_transformers_does_not_save_are_not_read(tmp_path, further, capsys):
    theirs, spec = further
    assert ckpt.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert "the folder has no such modules: read without them" in capsys.readouterr().out
    assert "n_mtp" not in (tmp_path / "ours/train.toml").read_text()
    source = open_hf(tmp_path / "hf")
    assert source.args.n_mtp == 0
    ours = spec.build(source.args, attention_backend("cpu"))
    load_hf([ours], tmp_path / "hf", spec, source.args)
    tokens = torch.randint(0, 2048, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    more = source.args.model_copy(update={"n_mtp": 1})
    with pytest.raises(UserError, match="n_mtp = 0"):
        load_hf([spec.build(more, None)], tmp_path / "hf", spec, more)


def test_a_part_of_a_module_names_the_key(tmp_path, further):
    change_tensors(
        tmp_path / "hf",
        lambda f: f.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
    )
    message = (
        r"num_nextn_predict_layers is 1, but of these modules .* is missing .*set the key to 0"
    )
    with pytest.raises(UserError, match=message):
        open_hf(tmp_path / "hf")


def test_a_layer_too_many_is_no_module(tmp_path, further):
    """The pattern of ignored tensors is that of any layer behind the last."""
    change_config(tmp_path / "hf", num_nextn_predict_layers=0, num_hidden_layers=1)
    with pytest.raises(UserError, match=r"model\.layers\.1\..* is unknown"):
        open_hf(tmp_path / "hf")
    change_config(tmp_path / "hf", num_hidden_layers=2)

    def add_module(found):
        found |= {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}

    change_tensors(tmp_path / "hf", add_module)
    assert "model.layers.2.eh_proj.weight" in open_hf(tmp_path / "hf").notes[0]


def test_files_beside_the_model_are_left_out_and_named(tmp_path):
    """Such as an adapter, or the publisher's own format."""
    folder = tmp_path / "theirs"
    write_model(folder)
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    model = open_hf(folder)
    assert model.notes == ["Not read, because transformers doesn't: consolidated.safetensors"]
    embedding = load_file(folder / "model.safetensors")[EMBEDDING]
    assert torch.equal(model.reader.read("tok_embeddings.weight"), embedding)


def test_only_another_rope_is_told_where_stages_set_it(tmp_path):
    write_model(tmp_path / "theirs", "llama3")
    for overrides, told in (({"rope_theta": 7.0}, True), ({"norm_eps": 0.25}, False)):
        with pytest.raises(UserError, match="holds another model") as found:
            run_of(tmp_path / "theirs", **overrides)
        assert ("another RoPE" in str(found.value)) == told
