"""`torchtitan ckpt merge`, and what else the tools do with averages, on checkpoints of a small
mixture of experts.
"""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.checkpoints import change
from tests.runs import EXPERTS, arguments, train, weights
from torchtitan.checkpoint import merge as module
from torchtitan.checkpoint.format.manifest import read_manifest
from torchtitan.checkpoint.load import Reader, read_tensor, without_dist_warning
from torchtitan.commands import ckpt
from torchtitan.inference import load as sources
from torchtitan.models import get_spec
from torchtitan.train.trained_model import load_probe
from torchtitan.utils.errors import CheckpointError, UserError

FLAGS = [*EXPERTS, "--checkpoint.enable", "--checkpoint.interval=1", "--lr_scheduler.total_steps=3"]
AVERAGE = ["--ema.enable", "--ema.decay=0.5", "--moe.balance_bias_rate=0"]
LOAD = "model.layers.0.moe.router.load"


@pytest.fixture(scope="module")
def steps(ranks, tmp_path_factory):
    """Checkpoints of steps 1, 2 and 3, each with an average."""
    folder = tmp_path_factory.mktemp("run")
    ranks(2, train, arguments(folder, *FLAGS, *AVERAGE, steps=3))
    return [folder / f"out/checkpoint/step-{step}" for step in (1, 2, 3)]


def tensors(step, part="model"):
    """All tensors of a part, as DCP reads them by its own metadata."""
    reader = Reader(step)
    about = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(x.size, dtype=x.properties.dtype)
        for key, x in about.items()
        if key.startswith(f"{part}.")
    }
    with without_dist_warning():
        dcp.load(state, checkpoint_id=step, no_dist=True)
    return {key.removeprefix(f"{part}."): value for key, value in state.items()}


def test_merge_is_the_mean(steps, ranks, tmp_path, capsys):
    parts = [tensors(step) for step in steps]
    merged = tmp_path / "merged"
    assert (
        ckpt.main(["merge", *map(str, steps), "--output", str(merged), "--weights", "1", "2", "5"])
        == 0
    )
    found = tensors(merged)
    assert found.keys() == parts[0].keys()
    for name, value in found.items():
        if f"model.{name}" == LOAD:
            assert torch.equal(value, parts[-1][name]), "counts are those of the newest"
        elif value.dtype == torch.float32:
            mean = np.average(
                [part[name].double().numpy() for part in parts], axis=0, weights=[1, 2, 5]
            )
            np.testing.assert_array_max_ulp(value.numpy(), mean.astype(np.float32), maxulp=1)
    assert ckpt.main(["verify", str(merged)]) == 0
    manifest = read_manifest(merged)
    assert manifest.model_only
    assert [(m.step, m.weight) for m in manifest.merged] == [(1, 0.125), (2, 0.25), (3, 0.625)]
    assert [m.checkpoint for m in manifest.merged] == list(map(str, steps))
    capsys.readouterr()
    ckpt.main(["inspect", str(merged)])
    assert f"0.625 x {steps[2]}" in capsys.readouterr().out

    other = tmp_path / "other"  # in another order
    ckpt.main(
        ["merge", *map(str, reversed(steps)), "--output", str(other), "--weights", "5", "2", "1"]
    )
    assert ckpt.main(["diff", str(merged), str(other)]) == 0

    with pytest.raises(
        UserError, match="no average of the weights: its weights are merged; leave --ema out"
    ):
        sources.find(str(merged), averaged=True)
    source = sources.find(str(merged))
    model = sources.load(source, sources.open_tokenizer(source, None), 16, 1, None, 1).model
    for name, param in model.named_parameters():
        assert torch.equal(param, found[name]), name
    start = ["--checkpoint.enable", f"--checkpoint.initial_load_path={merged}"]
    argv = arguments(tmp_path, *EXPERTS, *start, steps=1)
    run = ranks(2, train, argv)[0]
    for name, weight in run["initial"].items():
        assert torch.equal(weight, found[name]), name
    ckpt.main(["to-hf", str(merged), str(tmp_path / "hf")])


def test_merge_of_averages_and_of_a_single_one(steps, tmp_path):
    ckpt.main(
        [
            "merge",
            str(steps[0]),
            str(steps[2]),
            "--ema",
            "--dtype",
            "bfloat16",
            "--output",
            str(tmp_path / "a"),
        ]
    )
    first = tensors(steps[0], "ema")
    last = tensors(steps[2], "ema")
    found = tensors(tmp_path / "a")
    for name, value in first.items():
        mean = (value.double() + last[name].double()) / 2
        assert torch.equal(found[name], mean.to(torch.bfloat16)), name
    ckpt.main(["merge", str(steps[2]), "--ema", "--output", str(tmp_path / "b")])
    single = tensors(tmp_path / "b")
    assert all(torch.equal(single[name], value) for name, value in last.items())
    assert single.keys() > last.keys(), "buffers too"


