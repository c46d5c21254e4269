"""Folders in Hugging Face's format: flavors, loading into any layout, and the memory that takes."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests import families, packed_model
from tests.hf_folders import SHIPPED
from tests.runs import full
from torchtitan.checkpoint.hf.convert import nearest_flavor
from torchtitan.checkpoint.hf.folder import SafetensorsReader
from torchtitan.checkpoint.hf.weights import load_hf
from torchtitan.commands import ckpt
from torchtitan.models import get_spec
from torchtitan.models.hf.config import effective_values
from torchtitan.models.moe.moe import Experts


@pytest.mark.parametrize("family", families.SIZES)
def test_config_json_gives_the_flavor(family):
    """In the format of transformers 4, which exports use, and of 5."""
    spec = get_spec(family)
    for flavor, args in spec.flavors.items():
        config = spec.hf.config(args, "bfloat16")
        assert effective_values(spec.hf.args(config)) == effective_values(args)
        for described in (args, spec.hf.args(config)):
            nearest, overrides = nearest_flavor(spec, described)
            assert overrides == {}, flavor
            length = {"max_seq_len": args.max_seq_len}
            assert spec.flavors[nearest].model_copy(update=length) == args, flavor
        transformers = pytest.importorskip("transformers")
        new = json.loads(transformers.AutoConfig.for_model(**config).to_json_string())
        assert "rope_parameters" in new
        assert effective_values(spec.hf.args(new)) == effective_values(args)


def load_sharded(folder, shape, placements):
    """This rank's part of the experts, from a folder and from the whole model."""
    mesh = init_device_mesh("cpu", shape)
    whole = families.build("qwen3_moe")
    model = families.build("qwen3_moe")
    for module in model.modules():
        if isinstance(module, Experts):
            for name, param in list(module.named_parameters()):
                empty = distribute_tensor(torch.zeros_like(param), mesh, placements)
                module.register_parameter(name, torch.nn.Parameter(empty))
    spec = get_spec("qwen3_moe")
    load_hf([whole], folder, spec, model.args)
    load_hf([model], folder, spec, model.args)
    expected = whole.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), expected[name]), name
    return {name: value for name, value in expected.items() if "expert_bias" not in name}


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((2,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ],
    ids=["experts", "uneven rows", "both", "experts twice"],
)
def test_experts_load_into_any_layout(ranks, tmp_path, shape, placements):
    torch.manual_seed(0)
    model = families.build("qwen3_moe")
    families.twin("qwen3_moe", model).save_pretrained(tmp_path)
    for loaded in ranks(math.prod(shape), load_sharded, tmp_path, shape, placements):
        for name, value in model.named_parameters():
            assert torch.equal(loaded[name], value), name


def test_llama_30_is_an_override_of_31(tmp_path):
    spec = get_spec("llama3")
    old = spec.flavors["8B"].model_copy(update={"rope_scaling": None})
    flavor, overrides = nearest_flavor(spec, old)
    assert (flavor, overrides) == ("8B", {"rope_scaling": "none"})
    assert spec.args(flavor, overrides) == old


MEASURE = """
import importlib.util, json, shutil, sys
from pathlib import Path
import torch
importlib.util.find_spec = lambda name: None  # without transformers, which takes the memory of the whole model
from torchtitan.checkpoint.hf.weights import load_hf
from torchtitan.checkpoint.state import read_weights
from torchtitan.models import get_spec
from torchtitan.checkpoint.hf import convert
from torchtitan.commands import ckpt

def status(key):
    return next(int(l.split()[1]) << 10 for l in Path("/proc/self/status").read_text().splitlines() if key in l)

def measure(name, action, *args):
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = status("VmRSS")
    assert action(*args) == 0 or action is not ckpt.main
    peaks[name] = status("VmHWM") - before

for folder in map(Path, sys.argv[1:]):  # the small model first: it loads all the modules
    source, new, back = (str(folder / name) for name in ("hf", "new", "back"))
    peaks = {}
    for argv in (
        ["from-hf", source, new],
        ["verify", new],
        ["to-hf", new, back, "--max-file-gb", "0.1"],
    ):
        measure(argv[0], ckpt.main, argv)
    spec = get_spec("qwen3_moe")
    model = spec.build(spec.hf.args(json.loads(Path(source, "config.json").read_text())), None)
    for param in model.parameters():
        torch.nn.init.zeros_(param)  # memory that nothing was written to doesn't count
    measure("load_hf", load_hf, [model], Path(source), spec, model.args)
    measure("resume", read_weights, [model], Path(new, "step-0"))
print(json.dumps(peaks))
"""  # noqa: E501


