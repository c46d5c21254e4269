"""Exports to Hugging Face: what a class can't express is refused, what is written is what
transformers computes.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from tests.examples import gated_attention
from tests.families import EXPERTS
from tests.hf_folders import SHIPPED, write_checkpoint, write_tiktoken
from torchtitan.checkpoint.hf import check as hf_check
from torchtitan.checkpoint.hf import export as hf_export
from torchtitan.commands import ckpt
from torchtitan.config import resolve
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.inference.load import find, open_tokenizer
from torchtitan.models import get_spec, hf_map, parameter_names, register, spec_of_hf
from torchtitan.models import spec as models_spec
from torchtitan.models.args import DecoderArgs
from torchtitan.models.decoder.model import Decoder
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers")

SCALING = {"factor": 4.0, "original_max_seq_len": 32}
EXPRESSIBLE = [
    ("llama3", {"rope_scaling": SCALING, "head_size": 12}),
    ("llama3", {"tie_embeddings": True, "norm_eps": 1e-3}),
    ("mistral", {"head_size": None, "rope_scaling": SCALING}),
    ("qwen2_5", {"head_size": 12, "tie_embeddings": True, "rope_theta": 1e3}),
    ("qwen3", {"head_size": None, "rope_scaling": SCALING}),
    ("qwen3_moe", EXPERTS | {"head_size": None, "normalize_expert_weights": False}),
    ("qwen3_moe", {"n_experts": 0}),
]
INEXPRESSIBLE = [
    (
        "llama3",
        {"qk_norm": True},
        "qk_norm",
        "llama .* computes with false, this model with true",
        ["qwen3"],
    ),
    ("llama3", EXPERTS, "n_experts", "llama .* computes with 0, this model with 8", []),
    ("mistral", {"qkv_bias": True}, "qkv_bias", "mistral .* computes with false", ["qwen2_5"]),
    (
        "qwen2_5",
        {"qkv_bias": False},
        "qkv_bias",
        "qwen2 .* computes with true",
        ["llama3", "mistral"],
    ),
    ("qwen3", {"qk_norm": False}, "qk_norm", "qwen3 .* computes with true", ["llama3"]),
]


class CappedArgs(DecoderArgs):
    softcap: float = 0.0


class Capped(Decoder):
    """Logits within `softcap`, if it isn't 0."""

    def project(self, x, weight):
        logits = super().project(x, weight)
        cap = self.args.softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def forward(self, *args, **kwargs):
        return self.project(super().forward(*args, **kwargs, project=False), self.output_weight)


LLAMA = get_spec("llama3")
CAPPED = {name: CappedArgs(**args.model_dump()) for name, args in LLAMA.flavors.items()}
FAMILIES = [
    LLAMA.variant("capped", flavors=CAPPED, build=Capped),
    LLAMA.variant("capped_llama", flavors=CAPPED, build=Capped, hf=LLAMA.hf),
]


@pytest.fixture(scope="module", autouse=True)
def _capped():
    for family in FAMILIES:
        register(family)
    yield
    for family in FAMILIES:
        del models_spec._families._entries[family.name]


def export(tmp_path, *argv):
    return ckpt.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "hf"), *argv])


def nothing_left(tmp_path):
    return {path.name for path in tmp_path.iterdir()} <= {"ours", "tokenizer"}


def logits(folder, tokens):
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            tokens
        ).logits


def preflighted(family, overrides, *argv):
    flags = [
        f"--model.overrides.{key}={'none' if value is None else value}"
        for key, value in overrides.items()
    ]
    return preflight(resolve([f"--model.name={family}", *flags, *argv], 1).config, output=False)


EXPORT = ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]


@pytest.mark.parametrize(("family", "overrides"), EXPRESSIBLE)
def test_what_a_class_expresses_is_exported(tmp_path, capsys, family, overrides):
    model = write_checkpoint(tmp_path / "ours", family, **overrides)
    export(tmp_path)
    assert "Largest logit difference" in capsys.readouterr().out
    tokens = torch.randint(0, 2048, (2, 60))
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens), logits(tmp_path / "hf", tokens), rtol=1e-4, atol=1e-4
        )
    spec = get_spec(family)
    back = spec_of_hf(json.loads((tmp_path / "hf/config.json").read_text()))
    assert back.name == spec.name
    preflighted(
        family, {key: value for key, value in overrides.items() if key != "rope_scaling"}, *EXPORT
    )


