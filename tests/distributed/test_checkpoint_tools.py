"""`torchtitan ckpt`, on checkpoints of real runs."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import families
from tests.runs import arguments, train
from torchtitan.commands import ckpt
from torchtitan.utils.errors import ConfigError, UserError

SAVE = ["--checkpoint.enable", "--checkpoint.interval=2", "--lr_scheduler.total_steps=6"]
TIED = ["--model.flavor=1B", "--model.overrides.vocab_size=2048"]
EXPERTS = [
    "--model.name=qwen3_moe",
    *(f"--model.overrides.{key}={value}" for key, value in families.EXPERTS.items()),
]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """The folder of checkpoints 2, 4 and 6 of a run on two ranks, and the run's results."""
    folder = tmp_path_factory.mktemp("run")
    result = ranks(2, train, arguments(folder, *SAVE, steps=6))[0]
    return folder / "out/checkpoint", result


def copy_of(run, tmp_path):
    return shutil.copytree(run[0], tmp_path / "copy")


def test_inspect(run, capsys):
    folder, result = run
    assert ckpt.main(["inspect", str(folder), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)
    assert [s["step"] for s in steps] == [2, 4, 6]
    last = steps[-1]
    count = sum(weight.numel() for weight in result["weights"].values())
    assert last["parameters"] == count
    assert last["bytes"]["model"] == {"float32": 4 * count}
    assert last["bytes"]["optimizer"]["float32"] == 8 * count + 4 * len(result["weights"]), (
        "two moments and a counter"
    )
    assert last["train_state"]["progress"]["tokens"] == 6 * 8 * 32
    assert last["config"]["training.global_batch_size"] == 8
    assert "training.max_norm" not in last["config"], "as it is by default"
    assert last["versions"]["torch"] == torch.__version__
    ckpt.main(["inspect", str(folder)])
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 4
    assert f"{count:,}" in table[-1]
    ckpt.main(["inspect", str(folder / "step-4")])
    assert "model.overrides.dim = 64" in capsys.readouterr().out


def test_verify_lists_every_damaged_file(run, tmp_path, capsys):
    folder = copy_of(run, tmp_path)
    assert ckpt.main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("OK") == 3
    for name, damage in (
        ("__0_0.distcp", lambda b: b[:-1]),
        ("__1_0.distcp", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
    ):
        file = folder / "step-4" / name
        file.write_bytes(damage(file.read_bytes()))
    (folder / "step-6/.metadata").unlink()
    (folder / ".step-8.tmp").mkdir()
    assert ckpt.main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "step-2: OK" in out
    for text in (
        "__0_0.distcp has",
        "__1_0.distcp has a wrong checksum",
        ".metadata: No such file",
        ".step-8.tmp: left",
    ):
        assert text in out


EXPORTED = {"llama3": TIED, "qwen3_moe": EXPERTS}


@pytest.mark.parametrize("extra", EXPORTED.values(), ids=EXPORTED)
def test_to_hf_and_back_is_bitwise_equal(ranks, tmp_path, capsys, extra):
    pytest.importorskip("transformers")
    run = ranks(
        1, train, arguments(tmp_path, *SAVE, *extra, "--checkpoint.keep_latest_k=2", steps=2)
    )[0]
    checkpoints = tmp_path / "out/checkpoint"
    first = tmp_path / "hf"
    back = tmp_path / "again"
    ckpt.main(
        ["to-hf", str(checkpoints), str(first), "--dtype", "bfloat16", "--max-file-gb", "0.0002"]
    )
    assert "Largest logit difference" in capsys.readouterr().out
    config = json.loads((first / "config.json").read_text())
    assert (
        config["eos_token_id"]
        == json.loads((first / "generation_config.json").read_text())["eos_token_id"]
        == 1
    )
    assert (first / "tokenizer.json").is_file()
    weights = {k: v for file in first.glob("*.safetensors") for k, v in load_file(file).items()}
    index = json.loads((first / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == weights.keys()
    assert ("lm_head.weight" in weights) == (extra is not TIED)
    assert torch.equal(
        weights["model.norm.weight"], run["weights"]["norm.weight"].to(torch.bfloat16)
    )

    ckpt.main(["from-hf", str(first), str(tmp_path / "started")])
    ckpt.main(["to-hf", str(tmp_path / "started"), str(back), "--no-check"])
    assert {p.name for p in back.iterdir()} == {p.name for p in first.iterdir()} - {
        p.name for p in first.glob("model*")
    } | {"model.safetensors"}
    for name, weight in load_file(back / "model.safetensors").items():
        assert torch.equal(weight, weights.pop(name)), name
    assert not weights
    assert json.loads((back / "config.json").read_text()) == config

    # The TOML trains from these weights as it is.
    argv = arguments(tmp_path, f"--config={tmp_path / 'started/train.toml'}", steps=1)
    argv = [a for a in argv if not a.startswith("--model.")] + [
        f"--job.dump_folder={tmp_path / 'next'}"
    ]
    started = ranks(2, train, argv)[0]
    assert started["initial"].keys() == run["weights"].keys()
    for name, weight in run["weights"].items():
        # Hugging Face has no place for the loads of experts, which are integers.
        expected = (
            weight.bfloat16().float() if weight.is_floating_point() else torch.zeros_like(weight)
        )
        assert torch.equal(started["initial"][name], expected), name


def test_each_weight_keeps_its_own_type(tmp_path, run):
    ckpt.main(["to-hf", str(run[0]), str(tmp_path / "hf"), "--dtype", "bfloat16", "--no-check"])
    file = tmp_path / "hf/model.safetensors"
    mixed = {k: v.float() * 1.001 if "norm" in k else v for k, v in load_file(file).items()}
    save_file(mixed, file)
    ckpt.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "started")])
    ckpt.main(["to-hf", str(tmp_path / "started"), str(tmp_path / "back"), "--no-check"])
    for name, weight in load_file(tmp_path / "back/model.safetensors").items():
        assert weight.dtype == mixed[name].dtype
        assert torch.equal(weight, mixed[name]), name


def test_from_hf_explains_what_is_wrong_with_a_folder(tmp_path, run):
    folder = tmp_path / "model"
    folder.mkdir()

    def refused(match, *argv, **changes):
        if changes:
            (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=match):
            ckpt.main(["from-hf", str(folder), str(tmp_path / "out"), *argv])
        assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())

    refused("config.json: .*No such file")
    ckpt.main(["to-hf", str(run[0]), str(tmp_path / "hf"), "--no-check"])
    config = json.loads((tmp_path / "hf/config.json").read_text())
    refused("no .safetensors", model_type="llama")
    shutil.copy(tmp_path / "hf/model.safetensors", folder)
    refused(
        "config.json: model_type: got 'gpt2', must be one of .*'llama', 'mistral'",
        model_type="gpt2",
    )
    refused(
        "config.json: model_type: got 'llama', must be 'qwen3'", "--model=qwen3", model_type="llama"
    )
    refused("model.layers.0.self_attn.q_proj.bias is missing", model_type="qwen2")
    refused("q_proj.weight is \\[64, 64\\], should be \\[128, 64\\]", head_dim=32)
    refused("gate_proj.weight is \\[96, 64\\], should be \\[128, 64\\]", intermediate_size=128)
    refused("model.layers.2.* is missing", num_hidden_layers=3)
    refused("model.layers.1.* is unknown", num_hidden_layers=1)
    (folder / "config.json").write_text(
        json.dumps(config | {"hidden_act": "gelu", "mlp_bias": True})
    )
    with pytest.raises(ConfigError) as error:
        ckpt.main(["from-hf", str(folder), str(tmp_path / "out")])
    assert len(error.value.problems) == 2


