"""Hugging Face safetensors in and out, sharded by DCP's own reader and writer: no rank holds the whole model."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from torchtitan.components.checkpoint.commit import commit, write_json
from torchtitan.components.checkpoint.state import model_state
from torchtitan.utils.errors import CheckpointError

MAX_FILE_BYTES = 5 * 10**9


def load_hf(models: Sequence[nn.Module], folder: Path, names: dict[str, str]) -> None:
    """Fill the weights of a model, or of this rank's stages of it, from a folder of safetensors.

    Args:
        names: our parameter names to Hugging Face's.

    Raises:
        CheckpointError: no such folder, or a weight is missing or has another shape.
    """
    if not list(folder.glob("*.safetensors")):
        raise CheckpointError(f"checkpoint.initial_load_path: no .safetensors files in {folder}")
    reader = HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    ours = model_state(models)
    for name, value in ours.items():
        size = tuple(stored[names[name]].size) if names[name] in stored else None
        if size != tuple(value.shape):
            found = "missing" if size is None else f"{list(size)} there and {list(value.shape)} here"
            raise CheckpointError(
                f"{folder} holds another model than this configuration builds: {names[name]} is {found}.\n"
                "Set model.flavor and [model.overrides] to the sizes in its config.json."
            )
    # The reader fills tensors of the file's own type; the copy into the parameters converts.
    target = {
        names[name]: torch.empty_like(value, dtype=stored[names[name]].properties.dtype) for name, value in ours.items()
    }
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(folder)))
    with torch.no_grad():
        for name, value in ours.items():
            value.copy_(target[names[name]])


def save_hf(
    models: Sequence[nn.Module],
    folder: Path,
    names: dict[str, str],
    config: dict[str, Any],
    dtype: torch.dtype,
    extra_files: Sequence[Path],
) -> None:
    """Write a model as Hugging Face safetensors with `config.json` and tokenizer, atomically.

    Args:
        models: this rank's pipeline stages, or the whole model.
        names: our parameter names to Hugging Face's.
        config: contents of `config.json`.
        extra_files: files to copy beside it (the tokenizer's).
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    state: dict[str, Tensor] = {names[k]: v.detach().to(dtype) for k, v in model_state(models).items()}
    writer = HuggingFaceStorageWriter(
        str(temporary),
        fqn_to_index_mapping=_file_numbers(state, names.values()),
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        shutil.rmtree(temporary / "sharded", ignore_errors=True)
        write_json(temporary / "config.json", config)
        write_json(temporary / "generation_config.json", {"do_sample": True, "temperature": 0.6, "top_p": 0.9})
        for file in extra_files:
            shutil.copy(file, temporary / file.name)
        commit(temporary, folder)
    dist.barrier()


def _file_numbers(state: dict[str, Tensor], order: Iterable[str]) -> dict[str, int]:
    """File of each tensor of the whole model, counted from 1: in order, each file up to `MAX_FILE_BYTES`."""
    own = {name: value.numel() * value.element_size() for name, value in state.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)  # under pipeline parallelism, each rank knows only its stages
    sizes = {name: nbytes for rank in ranks for name, nbytes in rank.items()}
    number, size, numbers = 1, 0, {}
    for name in order:
        nbytes = sizes[name]
        if size and size + nbytes > MAX_FILE_BYTES:
            number, size = number + 1, 0
        size += nbytes
        numbers[name] = number
    return numbers
