"""Hugging Face folders with damaged or hostile files: every command answers with one sentence that
names the file.
"""

import json
import re
import shutil

import pytest

from tests.damaged_models import (
    CONFIG,
    CONFIGS,
    DEEP,
    EXPERTS,
    POINTER,
    WEIGHTS,
    linked,
    text,
    write_model,
)
from torchtitan.checkpoint.hf.weights import load_hf
from torchtitan.commands import ckpt, generate
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.models import get_spec
from torchtitan.utils.assets import find_asset
from torchtitan.utils.errors import UserError
from torchtitan.utils.process import run_main


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    write_model(folder, "llama3", CONFIG)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_asset("./tests/assets/tokenizer") / name, folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def commands(folder, tmp_path):
    """How each command reads the folder."""
    return {
        "from-hf": (ckpt.main, ["from-hf", str(folder), str(tmp_path / "out")]),
        "generate": (generate.main, ["--checkpoint", str(folder), "--max-new-tokens=2"]),
    }


@pytest.mark.parametrize("command", ["from-hf", "generate"])
@pytest.mark.parametrize(
    "case",
    [
        f"{kind} {name}"
        for kind, cases in (("weights", WEIGHTS), ("config", CONFIGS))
        for name in cases
    ],
)
def test_a_damaged_model_is_one_sentence(folder, tmp_path, capsys, monkeypatch, case, command):
    kind, _, name = case.partition(" ")
    damage, message = (WEIGHTS if kind == "weights" else CONFIGS)[name]
    damage(folder)
    monkeypatch.chdir(tmp_path)
    main, argv = commands(folder, tmp_path)[command]
    status = run_main(main, argv)
    out, err = capsys.readouterr()
    assert status in (1, 2)
    assert re.search(message, err), err
    assert str(folder) in err or kind == "config"
    assert err.startswith("error: ")
    assert len(err) < 1500
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "ran").exists()
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("case", WEIGHTS)
def test_damaged_weights_stop_a_run_that_starts_from_them(folder, case):
    damage, message = WEIGHTS[case]
    damage(folder)
    spec = get_spec("llama3")
    args = spec.hf.args(CONFIG)
    with pytest.raises(UserError, match=message):
        load_hf([spec.build(args, None)], folder, spec, args)


@pytest.mark.parametrize("case", EXPERTS)
def test_a_damaged_expert_is_named(tmp_path, capsys, monkeypatch, case):
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    write_model(
        tmp_path,
        "qwen3_moe",
        CONFIG | sizes | {"model_type": "qwen3_moe", "num_key_value_heads": 2},
    )
    damage, message = EXPERTS[case]
    damage(tmp_path)
    for main, argv in commands(tmp_path, tmp_path).values():
        if case == "nan" and main is generate.main:
            continue  # needs a tokenizer to get that far
        assert run_main(main, argv) in (1, 2)
        out, err = capsys.readouterr()
        assert re.search(message, err), err
        assert (out, err.count("\n")) == ("", 1)
    assert not list(tmp_path.glob("out/*"))
    spec = get_spec("qwen3_moe")
    args = spec.hf.args(json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(UserError, match=message):
        load_hf([spec.build(args, None)], tmp_path, spec, args)


def tokens(change):
    """Damage to `tokenizer.json`."""

    def damage(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return damage


def settings(**values):
    return text("tokenizer_config.json", json.dumps(values))


TOKENIZERS = {
    "not UTF-8": (text("tokenizer.json", b"\xff" * 99), "tokenizer.json is not a tokenizer"),
    "pointer": (text("tokenizer.json", POINTER), "tokenizer.json: a pointer of git-lfs, not the"),
    "zeros": (linked("tokenizer.json", "/dev/zero"), "holds no tokenizer"),
    "no entries": (
        tokens(lambda t: t.update(added_tokens=[], model=t["model"] | {"vocab": {}, "merges": []})),
        "bos_token is .* doesn.t have",
    ),
    "id of 2^32": (
        tokens(lambda t: t["model"]["vocab"].update(a=2**32 - 1)),
        "has the id 4,294,967,295; ids must be below",
    ),
    "special": (
        tokens(lambda t: t["added_tokens"][0].update(content=5)),
        "tokenizer.json is not a tokenizer",
    ),
    "end of text": (
        settings(eos_token=5),
        "tokenizer_config.json: eos_token is int, must be a string",
    ),
    "unknown end": (settings(eos_token="nowhere"), "eos_token is 'nowhere', which"),
    "settings deep": (
        text("tokenizer_config.json", DEEP),
        "tokenizer_config.json is nested too deeply",
    ),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_damaged_tokenizer_is_one_sentence(folder, tmp_path, capsys, case):
    damage, message = TOKENIZERS[case]
    damage(folder)
    main, argv = commands(folder, tmp_path)["generate"]
    assert run_main(main, argv) == 2
    err = capsys.readouterr().err
    assert re.search(f"error: --assets: .*{message}", err), err
    assert "Traceback" not in err


def test_a_chat_template_is_never_evaluated(folder):
    settings(
        eos_token="<|end_of_text|>",
        chat_template="{{ 1 / 0 }}{% for i in range(10**12) %}{% endfor %}",
    )(folder)
    assert build_tokenizer(str(folder)).encode("a", bos=True)


def splitting(regex):
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return tokens(lambda content: content.update(pre_tokenizer=split))


def test_an_expression_that_backtracks_forever_is_an_error(folder):
    splitting(r"(a+)+$")(folder)
    with pytest.raises(
        UserError, match=r"tokenizer.json can't encode a text: .*retry-limit-in-match over"
    ):
        build_tokenizer(str(folder)).encode("a" * 40 + "c")


@pytest.mark.parametrize("regex", [r"(?:a|a)*b", r"(.*)*\1x"])
def test_an_expression_that_never_matches_leaves_the_text_whole(folder, regex):
    text = "a" * 40 + "c"
    plain = build_tokenizer(str(folder)).encode("a" * 40 + "c")
    splitting(regex)(folder)
    tokenizer = build_tokenizer(str(folder))
    assert tokenizer.encode(text) == plain
    assert tokenizer.decode(plain) == text
