"""Weights that Hugging Face arranges otherwise than we do, and quantized ones: read and written.

The references are plain expressions of torch, transformers' own conversion, and a loop over blocks.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import families
from tests.packed_model import WIDE, E, Packed, names, theirs
from torchtitan.checkpoint.commit import versions
from torchtitan.checkpoint.format.manifest import CheckpointInfo
from torchtitan.checkpoint.hf.export import HFExport
from torchtitan.checkpoint.hf.folder import SafetensorsReader
from torchtitan.checkpoint.hf.opening import open_hf
from torchtitan.checkpoint.hf.weights import import_hf, load_hf
from torchtitan.checkpoint.load import Reader, read_tensor
from torchtitan.checkpoint.save import write_streamed
from torchtitan.commands import ckpt
from torchtitan.models import get_spec, parameter_names, register
from torchtitan.models import spec as models_spec
from torchtitan.models.hf_names import HFSlice
from torchtitan.utils.errors import CheckpointError, ConfigError


@pytest.fixture
def spec():
    llama = get_spec("llama3")
    args = next(iter(llama.flavors.values()))
    made = replace(llama.hf, model_type="packed", names=names, ignored=("mtp.*",))
    made = replace(made, args=lambda config: args, config=lambda args, dtype: {"dtype": dtype})
    yield register(replace(llama, name="packed", build=Packed, hf=made))
    del models_spec._families._entries["packed"]


def checkpoint(folder, model, dtype):
    """`folder/step-0` of a model; parameters in `dtype`."""
    parameters = dict(model.named_parameters())
    state = {n: x.to(dtype) if n in parameters else x for n, x in model.state_dict().items()}
    shapes = {name: value.to("meta") for name, value in state.items()}
    read = lambda key, box: state[key.removeprefix("model.")][box].detach().clone()  # noqa: E731
    write_streamed(folder / "step-0", info(model), {"model": shapes}, read, max_bytes=200)
    return state


def info(model):
    about = {"name": "packed", **model.args.model_dump()}
    return CheckpointInfo(
        step=0,
        model_only=True,
        versions=versions(),
        model=about,
        data={},
        config="",
        train_state=None,
    )


def made(spec):
    torch.manual_seed(0)
    model = Packed(next(iter(spec.flavors.values())), None)
    model.bias.copy_(torch.tensor([7.0039, -2.0001, 0.5, 3.00001]))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_arrangement_goes_both_ways(tmp_path, spec, dtype):
    model = made(spec)
    state = checkpoint(tmp_path, model, dtype)
    export = HFExport(tmp_path / "step-0", tmp_path / "hf", spec, model.args, None, None, 500)
    export.write()
    files = [load_file(file) for file in (tmp_path / "hf").glob("*.safetensors")]
    assert len(files) > 2
    written = {name: value for file in files for name, value in file.items()}
    expected = theirs(state)
    assert written.keys() == expected.keys()
    for name, value in written.items():
        assert torch.equal(value, expected[name]), name
    assert written["e_score_correction_bias"].dtype == torch.float32
    assert written["qkv"].dtype == dtype
    source = open_hf(tmp_path / "hf", spec)
    assert source.notes == []
    count = import_hf(source, tmp_path / "back/step-0", info(model))
    assert count == sum(param.numel() for param in model.parameters())
    for name, value in state.items():
        back = read_tensor(Reader(tmp_path / "back/step-0"), f"model.{name}")
        assert back.dtype == value.dtype
        assert torch.equal(back, value if name != "load" else torch.zeros_like(value)), name
    again = Packed(model.args, None)
    load_hf([again], tmp_path / "hf", spec, model.args)
    for name, value in state.items():
        assert torch.equal(again.state_dict()[name].to(value.dtype), value), name


def test_a_buffer_is_no_parameter(spec):
    args = next(iter(spec.flavors.values()))
    assert set(parameter_names(spec, args)) == {n for n, _ in made(spec).named_parameters()}


def test_boxes_are_slices(tmp_path, spec):
    model = made(spec)
    save_file(
        {n: x.detach().clone().contiguous() for n, x in theirs(model.state_dict()).items()},
        tmp_path / "model.safetensors",
    )
    reader = SafetensorsReader(tmp_path, names(model.args))
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        for _ in range(20):
            ends = [
                torch.randint(0, n + 1, (2,), generator=generator).sort()[0].tolist()
                for n in value.shape
            ]
            box = tuple(slice(*end) for end in ends)
            assert torch.equal(reader.read(name, box), value[box]), (name, box)


def test_only_what_is_declared_may_be_left_over(tmp_path, spec):
    model = made(spec)
    found = {n: x.detach().clone().contiguous() for n, x in theirs(model.state_dict()).items()}
    del found["layers.9.embed"], found["layers.9.head"]  # copies aren't needed
    (tmp_path / "config.json").write_text("{}")

    def opened(**changes):
        save_file(found | changes, tmp_path / "model.safetensors")
        return open_hf(tmp_path, spec)

    notes = ["Not read, because the model has no place for it: mtp.norm"]
    assert opened(**{"mtp.norm": torch.ones(2)}).notes == notes
    with pytest.raises(CheckpointError, match=r"mtq\.norm is unknown"):
        opened(**{"mtq.norm": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"layers\.9\.head is not embed"):
        opened(**{"layers.9.head": found["embed"] + 1})
    del found["e_score_correction_bias"]
    with pytest.raises(CheckpointError, match="e_score_correction_bias is missing"):
        opened()


# ---- quantized

TINY_MODELS = Path(__file__).parents[1] / "assets/tiny_models"

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def quantized_folder(folder, config, tensors):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


@pytest.mark.parametrize("kind", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_blocks(tmp_path, kind):
    """The last blocks are ragged, as in V3's `kv_a_proj_with_mqa`."""
    torch.manual_seed(0)
    weight = (torch.randn(300, 200) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2).add(0.01).to(kind)
    names = {"w": "a.weight"}
    quantized_folder(tmp_path, FP8, {"a.weight": weight, "a.weight_scale_inv": scale})
    expected = weight.float()
    for i in range(3):
        for j in range(2):
            block = expected[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            block *= scale[i, j].float()
    expected = expected.bfloat16()
    reader = SafetensorsReader(tmp_path, names)
    assert torch.equal(reader.read("w"), expected)
    for box in ((slice(100, 290), slice(127, 129)), (slice(128, 129), slice(0, 200))):
        assert torch.equal(reader.read("w", box), expected[box])


def test_mxfp4_is_transformers_own(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (E, 2 * WIDE, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (E, 2 * WIDE, 3), dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert expected.shape == (E, 96, 2 * WIDE)
    quantized_folder(
        tmp_path, {"quant_method": "mxfp4"}, {"up_blocks": blocks, "up_scales": scales}
    )
    parts = {"of": 2, "dim": 2, "transposed": True}
    names = {"w1": HFSlice("up", take=(0, 1), **parts), "w3": HFSlice("up", take=(1, 2), **parts)}
    reader = SafetensorsReader(tmp_path, names)
    assert reader.problems({"w1": (E, WIDE, 96), "w3": (E, WIDE, 96)}) == []
    for name, first in (("w1", 0), ("w3", 1)):
        own = expected[..., first::2].mT
        assert torch.equal(reader.read(name), own)
        box = (slice(1, 3), slice(2, 9), slice(31, 65))
        assert torch.equal(reader.read(name, box), own[box])


def test_gpt_oss_in_mxfp4_is_converted(tmp_path, capsys):
    """Its export holds the values that transformers' conversion gives."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    config = json.loads((TINY_MODELS / "gpt-oss.json").read_text()) | {"intermediate_size": 32}
    families.random_twin(config, attn_implementation="eager").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    stored = {name: value.bfloat16() for name, value in load_file(file).items()}
    expected = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 124, (experts, rows, inner // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = mxfp4.convert_moe_packed_tensors(blocks, scales)
    save_file(stored, file)
    about = json.loads((tmp_path / "hf/config.json").read_text())
    about["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "hf/config.json").write_text(json.dumps(about))
    ckpt.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "ours")])
    assert "Dequantized from mxfp4 to bfloat16" in capsys.readouterr().out
    ckpt.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back")])
    assert "Largest logit difference to transformers" in capsys.readouterr().out
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == expected.keys()
    for name, value in back.items():
        assert torch.equal(value, expected[name]), name


W8 = torch.ones(130, 4).to(torch.float8_e4m3fn)
UNSOUND = {
    "no scale": (FP8, {"a.weight": W8}, "a.weight is fp8 and has no a.weight_scale_inv"),
    "few scales": (
        FP8,
        {"a.weight": W8, "a.weight_scale_inv": torch.ones(1, 1)},
        r"a.weight_scale_inv is \[1, 1\], should be \[2, 1\]",
    ),
    "unannounced fp8": (
        None,
        {"a.weight": W8, "a.weight_scale_inv": torch.ones(2, 1)},
        'config.json has no quantization_config of quant_method "fp8"',
    ),
    "unannounced mxfp4": (
        None,
        {"a_blocks": torch.ones(2, 3, 16, dtype=torch.uint8)},
        'config.json has no quantization_config of quant_method "mxfp4"',
    ),
    "no exponents": (
        {"quant_method": "mxfp4"},
        {"a_blocks": torch.ones(2, 3, 16, dtype=torch.uint8)},
        "a_blocks has no a_scales",
    ),
    "other exponents": (
        {"quant_method": "mxfp4"},
        {"a_blocks": torch.ones(2, 3, 16, dtype=torch.uint8), "a_scales": torch.ones(2, 3)},
        "a_blocks is .* with scales .* of F32, should be",
    ),
    "int4": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
        },
        {"a": torch.ones(2)},
        "INT4 weights of quant_method 'compressed-tensors' can't be read. .* bfloat16",
    ),
    "a float8 of tensors": (
        FP8 | {"weight_block_size": None},
        {"a": torch.ones(2)},
        "fp8 with weight_block_size None can't be read",
    ),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_what_cannot_be_dequantized_is_said(tmp_path, case):
    config, tensors, message = UNSOUND[case]
    quantized_folder(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsReader(tmp_path, {"w": "a.weight"})


def test_int4_is_refused_by_the_configuration():
    llama = get_spec("llama3")
    config = llama.hf.config(llama.flavors["debugmodel"], "bfloat16")
    assert llama.hf.args(config | {"quantization_config": FP8}) == llama.flavors["debugmodel"]
    for case in ("int4", "a float8 of tensors"):
        quantization, _, message = UNSOUND[case]
        with pytest.raises(ConfigError, match=f"config.json: quantization_config: {message}"):
            llama.hf.args(config | {"quantization_config": quantization})
