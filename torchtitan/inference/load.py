"""Finding a trained model, opening its tokenizer, and loading both into a `TextGenerator`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torchtitan.checkpoint.commit import checkpoints_at, damage
from torchtitan.checkpoint.format.manifest import read_manifest
from torchtitan.checkpoint.hf.opening import open_hf
from torchtitan.checkpoint.hf.weights import load_hf
from torchtitan.checkpoint.load import Reader, without_dist_warning
from torchtitan.checkpoint.state import (
    check_averaged,
    check_matches_manifest,
    model_of,
    read_weights,
    tokenizer_builder,
)
from torchtitan.config.load.decode import load_config
from torchtitan.config.registry import import_custom
from torchtitan.config.sections.schema import Comm
from torchtitan.data.encode.tokenizer import Tokenizer, build_tokenizer
from torchtitan.inference.generator import TextGenerator
from torchtitan.models import ModelSpec
from torchtitan.models.args import DecoderArgs
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.groups import init_distributed
from torchtitan.parallel.tensor.styles import apply_tensor_parallel
from torchtitan.utils.device import current_device, tune_cpu, usual_dtype
from torchtitan.utils.errors import CheckpointError, ConfigError, UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.storage import is_remote, path_argument, storage_path


@dataclass(frozen=True)
class ModelSource:
    """A trained model on disk or in object storage."""

    folder: Path
    hugging_face: bool
    spec: ModelSpec
    args: Any
    """Hyper-parameters, without modules that predict further tokens in training."""
    build_tokenizer: Callable[[str | None], Tokenizer]
    """Opens the tokenizer, or one of the same kind in another folder."""
    tokenizer: str | None = None
    """Fingerprint of the tokenizer in training; None if unknown."""
    averaged: bool = False
    """Load the average of the weights."""


def find(path: str, custom_import: str | None = None, *, averaged: bool = False) -> ModelSource:
    """Find the model in a checkpoint, a folder of checkpoints, a run's folder, or a Hugging Face
    model's folder.

    Args:
        custom_import: module that registers the model's family.
        averaged: load the average of the weights.

    Raises:
        UserError: there is none, it is damaged, has no average, or its family is unknown.
    """
    folder = path_argument(path, "--checkpoint")
    if (folder / "config.json").is_file():
        if averaged:
            problem = f"--ema: {folder} is a Hugging Face model, which has only weights"
            raise ConfigError([f"{problem}; leave --ema out"])
        return _hugging_face(folder, custom_import)
    config = folder / "config.toml"
    # a run's folder: the file names the folder of checkpoints
    if config.is_file() and not is_remote(folder):
        run = load_config([f"--job.config_file={config}"]).config
        folder = storage_path(run.checkpoint.folder, folder)
    folder = checkpoints_at(folder)[-1]
    manifest = read_manifest(folder)
    if averaged:
        check_averaged(folder, manifest)
    if fault := next(damage(folder, manifest, contents=False), None):
        raise CheckpointError(
            f"{folder} is damaged: {fault}; choose an earlier step (torchtitan ckpt verify lists "
            "the intact ones)"
        )
    spec, args = model_of(folder, manifest, custom_import)
    return ModelSource(
        folder=folder,
        hugging_face=False,
        spec=spec,
        args=_for_inference(args),
        build_tokenizer=tokenizer_builder(folder, manifest),
        tokenizer=manifest.data.get("tokenizer"),
        averaged=averaged,
    )


def _for_inference(args: Any) -> Any:
    if isinstance(args, DecoderArgs) and args.n_mtp:
        return args.model_copy(update={"n_mtp": 0})
    return args


def _hugging_face(folder: Path, custom_import: str | None) -> ModelSource:
    if custom_import:
        import_custom(custom_import)
    try:
        source = open_hf(folder)  # before memory for weights of these sizes is allocated
    except UserError as error:
        lines = str(error).splitlines()
        raise ConfigError([f"--checkpoint: {folder}: {line}" for line in lines]) from None
    for note in source.notes:
        logger.info(note)

    def build(assets: str | None) -> Tokenizer:
        tokenizer = build_tokenizer(assets or str(folder))
        tokenizer.stop_ids += tuple(source.ends)
        return tokenizer

    return ModelSource(
        folder=folder,
        hugging_face=True,
        spec=source.spec,
        args=_for_inference(source.args),
        build_tokenizer=build,
    )


def open_tokenizer(source: ModelSource, assets: str | None) -> Tokenizer:
    """Open the model's tokenizer, from the folder `assets` or the checkpoint's.

    Raises:
        ConfigError: it can't be read, or the model was trained with a different tokenizer.
    """
    try:
        tokenizer = source.build_tokenizer(assets)
    except UserError as error:
        raise ConfigError([str(error).replace("model.hf_assets_path", "--assets")]) from None
    problem = ""
    if tokenizer.text_size > source.args.vocab_size:
        problem = (
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, the model in "
            f"{source.folder} only {source.args.vocab_size}; give the folder of the tokenizer it "
            "was trained with"
        )
    elif not assets and source.tokenizer not in (None, tokenizer.fingerprint):
        problem = (
            f"{tokenizer.name} is not the tokenizer that the model in {source.folder} was trained "
            "with; give the folder of that one, or of this one if the difference doesn't matter"
        )
    if problem:
        raise ConfigError([f"--assets: {problem}"])
    return tokenizer


def load_weights(source: ModelSource, models: Sequence[nn.Module]) -> None:
    """Fill the weights of a model, sharded or not, or of this rank's pipeline stages."""
    with without_dist_warning():
        if source.hugging_face:
            load_hf(models, source.folder, source.spec, source.args)
        else:
            read_weights(models, source.folder, averaged=source.averaged)


def load(
    source: ModelSource,
    tokenizer: Tokenizer,
    max_seq_len: int,
    rows: int,
    dtype: str | None,
    world: int,
) -> TextGenerator:
    """Load the model onto this process's device, or split it over the `world` ranks of torchrun.

    Args:
        max_seq_len: longest text, prompt included.
        rows: prompts per batch.
        dtype: the dtype of the weights; None: `usual_dtype`.
    """
    device = current_device()
    tune_cpu()
    mesh = None
    if world > 1:
        if not dist.is_initialized():
            init_distributed(Comm(), device)
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    args = source.args.model_copy(update={"max_seq_len": max_seq_len + world})
    with torch.device("meta"):
        model: Any = source.spec.build(args, attention_backend(device.type))
    if not source.hugging_face:
        check_matches_manifest(model, Reader(source.folder))
    model.to(getattr(torch, dtype or usual_dtype(device)))
    if mesh is not None:
        apply_tensor_parallel(
            model, mesh, source.spec.tensor_parallel_styles, sharded_loss=False, float8=False
        )
    model.to_empty(device=device)
    model.init_buffers()  # on the CPU, as in training
    model.to(device)
    load_weights(source, [model])
    return TextGenerator(
        model,
        device,
        rows=rows,
        max_seq_len=max_seq_len,
        vocab_size=tokenizer.vocab_size,
        stop=tokenizer.all_ends,
        mesh=mesh,
    )
