"""Hugging Face's weights at both ends of a run: exported, and loaded under another layout."""

import json
import re
from dataclasses import replace

import pytest
import torch

from tests.rounding import assert_rounds
from tests.runs import CHAIN, TINY, arguments, train
from tests.unit.test_from_hf import write_model
from torchtitan.checkpoint.format.manifest import read_manifest
from torchtitan.checkpoint.load import Reader, read_tensor
from torchtitan.commands import ckpt, generate
from torchtitan.config import resolve
from torchtitan.models import get_spec, register
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import CheckpointError


@pytest.mark.proof
def test_hf_export_loads_in_transformers_and_here(ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    extra = ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    run = ranks(2, train, arguments(tmp_path, *extra))[0]
    folder = tmp_path / "out/checkpoint/step-4-hf"
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {
        p.name for p in folder.iterdir()
    }
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    argv = arguments(tmp_path)
    setup = preflight(resolve(argv, 1).config)
    from torchtitan.models.attention.backend import attention_backend

    ours = setup.spec.build(setup.args, attention_backend("cpu"))
    ours.load_state_dict(run["weights"])
    tokens = torch.randint(0, 2048, (2, 32))
    with torch.no_grad():
        assert_rounds(ours(tokens), theirs(tokens).logits, terms=96, chain=24)
    about = {"eos_token_id": [1, 7], "top_k": 5, "transformers_version": "5"}
    (folder / "generation_config.json").write_text(json.dumps(about))
    back = [
        "--checkpoint.enable",
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={folder}",
        f"--job.dump_folder={tmp_path / 'back'}",
    ]
    again = ranks(2, train, arguments(tmp_path, *back, steps=1))[0]
    for name, weight in run["weights"].items():
        assert torch.equal(again["initial"][name], weight), name
    manifest = read_manifest(tmp_path / "back/checkpoint/step-1")
    assert (manifest.ends, manifest.generation) == ([1, 7], {"top_k": 5})


@pytest.mark.slow
def test_from_their_folder_to_their_folder(ranks, tmp_path, capsys):
    """What transformers saved is converted, trained, generates, is exported, and read by it."""
    transformers = pytest.importorskip("transformers")
    source = tmp_path / "hf"
    write_model(source, "llama3", tie_embeddings=True, **TINY)
    assert ckpt.main(["from-hf", str(source), str(tmp_path / "ours")]) == 0
    flags = ["--checkpoint.last_save_in_hf", f"--config={tmp_path / 'ours/train.toml'}"]
    run = ranks(1, train, arguments(tmp_path, *flags, steps=10))[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(run["initial"]["tok_embeddings.weight"], theirs.lm_head.weight)
    assert run["metrics"][-1]["loss"] < run["metrics"][0]["loss"] - 1

    folder = tmp_path / "out/checkpoint/step-10-hf"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("def main(", return_tensors="pt")
    expected = theirs.generate(**prompt, do_sample=False, max_new_tokens=8)[0].tolist()
    for place in (folder, tmp_path / "out"):
        capsys.readouterr()
        argv = ["--prompt=def main(", "--temperature=0", "--max-new-tokens=8", "--json"]
        assert generate.main([f"--checkpoint={place}", *argv]) == 0
        said = json.loads(capsys.readouterr().out)["continuations"][0]
        assert said["text"] == tokenizer.decode(expected[len(prompt["input_ids"][0]) :])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts", [["one process", "pp 2 x dp_shard 2"], [*CHAIN]], ids=["two", "all"]
)
def test_hugging_face_weights_go_in_and_out_of_layouts(ranks, tmp_path, layouts):
    """Exported under pipeline and tensor parallelism, and loaded under others."""
    out = ["--checkpoint.enable", "--checkpoint.last_save_in_hf", "--model.overrides.n_layers=4"]
    layout = CHAIN["pp 2 x tp 2"][1]
    run = ranks(4, train, arguments(tmp_path, *out, *layout, steps=2, local_batch=4))[0]
    folder = tmp_path / "out/checkpoint/step-2-hf"
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 4
    for i, (world, layout) in enumerate(CHAIN[name] for name in layouts):
        back = [
            "--checkpoint.enable",
            "--checkpoint.initial_load_in_hf",
            "--model.overrides.n_layers=4",
            *layout,
        ]
        more = [
            f"--checkpoint.initial_load_path={folder}",
            f"--job.dump_folder={tmp_path / str(i)}",
        ]
        again = ranks(
            world, train, arguments(tmp_path, *back, *more, steps=1, local_batch=4), timeout=100
        )[0]
        for name, weight in run["weights"].items():
            assert torch.equal(again["initial"][name], weight), name


DEEPSEEK = [
    "--model.name=deepseek_v3",
    *(
        f"--model.overrides.{key}={value}"
        for key, value in {
            "n_kv_heads": 4,
            "head_size": 24,
            "kv_lora_rank": 16,
            "q_lora_rank": 0,
            "rope_head_size": 8,
            "value_head_size": 16,
            "expert_dim": 16,
            "shared_expert_dim": 16,
        }.items()
    ),
    "--moe.balance_bias_rate=0.013",
]


def test_the_bias_of_routers_is_fp32_wherever_it_goes(ranks, tmp_path):
    """From the run to checkpoints, averages and exports in bfloat16, and back."""
    pytest.importorskip("transformers")
    flags = [
        *("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.last_save_in_hf"),
        *("--checkpoint.export_dtype=bfloat16", "--ema.enable", "--ema.export"),
    ]
    run = ranks(2, train, arguments(tmp_path, *DEEPSEEK, *flags))[0]["weights"]
    biases = {name: value for name, value in run.items() if name.endswith("expert_bias")}
    for value in biases.values():
        assert (value != value.bfloat16().float()).any(), "bfloat16 would lose nothing"
    step = tmp_path / "out/checkpoint/step-4"
    ckpt.main(["from-hf", f"{step}-hf", str(tmp_path / "back")])
    folders = [step, tmp_path / "back/step-0"]
    for name, value in biases.items():
        for folder in folders:
            stored = read_tensor(Reader(folder), f"model.{name}")
            assert stored.dtype == torch.float32
            assert torch.equal(stored, value), folder
    weight = read_tensor(Reader(folders[-1]), "model.layers.1.moe.experts.w1")
    average = read_tensor(Reader(step), "ema.layers.1.moe.experts.w1")
    assert torch.equal(weight, average.bfloat16())
    back = [
        "--checkpoint.enable",
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={step}-hf",
        f"--job.dump_folder={tmp_path / 'again'}",
    ]
    again = ranks(2, train, arguments(tmp_path, *DEEPSEEK, *back, steps=1))[0]
    for name, value in biases.items():
        assert torch.equal(again["initial"][name], value), name


def train_with_swapped_names(argv):
    """A run whose export gives queries and keys each other's names."""
    llama = get_spec("llama3")

    def names(args):
        own = llama.hf.names(args)
        other = {"wq": "wk", "wk": "wq"}
        return {name: own[re.sub(r"w[qk]\b", lambda found: other[found[0]], name)] for name in own}

    register(replace(llama, hf=replace(llama.hf, names=names)))
    try:
        return train(argv)
    except CheckpointError as error:
        return str(error)
    finally:
        register(llama)


def test_a_wrong_export_at_the_end_of_a_run_is_deleted(ranks, tmp_path):
    pytest.importorskip("transformers")
    extra = [
        "--checkpoint.enable",
        "--checkpoint.last_save_in_hf",
        "--model.overrides.n_kv_heads=4",
    ]
    for text in ranks(2, train_with_swapped_names, arguments(tmp_path, *extra, steps=2)):
        assert text.startswith(
            "can't export to Hugging Face: rank 0: transformers computes other logits"
        )
    assert [path.name for path in (tmp_path / "out/checkpoint").iterdir()] == ["step-2"]
