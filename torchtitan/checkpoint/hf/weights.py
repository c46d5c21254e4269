"""Weights from Hugging Face safetensors, in bounded host memory."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan.checkpoint.format.manifest import CheckpointInfo
from torchtitan.checkpoint.hf.folder import SafetensorsReader
from torchtitan.checkpoint.hf.stored import Box, shape_of
from torchtitan.checkpoint.save import write_streamed
from torchtitan.checkpoint.state import model_state
from torchtitan.models import HFNames, ModelSpec, hf_map
from torchtitan.models.hf_names import parameters_of
from torchtitan.utils.errors import CheckpointError


def load_hf(models: Sequence[nn.Module], folder: Path, names: HFNames) -> None:
    """Fill the weights of a model, or of this rank's pipeline stages, from a folder of safetensors.

    Buffers that Hugging Face's format lacks stay as they are.

    Raises:
        CheckpointError: the folder has no safetensors, or one is damaged; or a weight is missing,
            has another shape, or holds NaN or infinity.
    """
    reader = SafetensorsReader(folder, names)
    unstored_buffers = {
        name for model in models for name, _ in model.named_buffers()
    } - names.keys()
    ours = {
        name: value for name, value in model_state(models).items() if name not in unstored_buffers
    }
    shapes = {name: value.shape for name, value in ours.items()}
    if problems := reader.problems(shapes):
        raise CheckpointError(
            f"{folder} holds another model than this configuration builds: {problems[0]}.\n"
            "Set model.flavor and [model.overrides] to the sizes in its config.json."
        )
    reader.load(ours)


def check_hf(reader: SafetensorsReader, spec: ModelSpec, args: Any) -> list[str]:
    """
    Returns:
        The folder's tensors that the family ignores.

    Raises:
        CheckpointError: the weights don't fit `args`, which are from the same folder.
    """
    parts = [part for parts in reader.parts.values() for part in parts]
    known = dict.fromkeys(part.name for part in parts)
    copies = {copy for part in parts for copy in part.copies}
    wrong = [f"{theirs} is missing" for theirs in known if theirs not in reader.entries]
    ignored = []
    usual = ("lm_head.weight", "*rotary_emb.inv_freq")
    for theirs in sorted(reader.entries.keys() - known - copies):
        if hf_map(spec).ignores(theirs, args):
            ignored.append(theirs)
        elif not any(fnmatchcase(theirs, pattern) for pattern in usual):
            wrong.append(f"{theirs} is unknown")
    if not wrong:  # else the model could be of any size
        model = meta_model(spec, args)
        buffers = {name for name, _ in model.named_buffers()} - reader.names.keys()
        state = model_state([model])
        shapes = {name: value.shape for name, value in state.items() if name not in buffers}
        wrong = reader.problems(shapes)
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{reader.folder} is not the model of its config.json: {'; '.join(wrong[:3])}{more}"
        )
    return ignored


def meta_model(spec: ModelSpec, args: Any) -> nn.Module:
    """A model on the meta device, without memory."""
    with torch.device("meta"):
        return spec.build(args, None)


class Imported(NamedTuple):
    """The result of an import."""

    parameters: int
    notes: list[str]
    """Differences from the folder, for people."""


def import_hf(
    source: Path, target: Path, spec: ModelSpec, args: Any, info: CheckpointInfo
) -> Imported:
    """Write the weights in a folder of safetensors as a checkpoint of the same dtypes; quantized
    ones as bfloat16.

    Args:
        target: the checkpoint, `.../step-0`.
        info: the part of the manifest that isn't about files.

    Raises:
        CheckpointError: a weight is missing, unknown, not finite, or of another shape than `args`
            say.
    """
    reader = SafetensorsReader(source, hf_map(spec).names(args))
    ignored = check_hf(reader, spec, args)
    stored = reader.read_metadata().state_dict_metadata
    state = model_state([meta_model(spec, args)])
    for name, tensor in stored.items():
        state[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")

    def read(key: str, box: Box) -> Tensor:
        name = key.removeprefix("model.")
        if name in stored:
            return reader.read(name, box)
        # Hugging Face lacks only buffers, which start at zero.
        return torch.zeros(shape_of(box), dtype=state[name].dtype)

    write_streamed(target, info, {"model": state}, read)
    sizes = (stored[name].size.numel() for name in parameters_of(reader.names))
    return Imported(sum(sizes), _notes(reader, ignored))


def _notes(reader: SafetensorsReader, ignored: list[str]) -> list[str]:
    notes = []
    if reader.quantization:
        notes.append(f"Dequantized from {reader.quantization.method} to bfloat16")
    if ignored:
        more = f" and {len(ignored) - 1} more" if len(ignored) > 1 else ""
        notes.append(f"Not read, because the model has no place for it: {ignored[0]}{more}")
    return notes