@pytest.mark.parametrize(("family", "overrides", "key", "message", "others"), INEXPRESSIBLE)
def test_what_a_class_can_not_express_is_refused(tmp_path, family, overrides, key, message, others):
    write_checkpoint(tmp_path / "ours", family, **overrides)
    with pytest.raises(
        CheckpointError, match=f"model.overrides.{key}: Hugging Face's {message}"
    ) as error:
        export(tmp_path)
    assert nothing_left(tmp_path)
    words = str(error.value).removeprefix("can't export to Hugging Face: ")
    with pytest.raises(ConfigError) as error:
        preflighted(family, overrides, *EXPORT)
    assert error.value.problems == [
        f"checkpoint.last_save_in_hf: {words}; or set checkpoint.last_save_in_hf = false"
    ]
    preflighted(family, overrides)
    for other in others:
        assert json.dumps(other) in words


def test_a_bias_that_is_trained_is_exported_or_refused():
    """DeepSeek-V3's class has it, Qwen3-MoE's doesn't."""
    trained = [*EXPORT, "--moe.balance_bias_rate=0.001"]
    preflighted("deepseek_v3", {}, *trained)
    preflighted("qwen3_moe", {}, *EXPORT)
    with pytest.raises(ConfigError, match=r"last_save_in_hf: .* no place for the biases"):
        preflighted("qwen3_moe", {}, *trained)


def test_the_class_of_another_family_may_express_it(tmp_path):
    model = write_checkpoint(tmp_path / "ours", "llama3", qk_norm=True)
    export(tmp_path, "--model", "qwen3")
    tokens = torch.randint(0, 2048, (2, 60))
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens), logits(tmp_path / "hf", tokens), rtol=1e-4, atol=1e-4
        )
    with pytest.raises(
        CheckpointError, match=r"qwen2 .* computes with true, this model with false"
    ):
        ckpt.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "x"), "--model", "qwen2_5"])


def test_a_derived_family_has_no_class_unless_it_states_one(tmp_path):
    gated = get_spec("llama3_gated")
    assert gated.hf is None
    assert LLAMA.variant("renamed").hf is LLAMA.hf, "the same code"
    write_checkpoint(tmp_path / "ours", "llama3_gated")
    with pytest.raises(
        CheckpointError, match=r"'llama3_gated' names no class of .* state it as `hf=`"
    ):
        export(tmp_path)
    with pytest.raises(CheckpointError, match="'llama3_gated' names no class"):
        export(tmp_path, "--model", "llama3")
    assert nothing_left(tmp_path)
    custom = f"--experimental.custom_import={gated_attention.__name__}"
    for key in ("last_save_in_hf", "initial_load_in_hf"):
        with pytest.raises(
            ConfigError, match=f"checkpoint.{key}: the model family 'llama3_gated' names no class"
        ):
            preflighted("llama3_gated", {}, custom, "--checkpoint.enable", f"--checkpoint.{key}")
    assert "layers.5.attention.gate.weight" in parameter_names(gated, gated.flavors["debugmodel"])
    group = '--optimizer.param_groups=[{{pattern = "*.{}.weight", lr_scale = 0.5}}]'
    preflighted("llama3_gated", {}, custom, group.format("gate"))
    with pytest.raises(ConfigError, match=r"\*.gait.weight' matches no parameter"):
        preflighted("llama3_gated", {}, custom, group.format("gait"))
    frozen = "--optimizer.param_groups=[{{pattern = '{}', lr_scale = 0}}]"
    preflighted("llama3_gated", {}, custom, frozen.format("*.gate.*"))
    with pytest.raises(ConfigError, match="lr_scale 0 for every parameter trains nothing"):
        preflighted("llama3_gated", {}, custom, frozen.format("*"))


