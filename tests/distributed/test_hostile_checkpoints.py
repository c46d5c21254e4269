"""A checkpoint made by a stranger, with right checksums throughout: nothing in it runs, whatever
reads it.
"""

import builtins
import functools
import importlib
import marshal
import operator
import os
import pickle
import shutil
import subprocess

import numpy as np
import pytest
import torch

from tests.checkpoints import (
    change,
    manifest,
    on_rank_0,
    replace,
    replace_tensors,
    save_steps,
    small_checkpointer,
)
from tests.runs import arguments, train
from torchtitan.commands import ckpt
from torchtitan.inference import load as sources
from torchtitan.models import get_spec
from torchtitan.utils.errors import CheckpointError, UserError
from torchtitan.utils.formats import safe_loads


class Call:
    """Pickled as a call of `function`, which may be a `Call` too."""

    def __init__(self, function, *args):
        self.function = function
        self.args = args

    def __reduce__(self):
        return self.function, self.args

    def __call__(self):
        raise AssertionError("only pickled")


CODE = marshal.dumps(compile("import os; os.mkdir(target)", "", "exec"))


def gadgets(target):
    """Pickles that make a folder or file called `target` when they are read."""
    in_os = Call(operator.attrgetter, "mkdir")
    function = Call(getattr, Call(importlib.import_module, "types"), "FunctionType")
    inner = pickle.dumps(Call(os.mkdir, target))
    calls = {
        "os.system": Call(os.system, f"mkdir {target}"),
        "subprocess": Call(subprocess.check_call, ["mkdir", target]),
        "eval": Call(eval, f"__import__('os').mkdir({target!r})"),
        "exec": Call(exec, f"import os; os.mkdir({target!r})"),
        "getattr of __import__": Call(
            Call(getattr, Call(builtins.__import__, "os"), "mkdir"), target
        ),
        "importlib": Call(Call(getattr, Call(importlib.import_module, "os"), "mkdir"), target),
        "partial": Call(Call(functools.partial, os.mkdir, target)),
        "attrgetter": Call(Call(in_os, Call(importlib.import_module, "os")), target),
        "methodcaller": Call(
            Call(operator.methodcaller, "mkdir", target), Call(importlib.import_module, "os")
        ),
        "FunctionType": Call(Call(function, Call(marshal.loads, CODE), {"target": target})),
        "pickle.loads": Call(pickle.loads, inner),
        "open": Call(open, target, "w"),
        "numpy": Call(np.memmap, target, "uint8", "w+", 0, (1,)),
        "torch": Call(torch.save, 0, target),
    }
    out = {name: pickle.dumps(call, 4) for name, call in calls.items()}
    names = [
        "torch.distributed.checkpoint.metadata",
        "os.mkdir",
        target,
    ]  # protocol 4 follows the dots
    module, function, argument = (b"\x8c" + bytes([len(name)]) + name.encode() for name in names)
    return out | {"dotted name": b"\x80\x04" + module + function + b"\x93" + argument + b"\x85R."}


NAMES = list(gadgets("/x"))


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    ranks(2, train, arguments(folder, "--checkpoint.enable", steps=1))
    return folder / "out/checkpoint"


def forge(step, gadget):
    """Put a gadget into both kinds of files that are pickles."""
    replace(step, ".metadata", gadget)
    replace_tensors(step, gadget)


def doors(step):
    """Everything that opens a checkpoint without a run."""
    yield ckpt.main, ["inspect", str(step)]
    yield ckpt.main, ["verify", str(step)]
    yield ckpt.main, ["to-hf", str(step), str(step.parent / "hf"), "--no-check"]
    yield generate, step


def generate(step):
    source = sources.find(str(step))
    sources.load(source, sources.open_tokenizer(source, None), 16, 1, None, 1)


