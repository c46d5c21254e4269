"""Checkpoints to and from Hugging Face folders, in one process."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from torchtitan.checkpoint.commit import checkpoints_at, committed_steps, step_folder, versions
from torchtitan.checkpoint.format.manifest import CheckpointInfo, read_manifest
from torchtitan.checkpoint.hf.export import HFExport
from torchtitan.checkpoint.hf.folder import read_hf_config
from torchtitan.checkpoint.hf.opening import open_hf
from torchtitan.checkpoint.hf.weights import import_hf
from torchtitan.checkpoint.load import Reader
from torchtitan.checkpoint.state import (
    check_averaged,
    check_matches_manifest,
    model_of,
    tokenizer_builder,
)
from torchtitan.config.load.decode import load_config
from torchtitan.config.load.render import to_toml_value
from torchtitan.config.load.toml_file import HERE
from torchtitan.config.registry import import_custom
from torchtitan.data.encode.tokenizer import Tokenizer, build_tokenizer, tokenizer_file
from torchtitan.models import ModelSpec, get_spec
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.storage import is_remote
from torchtitan.utils.wording import brief, plural


def to_hf(
    source: Path,
    target: Path,
    dtype: str | None,
    assets: str | None,
    max_file_gb: float,
    check: bool | None,
    custom_import: str | None = None,
    *,
    family: str | None = None,
    averaged: bool = False,
) -> None:
    """Export a checkpoint, and compare the export with it and with transformers' model.

    Args:
        source: a checkpoint, or a folder of checkpoints, whose newest is exported.
        dtype: the dtype of the exported weights; None: as in the checkpoint.
        assets: folder of the tokenizer; None: the run's.
        check: whether to compare them; None: if transformers is installed and memory suffices.
        custom_import: module that registers the model's family.
        family: export as the Hugging Face class of this family, which must have the same code;
            None: the model's family.
        averaged: export the average of the weights.

    Raises:
        UserError: no such checkpoint, average or tokenizer, `target` exists, the class can't
            express the model, or the files aren't the model. Nothing is left of the export.
    """
    step = checkpoints_at(source)[-1]
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} exists; delete it, or choose another folder")
    if check and importlib.util.find_spec("transformers") is None:
        raise UserError("--check needs the package transformers: pip install transformers")
    manifest = read_manifest(step)
    if averaged:
        check_averaged(step, manifest)
    Reader(step).check_files(manifest)
    spec, args = model_of(step, manifest, custom_import)
    with torch.device("meta"):
        check_matches_manifest(spec.build(args, None), Reader(step))
    if family:
        other = get_spec(family)
        spec = replace(spec, hf=other.hf if other.build is spec.build else None)
    tokenizer = _tokenizer(tokenizer_builder(step, manifest), assets)
    export = HFExport(
        step,
        target,
        spec,
        args,
        dtype=getattr(torch, dtype) if dtype else None,
        tokenizer=tokenizer,
        max_file_bytes=int(max_file_gb * 1e9),
        averaged=averaged,
        check=check,
    )
    export.write()
    kind = str(export.dtype).removeprefix("torch.")
    print(f"{step} -> {target}: {kind}, vocabulary {args.vocab_size}")
    for note in export.notes:
        print(note)


def _tokenizer(build: Callable[[str | None], Tokenizer], assets: str | None) -> Tokenizer | None:
    try:
        return build(assets)
    except UserError as error:
        if assets is not None:
            raise
        print(f"Exporting without a tokenizer: {error} (--assets sets its folder)")
        return None


def from_hf(
    source: Path,
    target: Path,
    family: str | None,
    toml: str | None,
    check: Callable[[list[str]], object],
    custom_import: str | None = None,
) -> None:
    """Convert a Hugging Face folder to `target/step-0`, and write a TOML that trains from it.

    Args:
        family: the model's family; None: the one in `config.json`.
        check: called with the arguments of a run; raises a ConfigError if it couldn't start.
        custom_import: module that registers the model's family.

    Raises:
        UserError: `source` is not a model of this family, the checkpoint exists, or a run couldn't
            start from it. Nothing is written.
    """
    if 0 in committed_steps(target):
        raise UserError(f"{step_folder(target, 0)} exists; delete it, or choose another folder")
    if custom_import:
        import_custom(custom_import)
    model = open_hf(source, get_spec(family) if family else None)
    spec, args = model.spec, model.args
    file = Path(toml or Path(target.name if is_remote(target) else target) / "train.toml")
    step = step_folder(target, 0)
    lacks_tokenizer = tokenizer_file(source) is None
    assets = source if lacks_tokenizer or is_remote(target) else target / "tokenizer"
    recipe = partial(_recipe, source.name, assets, step, spec, args, custom_import)
    with TemporaryDirectory() as folder:
        draft = Path(folder, file.name)
        draft.write_text(recipe(file.parent))
        _check_recipe(draft, source, spec, args, check=check)
    info = CheckpointInfo(
        step=0,
        model_only=True,
        versions=versions(),
        model={"name": spec.name, **args.model_dump()},
        data={},
        ends=model.ends,
        generation=model.generation,
        config=recipe(target),
        train_state=None,
    )
    count = import_hf(model, step, info)
    if assets != source:
        assets.mkdir(parents=True, exist_ok=True)
        for path in build_tokenizer(str(source)).files:
            shutil.copy(path, assets)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, recipe(file.parent).encode())
    print(f"{source} -> {step}: {describe_model(spec, args)}, {count:,} parameters")
    for note in model.notes:
        print(note)
    if dropout := read_hf_config(source).get("attention_dropout"):
        print(
            f"warning: config.json: attention_dropout is {brief(dropout)}: transformers drops that "
            "share of the attention weights in training, this trainer drops none; evaluation is "
            "the same"
        )
    if lacks_tokenizer:
        print(
            f"{source} has no tokenizer: set model.hf_assets_path in {file} to the folder of the "
            "model's"
        )
    else:
        print(f"Train from it: torchtitan train {file} --training.dataset ...")


def _check_recipe(
    file: Path, source: Path, spec: ModelSpec, args: Any, check: Callable[[list[str]], object]
) -> None:
    """Check that a run could start from the TOML once the checkpoint is written, and the tokenizer
    is set if the folder lacks one.

    Raises:
        ConfigError: it couldn't.
    """
    keys = ("checkpoint.initial_load_path", "model.hf_assets_path")
    argv = ["--config", str(file), *(f"--{key}={source}" for key in keys)]
    model = load_config(argv).config.model
    recipe_args = spec.args(model.flavor, model.overrides, max_seq_len=args.max_seq_len)
    assert recipe_args == args, f"{file} describes another model: {recipe_args}, not {args}"
    try:
        check(argv)
    except ConfigError as error:
        problems = [
            problem
            for problem in error.problems
            if tokenizer_file(source) or not problem.startswith("model.hf_assets_path")
        ]
        if problems:
            raise ConfigError(problems) from None


def describe_model(spec: ModelSpec, args: Any) -> str:
    """A short description of a model: its flavor, or its sizes if no flavor has them."""
    flavor, overrides = nearest_flavor(spec, args)
    if not overrides:
        return f"{spec.name} {flavor}"
    layers = f"{plural(args.n_layers, 'layer')} of " if hasattr(args, "n_layers") else ""
    return f"{spec.name}, {layers}width {args.dim}"


def nearest_flavor(spec: ModelSpec, args: Any) -> tuple[str, dict[str, Any]]:
    """The flavor nearest to `args`, and the `[model.overrides]` that turn it into `args`."""
    target = args.model_dump()
    del target["max_seq_len"]  # follows from training.seq_len
    changes = {}
    for name, flavor in spec.flavors.items():
        sizes = flavor.model_dump()
        changes[name] = {
            key: _override(value) for key, value in target.items() if sizes[key] != value
        }
    nearest = min(changes, key=lambda name: len(changes[name]))
    return nearest, changes[nearest]


def _override(value: Any) -> Any:
    """A hyper-parameter as TOML can express it. A key missing from a table is None."""
    if isinstance(value, dict):
        return {key: inner for key, inner in value.items() if inner is not None}
    return "none" if value is None else value


def _recipe(
    name: str,
    assets: Path,
    step: Path,
    spec: ModelSpec,
    args: Any,
    custom_import: str | None,
    folder: Path,
) -> str:
    """The TOML, in `folder`, of a run that starts from `step`."""

    def portable(path: Path) -> str:
        if is_remote(path):
            return str(path)
        inner = os.path.relpath(path, folder) if not is_remote(folder) else ".."
        return os.path.abspath(path) if inner.startswith("..") else f"{HERE}/{inner}"

    flavor, overrides = nearest_flavor(spec, args)
    tables = {
        "experimental": {"custom_import": custom_import} if custom_import else {},
        "model": {"name": spec.name, "flavor": flavor, "hf_assets_path": portable(assets)},
        "model.overrides": overrides,
        "checkpoint": {"enable": True, "initial_load_path": portable(step)},
    }
    text = "Add what differs from the defaults: data, batch, rate."
    lines = [f"# Trains from the weights of {name}. {text}"]
    for name, table in tables.items():
        if table:
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {to_toml_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"