def test_an_expert_bias_is_not_left_out_silently(ranks, tmp_path):
    extra = [*SAVE, *EXPERTS, "--moe.balance_bias_rate=0.01"]
    ranks(1, train, arguments(tmp_path, *extra, steps=2))
    with pytest.raises(
        UserError,
        match=r"router.expert_bias is not zero, and .* train with moe.balance_bias_rate = 0",
    ):
        ckpt.main(["to-hf", str(tmp_path / "out/checkpoint"), str(tmp_path / "hf")])
    assert not (tmp_path / "hf").exists()


def test_checkpoints_of_another_program_are_not_replaced(ranks, tmp_path):
    theirs = tmp_path / "out/checkpoint/step-3"
    theirs.mkdir(parents=True)
    (theirs / ".metadata").write_bytes(b"of another trainer")
    message = r"step-3 in .* without manifest.json, and no checkpoint that can be resumed"
    with pytest.raises(AssertionError, match=message):
        ranks(1, train, arguments(tmp_path, *SAVE))
    assert (theirs / ".metadata").is_file()


def test_bad_input(tmp_path, run):
    folder = str(run[0])
    damaged = copy_of(run, tmp_path) / "step-4"
    (damaged / "__1_0.distcp").write_bytes(b"")
    for argv, match in (
        (["inspect", str(tmp_path / "nothing")], "nothing does not exist"),
        (["verify", str(tmp_path)], "holds no complete checkpoint"),
        (["to-hf", folder, folder], "exists; delete it"),
        (
            ["to-hf", str(damaged), str(tmp_path / "x")],
            "step-4 is damaged: __1_0.distcp has 0 bytes",
        ),
        (["to-hf", folder, str(tmp_path / "x"), "--assets", str(tmp_path)], "holds no tokenizer"),
        (
            ["to-hf", folder, str(tmp_path / "x"), "--ema"],
            "step-6 has no average of the weights: its run had no ema",
        ),
        (["inspect", "nosuch://bucket/run"], "unknown storage nosuch://"),
    ):
        with pytest.raises(UserError, match=match):
            ckpt.main(argv)
    assert not (tmp_path / "x").exists()
