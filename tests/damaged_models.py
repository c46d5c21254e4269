"""Folders of Hugging Face models, and what damage does to their weights and configurations."""

import json
import os
import pickle
import shutil
import struct

import torch
from safetensors.torch import load_file, save_file

from torchtitan.models import get_spec

CONFIG = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
DEEP = "[" * 100_000
LAST = "model.layers.1.mlp.down_proj.weight"


def write_model(folder, family, config):
    """A whole model, in one file."""
    spec = get_spec(family)
    args = spec.hf.args(config)
    torch.manual_seed(0)
    found = {}
    weights = dict(spec.build(args, None).named_parameters())
    for ours, theirs in spec.hf.names(args).items():
        weight = weights[ours].detach().normal_()
        found |= (
            {theirs: weight}
            if isinstance(theirs, str)
            else dict(zip(theirs, weight.clone(), strict=True))
        )
    save_file(
        {name: weight.clone() for name, weight in found.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))


def weights(content):
    """Damage that replaces the safetensors, by bytes or by what a function makes of them."""

    def damage(folder):
        file = folder / "model.safetensors"
        file.write_bytes(content(file.read_bytes()) if callable(content) else content)

    return damage


def header(change, **entry):
    """Damage to the header: `change` of the whole, or new values in the entry of one tensor."""

    def damage(content):
        length = struct.unpack("<Q", content[:8])[0]
        names = json.loads(content[8 : 8 + length])
        change(names)
        names[LAST] |= entry
        text = json.dumps(names).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return weights(damage)


def entry(**values):
    return header(lambda names: None, **values)


def tensors(change):
    def damage(folder):
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return damage


def linked(name, target):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def pipe(name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def text(name, content):
    def damage(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def config(**changes):
    return text("config.json", json.dumps(CONFIG | changes))


def index(content):
    return text(
        "model.safetensors.index.json", content if isinstance(content, str) else json.dumps(content)
    )


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


class Gadget:
    def __reduce__(self):
        return os.system, ("touch ran",)


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Gadget()))