def write_hf(folder, layers):
    """Write a mixture of experts of `layers` in Hugging Face's format, two files; its weights."""
    spec = get_spec("qwen3_moe")
    sizes = {
        "vocab_size": 256,
        "dim": 256,
        "n_layers": layers,
        "n_heads": 4,
        "expert_dim": 512,
        "n_experts": 16,
    }
    args = spec.args("debugmodel", sizes | {"n_dense_layers": 1})
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in spec.build(args, None).named_parameters()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(spec.hf.config(args, "float32")))
    names = spec.hf.names(args)
    parts = {
        part: shapes[ours] if isinstance(theirs, str) else shapes[ours][1:]
        for ours, theirs in names.items()
        for part in ([theirs] if isinstance(theirs, str) else theirs)
    }
    weights = {name: torch.full(shape, i / 1e3) for i, (name, shape) in enumerate(parts.items())}
    for file in range(2):  # stacks are in both
        save_file(dict(list(weights.items())[file::2]), folder / f"model-{file}.safetensors")
    return weights


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    """Commands and loading need memory for a few stacks of experts; the model has dozens."""
    small = tmp_path / "small"
    large = tmp_path / "large"
    write_hf(small / "hf", layers=1)
    weights = write_hf(large / "hf", layers=8)
    size = sum(file.stat().st_size for file in (large / "hf").glob("*.safetensors"))
    assert size > 180e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large)],
        capture_output=True,
        text=True,
        # Freed stacks go back to the system at once: by default, malloc raises this threshold after
        # the first ones and keeps as many of the later ones as happen to fit between others.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)},
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert len(peaks) == 5
    for name, peak in peaks.items():
        assert peak < 60e6, f"{name} took {peak / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB"
    for file in (large / "back").glob("*.safetensors"):
        for name, weight in load_file(file).items():
            assert torch.equal(weight, weights.pop(name)), name
    assert not weights


def load_arranged(folder, expected, dim):
    """Every parameter, sharded along `dim` where it has one; True if all are as expected."""
    mesh = init_device_mesh("cpu", (2,))
    model = packed_model.Packed(None, None)
    for name, param in list(model.named_parameters()):
        shard = Shard(min(dim, param.dim() - 1))
        empty = distribute_tensor(torch.zeros_like(param), mesh, [shard])
        model.register_parameter(name, torch.nn.Parameter(empty))
    names = packed_model.names(None)
    state = {name: value for name, value in model.state_dict().items() if name in names}
    SafetensorsReader(folder, names).load(state)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), expected[name]), name
    return True


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_arranged_weights_load_into_shards(ranks, tmp_path, dim):
    """Interleaved, packed and transposed weights, of which each rank reads its part."""
    torch.manual_seed(0)
    model = packed_model.Packed(None, None)
    model.bias.uniform_()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    tensors = {n: x.clone().contiguous() for n, x in packed_model.theirs(expected).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert all(ranks(2, load_arranged, tmp_path, expected, dim))


def quantize(weight):
    """e4m3 and the scales of 128 x 128 blocks, by loops; and the bfloat16 they stand for."""
    blocks = [-(-size // 128) for size in weight.shape]
    scales = torch.empty(blocks)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    back = torch.empty(weight.shape, dtype=torch.bfloat16)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            place = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scales[i, j] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            back[place] = (values[place].float() * scales[i, j]).bfloat16()
    return values, scales, back


def test_an_fp8_model_is_read_whole_and_in_shards(ranks, tmp_path, capsys):
    """`from-hf`, `to-hf`, and a rank's shards of the same folder."""
    torch.manual_seed(0)
    model = families.build("qwen3_moe", vocab_size=2048, dim=192)
    source = tmp_path / "hf"
    families.twin("qwen3_moe", model).save_pretrained(source)
    for file in SHIPPED.glob("*.json"):
        shutil.copy(file, source)
    weights = load_file(source / "model.safetensors")
    expected = {}
    stored = {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            stored[name] = expected[name] = weight.bfloat16()
            continue
        stored[name], stored[f"{name}_scale_inv"], expected[name] = quantize(weight)
    save_file(stored, source / "model.safetensors")
    about = json.loads((source / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(about | {"quantization_config": fp8}))
    ckpt.main(["from-hf", str(source), str(tmp_path / "ours")])
    assert "Dequantized from fp8 to bfloat16" in capsys.readouterr().out
    ckpt.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back")])
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == expected.keys()
    for name, weight in back.items():
        assert torch.equal(weight, expected[name]), name
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    loaded = ranks(2, load_fp8, source, model.args)
    names = get_spec("qwen3_moe").hf.names(model.args)
    reader = SafetensorsReader(tmp_path / "back", names)
    for name in names:
        assert torch.equal(loaded[0][name].bfloat16(), reader.read(name)), name


def load_fp8(folder, args):
    """All parameters, loaded in shards of their second dimension, which cut through blocks."""
    mesh = init_device_mesh("cpu", (2,))
    spec = get_spec("qwen3_moe")
    model = spec.build(args, None)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            shard = Shard(min(1, param.dim() - 1))
            empty = distribute_tensor(torch.zeros_like(param), mesh, [shard])
            module.register_parameter(name, torch.nn.Parameter(empty))
    load_hf([model], folder, spec, args)
    return {name: full(param).detach() for name, param in model.named_parameters()}
