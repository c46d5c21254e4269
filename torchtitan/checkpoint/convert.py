"""Conversion of checkpoints to and from Hugging Face folders, in one process."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import ValidationError

from torchtitan.checkpoint.commit import checkpoints_at, committed_steps, step_folder, versions
from torchtitan.checkpoint.dcp_storage import Reader, alone, load
from torchtitan.checkpoint.hf import HFExport, import_hf
from torchtitan.checkpoint.hf_folder import read_hf_config
from torchtitan.checkpoint.manifest import Manifest, first_problem, read_manifest
from torchtitan.checkpoint.state import check_own_model
from torchtitan.config.extend import recorded_tokenizer
from torchtitan.config.load import load_config
from torchtitan.config.registry import import_custom
from torchtitan.config.render import to_toml_value
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.models import ModelSpec, get_spec, spec_of_hf
from torchtitan.models.layers import attention_backend
from torchtitan.utils.errors import CheckpointError, ConfigError, DamageError, UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.storage import is_remote
from torchtitan.utils.torch_faults import silence_false_alarms

PROMPT = 64
"""Tokens in the prompt that an export and the original are compared on."""
_LOGITS_AGREE = 1e-3
"""Largest difference of logits that rounding explains, relative to the largest logit."""


def model_of(step: Path, manifest: Manifest, custom_import: str | None = None) -> tuple[ModelSpec, Any, str]:
    """Family, hyper-parameters and tokenizer folder of the model of a checkpoint.

    Args:
        custom_import: module that registers the family. The one that the checkpoint names is not imported: whoever
            made the checkpoint would choose code for us to run.

    Raises:
        UserError: the family is unknown, or the manifest doesn't describe a model of it.
    """
    settings, sizes = manifest.settings(), dict(manifest.model)
    name, module = sizes.pop("name", ""), settings.get("experimental", {}).get("custom_import")
    if custom_import:
        import_custom(custom_import)
    try:
        spec = get_spec(str(name))
    except ConfigError:
        if custom_import or not module:
            raise
        raise UserError(
            f"{step} is of the model family {name!a}, which the module {module!a} registers; if you trust that module, "
            f"add --custom-import {module!a}"
        ) from None
    try:
        args = type(next(iter(spec.flavors.values()))).model_validate(sizes)
    except ValidationError as error:
        raise DamageError(f"{step} is damaged: the model in its manifest: {first_problem(error)}") from None
    return spec, args, str(settings.get("model", {}).get("hf_assets_path", ""))


def check_averaged(step: Path, manifest: Manifest) -> None:
    """
    Raises:
        UserError: the checkpoint has no average of the weights.
    """
    if "ema" in manifest.tensor_bytes:
        return
    if manifest.averaged or manifest.merged:
        why = f"its weights are {'merged' if manifest.merged else 'the average'}; leave --ema out"
    else:
        why = "its run had no ema.enable = true"
    raise UserError(f"--ema: {step} has no average of the weights: {why}")


def to_hf(
    source: Path,
    target: Path,
    dtype: str | None,
    assets: str | None,
    max_file_gb: float,
    check: bool | None,
    custom_import: str | None = None,
    *,
    averaged: bool = False,
) -> None:
    """Export a checkpoint, then compare the logits of transformers' model with ours.

    Args:
        source: a checkpoint, or a folder of which the newest is taken.
        dtype: of the exported weights; None: as stored.
        assets: folder of the tokenizer; None: that of the run.
        check: whether to compare; None: if transformers is installed and memory suffices.
        custom_import: module that registers the model's family.
        averaged: export the average of the weights.

    Raises:
        UserError: no such checkpoint, average or tokenizer, `target` exists, or the logits differ.
    """
    step = checkpoints_at(source)[-1]
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} exists; delete it, or choose another folder")
    manifest = read_manifest(step)
    if averaged:
        check_averaged(step, manifest)
    Reader(step).check_files(manifest)
    spec, args, recorded = model_of(step, manifest, custom_import)
    with torch.device("meta"):
        check_own_model(spec.build(args, None), Reader(step))
    make = recorded_tokenizer(manifest.settings(), step)
    tokenizer = _tokenizer(assets or recorded, make, given=assets is not None)
    wanted = getattr(torch, dtype) if dtype else None
    export = HFExport(step, target, spec, args, wanted, tokenizer, int(max_file_gb * 1e9), averaged=averaged)
    export.write()
    print(f"{step} -> {target}: {str(export.dtype).removeprefix('torch.')}, vocabulary {args.vocab_size}")
    if reason := None if check else _reason_not_to_compare(step, target):
        print(f"Not compared with transformers: {reason}")
    elif check is not False:
        _compare(step, target, spec, args, export.dtype, averaged)


def _tokenizer(assets: str, make: Callable[[Path], Tokenizer] | None, *, given: bool) -> Tokenizer | None:
    try:
        return build_tokenizer(assets, make)
    except UserError as error:
        if given:
            raise
        print(f"Exporting without a tokenizer: {error} (--assets sets its folder)")
        return None


def _reason_not_to_compare(step: Path, target: Path) -> str | None:
    if is_remote(target):
        return "it is not on this machine"
    if importlib.util.find_spec("transformers") is None:
        return "pip install transformers"
    about = Reader(step).read_metadata().state_dict_metadata
    count = sum(value.size.numel() for key, value in about.items() if key.startswith("model."))
    needed = 5 * count  # one model in float32 at a time
    free = psutil.virtual_memory().available
    return f"needs {needed / 1e9:.0f} GB of memory (--check compares anyway)" if needed > free else None


def _compare(step: Path, target: Path, spec: ModelSpec, args: Any, dtype: torch.dtype, averaged: bool) -> None:
    """Print the largest difference of our model's and transformers' logits, both with the exported weights in float32.

    Raises:
        CheckpointError: it is more than rounding.
    """
    silence_false_alarms()  # transformers imports torchao
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    silence_false_alarms()
    with torch.device("meta"):
        ours = spec.build(args.model_copy(update={"max_seq_len": PROMPT}), attention_backend("cpu"))
    ours.to_empty(device="cpu")
    with alone():
        load({"ema" if averaged else "model": dict(ours.named_parameters())}, Reader(step), no_dist=True)
    ours.to(dtype).float().init_buffers()
    tokens = torch.arange(PROMPT)[None] * 7919 % args.vocab_size
    with torch.no_grad():
        expected = ours(tokens)
        del ours
        theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        gap, size = (theirs(tokens).logits - expected).abs().max().item(), expected.abs().max().item()
    print(f"Largest logit difference to transformers: {gap:.2g} (logits up to {size:.3g})")
    if not gap <= _LOGITS_AGREE * size:
        raise CheckpointError(f"{target}: transformers computes different logits than this project's model")


def from_hf(source: Path, target: Path, family: str | None, toml: str | None) -> None:
    """Convert a Hugging Face folder to the checkpoint `target/step-0`, and write a TOML that trains from it.

    Args:
        family: None: that of its `config.json`.

    Raises:
        UserError: `source` is not a model of this family, or the checkpoint exists.
    """
    config = read_hf_config(source)
    if 0 in committed_steps(target):
        raise UserError(f"{step_folder(target, 0)} exists; delete it, or choose another folder")
    spec = get_spec(family) if family else spec_of_hf(config)
    args = spec.hf.args(config)
    file = Path(toml or Path(target.name if is_remote(target) else target) / "train.toml")
    step = step_folder(target, 0)
    text = _recipe(source, step, spec, args)
    manifest = {
        "step": 0,
        "model_only": True,
        "versions": versions(),
        "model": {"name": spec.name, **args.model_dump()},
        "data": {},
        "config": text,
        "train_state": None,
    }
    count = import_hf(source, step, spec, args, manifest)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text.encode())
    load_config(["--config", str(file)])  # raises if the file isn't valid
    print(f"{source} -> {step}: {spec.name} {nearest_flavor(spec, args)[0]}, {count:,} parameters")
    print(f"Train from it: torchtitan train {file} --training.dataset ...")


def nearest_flavor(spec: ModelSpec, args: Any) -> tuple[str, dict[str, Any]]:
    """The flavor nearest to `args`, and the `[model.overrides]` that turn it into them."""
    wanted = args.model_dump()
    del wanted["max_seq_len"]  # follows from training.seq_len
    changes = {
        name: {key: "none" if value is None else value for key, value in wanted.items() if sizes[key] != value}
        for name, sizes in ((name, flavor.model_dump()) for name, flavor in spec.flavors.items())
    }
    nearest = min(changes, key=lambda name: len(changes[name]))
    return nearest, changes[nearest]


def _recipe(source: Path, step: Path, spec: ModelSpec, args: Any) -> str:
    """The TOML of a run that starts from `step`."""
    flavor, overrides = nearest_flavor(spec, args)
    checkpoint = str(step) if is_remote(step) else os.path.abspath(step)
    tables = {
        "model": {"name": spec.name, "flavor": flavor, "hf_assets_path": os.path.abspath(source)},
        "model.overrides": overrides,
        "checkpoint": {"enable": True, "initial_load_path": checkpoint},
    }
    lines = [f"# Trains from the weights of {source.name}. Add what differs from the defaults: data, batch, rate."]
    for name, table in tables.items():
        if table:
            lines += ["", f"[{name}]", *(f"{key} = {to_toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"