@pytest.mark.parametrize("name", NAMES)
def test_no_tool_runs_what_a_checkpoint_holds(run, tmp_path, name):
    target = tmp_path / "ran"
    gadget = gadgets(str(target))[name]
    pickle.loads(gadget)
    assert target.exists(), "the gadget works"
    target.rmdir() if target.is_dir() else target.unlink()
    step = shutil.copytree(run / "step-1", tmp_path / "step-1")
    forge(step, gadget)
    refused = []
    for door, argument in doors(step):
        try:
            door(argument)
        except UserError as error:
            refused.append(str(error))
    assert not target.exists()
    assert len(refused) == 2, "to-hf and generate read tensors"
    assert all(str(step) in text and "\n" not in text for text in refused)
    with pytest.raises(
        ValueError, match="which reading it would run"
    ):  # as those of Flight Recorder are read
        safe_loads(gadget)
    assert not target.exists()


def test_only_the_index_is_read(run, tmp_path):
    """DCP's own metadata are for other programs."""
    step = shutil.copytree(run / "step-1", tmp_path / "step-1")
    replace(step, ".metadata", gadgets(str(tmp_path / "ran"))["os.system"])
    for door, argument in doors(step):
        assert not door(argument)
    assert not (tmp_path / "ran").exists()


def resume_each(folder):
    """Resume from, and start from, a checkpoint with each gadget; what is said of it, and whether
    it ran.
    """
    on_rank_0(shutil.rmtree, folder, True)
    save_steps(folder / "good", 1)
    out = {}
    for name in NAMES:
        forged = folder / name.replace(" ", "-")
        target = folder / f"ran-{name}"
        on_rank_0(shutil.copytree, folder / "good", forged)
        on_rank_0(forge, forged / "step-1", gadgets(str(target))[name])
        checkpointer = small_checkpointer(forged, load_only=True)
        for door in (checkpointer.resume, lambda: checkpointer.load_initial(forged / "step-1")):  # noqa: B023
            try:
                door()
            except CheckpointError as error:
                out.setdefault(name, []).append(str(error))
        assert not target.exists(), name
    return out


def test_no_run_starts_from_what_a_checkpoint_holds(ranks, tmp_path):
    for refused in ranks(2, resume_each, tmp_path / "all"):
        assert refused.keys() == set(NAMES)
        for resumed, initial in refused.values():
            assert "no checkpoint can be resumed" in resumed
            assert initial.startswith("checkpoint.initial_load_path: ")
            assert "can't be read" in initial


def test_only_the_user_names_modules_to_import(run, tmp_path, monkeypatch):
    """A checkpoint names the module that registers its model, and could lie in the folder with
    it.
    """
    (tmp_path / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    step = shutil.copytree(run / "step-1", tmp_path / "step-1")
    config = '[experimental]\ncustom_import = "evil"\n'
    change(step, model=manifest(step)["model"] | {"name": "theirs"}, config=config)
    ckpt.main(["inspect", str(step)])
    for door in (
        lambda: sources.find(str(step)),
        lambda: ckpt.main(["to-hf", str(step), str(tmp_path / "hf")]),
    ):
        with pytest.raises(UserError, match=r"if you trust .*--custom-import 'evil'"):
            door()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="no model family 'theirs'"):
        sources.find(str(step), "evil")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["a = [[[", "checkpoint = 1", "[checkpoint]\nfolder = 1"])
def test_a_runs_folder_with_a_bad_configuration(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UserError, match=r"config\.toml"):
        sources.find(str(tmp_path))


LARGER = get_spec("llama3").flavors["debugmodel"].model_dump()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"model": {"name": "llama3", "dim": "64"}},
            "step-1 is damaged: the model in its manifest: ",
        ),
        (
            {"model": {"name": "llama3", "vocab_size": 64}},
            "step-1 is damaged: the model in its manifest: dim: ",
        ),
        (
            {"model": {"name": "llama3", **LARGER}},
            "not of the model in its manifest: .* in the checkpoint",
        ),
        ({"model": {}}, "no model family ''"),
        ({"model": {"name": ["llama3"]}}, "no model family"),
        ({"config": '[model]\nhf_assets_path = ["/dev/zero"]'}, "tokenizer"),
        ({"data": {"tokenizer": 1}}, "is not the tokenizer that the model"),
    ],
)
def test_a_manifest_of_no_model(run, tmp_path, changes, match):
    step = shutil.copytree(run / "step-1", tmp_path / "step-1")
    change(step, **changes)
    with pytest.raises(UserError, match=match):
        generate(step)
