"""Weights from Hugging Face safetensors, in bounded host memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.checkpoint.format.manifest import CheckpointInfo
from torchtitan.checkpoint.hf.opening import HFModel, meta_model, open_hf
from torchtitan.checkpoint.hf.tensors import Box, shape_of
from torchtitan.checkpoint.save import write_streamed
from torchtitan.checkpoint.state import model_state
from torchtitan.models import ModelSpec
from torchtitan.models.hf_names import parameters_of


def load_hf(models: Sequence[nn.Module], folder: Path, spec: ModelSpec, args: Any) -> HFModel:
    """Fill the weights of a model, or of this rank's pipeline stages, from a folder of safetensors.

    Buffers that Hugging Face's format lacks stay as they are.

    Args:
        args: hyper-parameters of the whole model.

    Raises:
        UserError: the folder is damaged or holds another model, or a weight is missing, unknown, of
            another shape, or holds NaN or infinity.
    """
    source = open_hf(folder, spec, args)
    names = source.reader.names
    extra_buffers = {name for model in models for name, _ in model.named_buffers()} - names.keys()
    state = model_state(models)
    source.reader.load({n: value for n, value in state.items() if n not in extra_buffers})
    return source


def import_hf(source: HFModel, target: Path, info: CheckpointInfo) -> int:
    """Write the weights in a folder of safetensors as a checkpoint of the same dtypes. Quantized
    weights become bfloat16.

    Args:
        target: the checkpoint, `.../step-0`.
        info: the contents of the manifest, without its files.

    Returns:
        The number of parameters.

    Raises:
        CheckpointError: a weight can't be read, or is not finite.
    """
    reader = source.reader
    tensors = reader.read_metadata().state_dict_metadata
    state = model_state([meta_model(source.spec, source.args)])
    for name, tensor in tensors.items():
        state[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")

    def read(key: str, box: Box) -> Tensor:
        name = key.removeprefix("model.")
        if name in tensors:
            return reader.read(name, box)
        # Hugging Face lacks only buffers, which start at zero.
        return torch.zeros(shape_of(box), dtype=state[name].dtype)

    write_streamed(target, info, {"model": state}, read)
    return sum(tensors[name].size.numel() for name in parameters_of(reader.names))
