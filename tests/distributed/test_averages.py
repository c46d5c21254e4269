"""What the tools do with averages of weights, on checkpoints of a small mixture of experts."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.checkpoints import change
from tests.doc_blocks import ROOT
from tests.runs import EXPERTS, arguments, train, weights
from torchtitan.checkpoint.format.manifest import read_manifest
from torchtitan.checkpoint.load import Reader, without_dist_warning
from torchtitan.commands import ckpt
from torchtitan.inference import load as sources
from torchtitan.models import get_spec
from torchtitan.train.trained_model import load_probe
from torchtitan.utils.errors import UserError

FLAGS = [*EXPERTS, "--checkpoint.enable", "--checkpoint.interval=1", "--lr_scheduler.total_steps=3"]
AVERAGE = ["--ema.enable", "--ema.decay=0.5", "--moe.balance_bias_rate=0"]


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


def test_the_mean_of_exports_starts_a_run(steps, tmp_path):
    """As docs/guides/weight-averages.md does it."""
    exports = [str(tmp_path / step.name) for step in steps[1:]]
    for step, export in zip(steps[1:], exports, strict=True):
        ckpt.main(["to-hf", str(step), export, "--no-check"])
    example = str(ROOT / "tests/examples/mean.py")
    subprocess.run([sys.executable, example, str(tmp_path / "merged"), *exports], check=True)
    ckpt.main(["from-hf", str(tmp_path / "merged"), str(tmp_path / "started")])
    first, last = map(tensors, steps[1:])
    for name, value in tensors(tmp_path / "started/step-0").items():
        mean = (first[name].double() + last[name].double()) / 2
        counts = not value.is_floating_point()  # which exports don't have
        assert counts or torch.equal(value, mean.float()), name


def test_merged_weights_of_earlier_versions_are_read(steps, tmp_path):
    merged = shutil.copytree(steps[1], tmp_path / "step-2")
    source = {"checkpoint": "a/step-1", "step": 1, "averaged": False, "weight": 1.0}
    change(merged, merged=[source])
    assert read_manifest(merged).merged == [source]


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