def test_a_stated_class_is_compared(tmp_path):
    """Soft-capped logits aren't Llama's. The map says so for a key that config.json lacks; else the
    logits do.
    """
    spec = get_spec("capped_llama")
    args = spec.args("debugmodel", {})
    assert hf_map(spec).fixed(args)["softcap"] == 0.0
    write_checkpoint(tmp_path / "ours", "capped_llama", softcap=0.5)
    with pytest.raises(
        CheckpointError, match=r"model.overrides.softcap: .* computes with 0.0, this model with 0.5"
    ):
        export(tmp_path)
    register(replace(spec, hf=replace(LLAMA.hf, fixed=lambda args: {})))
    try:
        with pytest.raises(
            CheckpointError, match=r"other logits than this project's model.*nothing is left"
        ):
            export(tmp_path)
    finally:
        register(spec)
    assert nothing_left(tmp_path)
    write_checkpoint(tmp_path / "other", "capped")
    with pytest.raises(CheckpointError, match="'capped' names no class"):
        ckpt.main(["to-hf", str(tmp_path / "other"), str(tmp_path / "hf")])


def planted_swap(args):
    """Queries and keys under each other's names; the shapes are equal."""
    names = LLAMA.hf.names(args)
    other = {
        name: name.replace(".wq.", ".wk.") if ".wq." in name else name.replace(".wk.", ".wq.")
        for name in names
    }
    return {name: names[other[name]] for name in names}


@pytest.fixture
def swapped():
    register(replace(LLAMA, hf=replace(LLAMA.hf, names=planted_swap)))
    yield
    register(LLAMA)


@pytest.mark.usefixtures("swapped")
def test_a_mistake_in_the_map_is_found_and_deleted(tmp_path, capsys):
    write_checkpoint(tmp_path / "ours", "llama3", n_kv_heads=8)
    with pytest.raises(
        CheckpointError,
        match=r"transformers computes other logits .* nothing is left of the export",
    ):
        export(tmp_path)
    assert nothing_left(tmp_path)
    export(tmp_path, "--no-check")
    assert "Not read back, and not compared with transformers: as asked" in capsys.readouterr().out


def test_a_missing_weight_and_a_wrong_byte_are_found(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "ours", "llama3")
    real = hf_export._write_safetensors

    def flipped(path, tensors, read):
        real(path, tensors, read)
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(hf_export, "_write_safetensors", flipped)
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not what was written"):
        export(tmp_path)

    def without(path, tensors, read):
        real(
            path,
            {name: value for name, value in tensors.items() if name != "model.norm.weight"},
            read,
        )

    monkeypatch.setattr(hf_export, "_write_safetensors", without)
    with pytest.raises(CheckpointError, match=r"model.norm.weight"):
        export(tmp_path)
    assert nothing_left(tmp_path)


def test_what_was_not_compared_is_said(tmp_path, capsys, monkeypatch):
    model = write_checkpoint(tmp_path / "ours", "llama3")
    read = dict(model.named_parameters()).__getitem__
    tokenizer = build_tokenizer(str(SHIPPED))
    export(tmp_path)
    capsys.readouterr()
    arguments = tmp_path / "hf", LLAMA, model.args, tokenizer, read
    assert "0.0 billion parameters" in hf_check.compare(*arguments, max_parameters=100)[1]
    monkeypatch.setattr(
        hf_check.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10**5})
    )
    notes = hf_check.compare(*arguments, max_parameters=10**9)
    assert "of memory (--check compares anyway)" in notes[1]
    notes = hf_check.compare(*arguments, max_parameters=10**9, anyway=True)
    assert "Largest logit difference" in notes[1]
    monkeypatch.setattr(hf_check.importlib.util, "find_spec", lambda name: None)
    assert hf_check.compare(*arguments, max_parameters=10**9) == [
        "Not compared with transformers: pip install transformers"
    ]


def test_ends_and_settings_of_texts_survive(tmp_path, capsys):
    """A list of ends reaches transformers and `generate`; no family's sampling is added."""
    write_checkpoint(tmp_path / "ours", "llama3")
    export(tmp_path, "--no-check")
    folder = tmp_path / "hf"
    prompt = torch.tensor([[0, 5, 9]])
    settings = {"do_sample": False, "max_new_tokens": 12}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    free = model.generate(prompt, **settings, eos_token_id=None)[0, 3:].tolist()
    assert len(free) == 12
    end = next(token for token in free[2:] if token not in free[:2])
    about = json.loads((folder / "generation_config.json").read_text())
    assert about == {"bos_token_id": 0, "eos_token_id": 1}
    about |= {"eos_token_id": [1, end], "pad_token_id": 2, "repetition_penalty": 1.05}
    (folder / "generation_config.json").write_text(json.dumps(about))
    started, back = tmp_path / "started", tmp_path / "back"
    ckpt.main(["from-hf", str(folder), str(started)])
    ckpt.main(["to-hf", str(started), str(back), "--no-check"])
    assert json.loads((back / "generation_config.json").read_text()) == about
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == [1, end]
    model = transformers.AutoModelForCausalLM.from_pretrained(back)
    whole = model.generate(prompt, **settings, repetition_penalty=1.0)[0, 3:].tolist()
    assert whole == free[: free.index(end) + 1]
    source = find(str(started))
    assert open_tokenizer(source, None).all_ends == [1, end]