def loaded_average(step, *layout):
    """The weights that `eval --ema` loads."""
    source = sources.find(str(step), averaged=True)
    probe = load_probe(
        source, sources.open_tokenizer(source, None), list(layout), rows=2, dtype="float32"
    )
    return weights(probe.build(32, None).models)


def test_tools_take_the_average(steps, ranks, tmp_path):
    """`generate --ema`, `eval --ema` and `to-hf --ema`; the last also compares logits with
    transformers.
    """
    pytest.importorskip("transformers")
    expected = tensors(steps[2], "ema")
    source = sources.find(str(steps[2]), averaged=True)
    model = sources.load(source, sources.open_tokenizer(source, None), 16, 1, None, 1).model
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]), name
    found = ranks(2, loaded_average, steps[2], "--parallelism.pipeline_parallel_degree=2")[0]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    ckpt.main(["to-hf", str(steps[2]), str(tmp_path / "hf"), "--ema"])
    theirs = load_file(tmp_path / "hf/model.safetensors")
    for name, hf in get_spec("qwen3_moe").hf.names(source.args).items():
        own = theirs[hf] if isinstance(hf, str) else torch.stack([theirs[part] for part in hf])
        assert torch.equal(own, expected[name]), name
    with pytest.raises(
        UserError, match="is a Hugging Face model, which has only weights; leave --ema out"
    ):
        sources.find(str(tmp_path / "hf"), averaged=True)


def test_what_cannot_be_merged(steps, ranks, tmp_path, monkeypatch):
    first = str(steps[0])
    second = str(steps[1])
    smaller = ["--model.overrides.expert_dim=16", "--moe.balance_bias_rate=0"]
    ranks(1, train, arguments(tmp_path, *FLAGS, *smaller, steps=1))
    other = str(tmp_path / "out/checkpoint")
    damaged = shutil.copytree(steps[1], tmp_path / "damaged")
    (damaged / "__1_0.distcp").write_bytes(b"")
    tokenizer = shutil.copytree(steps[1], tmp_path / "tokenizer")
    change(tokenizer, data={"tokenizer": "another"})
    output = tmp_path / "merged"
    for argv, match in (
        ([first], "name two checkpoints or more"),
        ([first, first], "step-1 is named twice"),
        ([str(steps[2]), str(steps[2].parent)], "step-3 is named twice"),
        ([first, str(tmp_path / "nothing")], "nothing does not exist"),
        ([first, other], "is of another model than .*step-1: expert_dim is 16 instead of 32"),
        ([first, str(tokenizer)], "another tokenizer"),
        ([first, str(damaged)], "damaged is damaged: __1_0.distcp has 0 bytes"),
        ([first, second, "--weights", "1"], "--weights: got 1 for 2 checkpoints"),
        ([first, other, "--ema"], "--ema: .*step-1 has no average of the weights"),
    ):
        with pytest.raises(UserError, match=match):
            ckpt.main(["merge", *argv, "--output", str(output)])
    for weight in ("0", "-1", "nan", "inf", "1e-10", "much"):
        with pytest.raises(SystemExit):
            ckpt.main(["merge", first, second, "--output", str(output), f"--weights={weight}"])
    with pytest.raises(UserError, match=r"--output: .* exists; delete it"):
        ckpt.main(["merge", first, second, "--output", other])

    def read(reader, key):
        return (
            torch.full_like(read_tensor(reader, key), 1e38)
            if "tok_embeddings" in key
            else read_tensor(reader, key)
        )

    monkeypatch.setattr(module, "read_tensor", read)
    with pytest.raises(
        CheckpointError, match=r"tok_embeddings.weight: the mean holds NaN or infinity, in float16"
    ):
        ckpt.main(["merge", first, second, "--output", str(output), "--dtype", "float16"])
    assert not [path.name for path in tmp_path.iterdir() if "merged" in path.name], (
        "nothing half-written"
    )


def test_manifest_says_whether_there_is_an_average(steps, tmp_path):
    forged = shutil.copytree(steps[1], tmp_path / "step-2")
    content = json.loads((forged / "manifest.json").read_text())
    change(
        forged,
        tensor_bytes={
            part: sizes for part, sizes in content["tensor_bytes"].items() if part != "ema"
        },
    )
    with pytest.raises(UserError, match="train_state and tensor_bytes disagree about the average"):
        read_manifest(forged)