def twice(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")


def poison(value):
    def change(found):
        found[LAST].view(-1)[7] = value

    return tensors(change)


SHARDS = {"__metadata__": {"DCP_SHARDING_INFO": DEEP}}
WEIGHTS = {
    "cut in the data": (
        weights(lambda b: b[:-5]),
        "model.safetensors is damaged, or not safetensors",
    ),
    "huge header": (
        weights(lambda b: struct.pack("<Q", 2**60) + b[8:]),
        "model.safetensors is damaged",
    ),
    "a pickle": (weights(pickle.dumps(Gadget())), "model.safetensors is damaged"),
    "overlap": (entry(data_offsets=[0, 2048]), "model.safetensors is damaged"),
    "huge shape": (entry(shape=[2**40, 2**40]), "model.safetensors is damaged"),
    "integers": (entry(dtype="I32"), f"{LAST} has dtype I32, must be one of F64"),
    "shards": (header(lambda names: names.update(SHARDS)), "consolidate them into whole tensors"),
    "zeros": (linked("model.safetensors", "/dev/zero"), "model.safetensors: not a regular file"),
    "dangling": (linked("model.safetensors", "nowhere"), "model.safetensors: No such file"),
    "pipe": (pipe("model.safetensors"), "model.safetensors: not a regular file"),
    "pointer": (
        text("model.safetensors", POINTER),
        "model.safetensors: a pointer of git-lfs, not the file: run `git lfs pull`",
    ),
    "pickles": (
        pickled,
        "pytorch_model.bin: a pickle, which runs code when it is read. If you trust it, convert it",
    ),
    "in two files": (twice, "is in two files"),
    "one missing": (tensors(lambda found: found.pop(LAST)), f"{LAST} is missing"),
    "transposed": (
        tensors(lambda f: f.update({LAST: f[LAST].T.contiguous()})),
        f"{LAST} is .32, 16., ",
    ),
    "nan": (poison(float("nan")), f"model.safetensors: {LAST} holds NaN or infinity"),
    "index of numbers": (
        index({"weight_map": {"a": 5}}),
        "model.safetensors.index.json: weight_map.a: ",
    ),
    "index elsewhere": (
        index({"weight_map": {"a": "../model.safetensors"}}),
        "must name .safetensors files beside it",
    ),
    "index of pickles": (
        index({"weight_map": {"a": "pytorch_model.bin"}}),
        "must name .safetensors files beside it",
    ),
    "index of others": (index({"weight_map": {"a": "x.safetensors"}}), "holds two models: model.s"),
    "deep index": (index(DEEP), "index.json is nested too deeply"),
    "index of zeros": (
        linked("model.safetensors.index.json", "/dev/zero"),
        "index.json: not a regular file",
    ),
}
CONFIGS = {
    "garbage": (text("config.json", "garbage"), "config.json is not valid JSON"),
    "empty": (text("config.json", ""), "config.json is not valid JSON"),
    "not UTF-8": (
        text("config.json", b"\xff\xfe{}"),
        "config.json is not valid JSON: .*it is UTF-16; save it as UTF-8",
    ),
    "list": (text("config.json", "[]"), "config.json is not a JSON object"),
    "deep": (text("config.json", DEEP), "config.json is nested too deeply"),
    "digits": (
        text("config.json", f'{{"vocab_size": {"9" * 5000}}}'),
        "config.json is not valid JSON",
    ),
    "no model": (text("config.json", "{}"), "config.json: model_type is missing"),
    "rope list": (config(rope_scaling=[1, 2]), "config.json: rope_scaling: got .1, 2."),
    "rope text": (config(rope_parameters="llama3"), "config.json: rope_parameters: got 'llama3'"),
    "rope type": (
        config(rope_scaling={"rope_type": 5}),
        "config.json: rope_scaling.rope_type: got 5",
    ),
    "rope factor": (
        config(rope_scaling={"rope_type": "llama3", "factor": "8"}),
        "rope_scaling.factor: got '8'",
    ),
    "theta": (config(rope_theta=-1.0), "config.json: rope_theta: got -1.0"),
    "epsilon": (config(rms_norm_eps=float("nan")), "config.json: rms_norm_eps: got nan"),
    "many layers": (config(num_hidden_layers=10**5), "num_hidden_layers|is missing"),
    "no layers": (config(num_hidden_layers=-1), "config.json: num_hidden_layers: got -1"),
    "layers in words": (
        config(num_hidden_layers="x"),
        "config.json: num_hidden_layers: got 'x', must be an integer",
    ),
    "no vocabulary": (config(vocab_size=0), "config.json: vocab_size: got 0"),
    "large vocabulary": (config(vocab_size=2**31), "vocab_size|should be"),
    "no heads": (config(num_attention_heads=0), "config.json: num_attention_heads: got 0"),
    "odd heads": (
        config(num_attention_heads=3),
        "hidden_size 16 must be num_attention_heads 3 times",
    ),
    "true": (config(hidden_size=True), "config.json: hidden_size: got True, must be an integer"),
    "null": (config(hidden_size=None), "config.json: hidden_size: got None"),
    "tied": (
        config(tie_word_embeddings="yes"),
        "config.json: tie_word_embeddings: got 'yes', must be true or false",
    ),
}


EXPERT = "model.layers.1.mlp.experts.5.gate_proj.weight"
FIRST = EXPERT.replace("5", "0")
MORE = EXPERT.replace("5", "8")
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
EXPERTS = {
    "missing": (tensors(lambda f: f.pop(EXPERT)), f"{EXPERT} is missing"),
    "unknown": (tensors(lambda f: f.update({MORE: f[EXPERT] + 0})), f"{MORE} is unknown"),
    "shape": (
        tensors(lambda f: f.update({EXPERT: f[EXPERT].T.contiguous()})),
        f"{EXPERT} is .16, 24., should be",
    ),
    "type": (
        tensors(lambda f: f.update({EXPERT: f[EXPERT].half()})),
        f"{EXPERT} has dtype F16, {FIRST} .* stack F32",
    ),
    "nan": (
        tensors(lambda f: f[EXPERT].view(-1)[3:4].fill_(torch.nan)),
        f"{EXPERT} holds NaN or infinity",
    ),
    "fused": (
        tensors(lambda f: f.update({FUSED: f.pop(FIRST)})),
        f"{FIRST} is missing; {FUSED} is unknown",
    ),
}