# ---- the tokenizer

TEXTS = [
    "Hello",
    "  It's 12345678 o'clock\n\n\tnaïve cafe\u0301 日本語",
    "a  b\r\n c ",
    "",
    "x" * 300,
]


def changed_tokenizer(folder, settings, **changes):
    """The shipped tokenizer with other settings."""
    content = json.loads((SHIPPED / "tokenizer.json").read_text())
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


END = {"id": "<|end_of_text|>", "type_id": 0}
ENDS = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": END}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {END["id"]: {"id": END["id"], "ids": [1], "tokens": [END["id"]]}},
}
CUT = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
LLAMA_CLASS = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True}
TOKENIZERS = {
    "shipped": lambda folder: shutil.copytree(SHIPPED, folder),
    "no settings": lambda folder: changed_tokenizer(folder, {}),
    "adds the end, and cuts": lambda folder: changed_tokenizer(
        folder, LLAMA_CLASS, post_processor=ENDS, truncation=CUT
    ),
    "another class": lambda folder: changed_tokenizer(
        folder, {"tokenizer_class": "Qwen2Tokenizer"}
    ),
    "tiktoken": lambda folder: (folder.mkdir(), write_tiktoken(folder)),
}


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("case", TOKENIZERS)
def test_auto_tokenizer_gives_the_ids_of_training(tmp_path, capsys, family, case):
    TOKENIZERS[case](tmp_path / "tokenizer")
    ours = build_tokenizer(str(tmp_path / "tokenizer"))
    write_checkpoint(tmp_path / "ours", family, tmp_path / "tokenizer", vocab_size=2304)
    export(tmp_path)
    assert "AutoTokenizer of transformers gives those of training" in capsys.readouterr().out
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ours.encode(text, bos=True)
        assert theirs.decode(ids) == text
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert theirs.model_max_length == config["max_position_embeddings"]
    assert theirs.decode(theirs(TEXTS[0])["input_ids"], skip_special_tokens=True) == TEXTS[0]
    again = build_tokenizer(str(tmp_path / "hf"))
    assert [again.encode(text, bos=True) for text in TEXTS] == [
        ours.encode(text, bos=True) for text in TEXTS
    ]


def test_a_tokenizer_without_begin_of_text_gets_none(tmp_path):
    content = json.loads((SHIPPED / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "<|pad|>"
    content["model"]["vocab"]["<|pad|>"] = content["model"]["vocab"].pop("<|begin_of_text|>")
    changes = {"added_tokens": content["added_tokens"], "model": content["model"]}
    changed_tokenizer(tmp_path / "tokenizer", {"eos_token": END["id"]}, **changes)
    ours = build_tokenizer(str(tmp_path / "tokenizer"))
    assert ours.bos_id is None
    write_checkpoint(tmp_path / "ours", "qwen3", tmp_path / "tokenizer")
    export(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert [theirs(text)["input_ids"] for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_a_class_that_transformers_forces_is_said(tmp_path, capsys):
    """transformers 5 builds its own tokenizer for every qwen2 model. Its files are right for those
    who read them.
    """
    write_checkpoint(tmp_path / "ours", "qwen2_5")
    export(tmp_path)
    forced = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = build_tokenizer(str(SHIPPED))
    assert ("Warning: AutoTokenizer takes" in capsys.readouterr().out) == any(
        forced(text)["input_ids"] != ours.encode(text, bos=True) for text in TEXTS
    )
    whole = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    assert [whole(text)["input_ids"] for text in TEXTS] == [
        ours.encode(text, bos=True) for text in TEXTS
    ]
