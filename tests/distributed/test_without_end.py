"""A run with a tokenizer of characters, without end-of-text: train, resume, sample, export."""

import importlib.util
import json

import pytest

from tests.runs import SAVE, SCHEDULE, arguments, assert_continues, train
from torchtitan.commands import ckpt, generate, tokenize
from torchtitan.commands import eval as eval_command
from torchtitan.commands import tokenizer as tokenizer_command
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.utils.errors import ConfigError, UserError


def test_a_run_of_characters(ranks, tmp_path, capsys):
    text = "".join(f"Line {i} of a play.\n" for i in range(400))
    (tmp_path / "play.txt").write_text(text)
    made, tokens = str(tmp_path / "made"), str(tmp_path / "tokens")
    tokenizer_command.main([str(tmp_path / "play.txt"), "--characters", "--output", made])
    argv = ["--input", str(tmp_path / "play.txt"), "--tokenizer", made, "--output", tokens]
    tokenize.main([*argv, "--held-out", "10%", "--workers", "1"])
    characters = len(set(text))
    assert build_tokenizer(made).vocab_size == characters

    def run(name, steps):
        (tmp_path / name).mkdir(exist_ok=True)
        flags = [
            f"--model.hf_assets_path={made}", f"--model.overrides.vocab_size={characters}",
            f"--training.dataset_path={tokens}", "--validation.enable", "--validation.freq=3",
            f"--validation.dataset_path={tokens}-held-out", "--validation.steps=-1",
            '--sampling.prompts=["Line "]', "--sampling.freq=3", "--sampling.max_new_tokens=4",
        ]  # fmt: skip
        argv = arguments(tmp_path / name, *SAVE, SCHEDULE, *flags, steps=steps)
        result = ranks(1, train, argv)[0]
        assert "validation_loss" in result["metrics"][-1]
        return result | {"metrics": [r for r in result["metrics"] if "lr" in r]}

    whole = run("whole", 6)
    run("parts", 3)
    assert_continues(run("parts", 6), whole)

    folder = str(tmp_path / "whole/out")
    capsys.readouterr()
    ask = ["--checkpoint", folder, "--max-new-tokens=5", "--json"]
    assert generate.main([*ask, "--prompt=Line "]) == 0
    made_text = json.loads(capsys.readouterr().out)["continuations"][0]
    assert (made_text["end"], len(made_text["text"])) == ("length", 5)
    with pytest.raises(ConfigError, match="prompt 1 has no tokens"):
        generate.main(ask)
    if importlib.util.find_spec("lm_eval"):
        with pytest.raises(UserError, match="torchtitan eval needs a token that ends documents"):
            eval_command.main(["--checkpoint", folder, "--tasks=any"])

    assert ckpt.main(["to-hf", f"{folder}/checkpoint", str(tmp_path / "hf"), "--check"]) == 0
    assert "gives those of training" in capsys.readouterr().out
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] is None
    assert generate.main(["--checkpoint", str(tmp_path / "hf"), *ask[2:], "--prompt=Line "]) == 0
