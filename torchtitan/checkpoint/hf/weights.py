"""Weights from Hugging Face safetensors, in bounded host memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.checkpoint.hf.folder import SafetensorsReader, parts_of
from torchtitan.checkpoint.save import write_streamed
from torchtitan.checkpoint.state import model_state
from torchtitan.models import HFNames, ModelSpec, hf_map
from torchtitan.utils.errors import CheckpointError


def load_hf(
    models: Sequence[nn.Module],
    folder: Path,
    names: HFNames,
) -> None:
    """Fill the weights of a model, or of this rank's pipeline stages, from a folder of safetensors.

    Buffers stay as they are: Hugging Face's formats have no place for them.

    Raises:
        CheckpointError: the folder has no safetensors, or one is damaged; or a weight is missing,
            has another shape, or holds NaN or infinity.
    """
    reader = SafetensorsReader(folder, names)
    buffers = {name for model in models for name, _ in model.named_buffers()}
    ours = {name: value for name, value in model_state(models).items() if name not in buffers}
    shapes = {name: value.shape for name, value in ours.items()}
    if problems := reader.problems(shapes):
        raise CheckpointError(
            f"{folder} holds another model than this configuration builds: {problems[0]}.\n"
            "Set model.flavor and [model.overrides] to the sizes in its config.json."
        )
    reader.load(ours)


def check_hf(
    reader: SafetensorsReader,
    spec: ModelSpec,
    args: Any,
) -> None:
    """
    Raises:
        CheckpointError: the weights aren't those of a model of `args`, which came with them.
    """
    known = {part: None for theirs in reader.names.values() for part in parts_of(theirs)}
    unused = reader.entries.keys() - known - {"lm_head.weight"}
    wrong = [f"{theirs} is missing" for theirs in known if theirs not in reader.entries]
    for theirs in sorted(unused):
        if not theirs.endswith("rotary_emb.inv_freq"):
            wrong.append(f"{theirs} is unknown")
    if not wrong:  # else the model could be of any size
        model = on_meta(spec, args)
        shapes = {name: weight.shape for name, weight in model.named_parameters()}
        wrong = reader.problems(shapes)
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{reader.folder} is not the model of its config.json: {'; '.join(wrong[:3])}{more}"
        )


def on_meta(spec: ModelSpec, args: Any) -> nn.Module:
    """The model of a family, without memory."""
    with torch.device("meta"):
        return spec.build(args, None)


def import_hf(
    source: Path,
    target: Path,
    spec: ModelSpec,
    args: Any,
    manifest: dict[str, Any],
) -> int:
    """Write the weights in a folder of safetensors as a checkpoint of the same dtypes.

    Args:
        target: the checkpoint, `.../step-0`.
        manifest: the contents of its manifest.

    Returns:
        The number of parameters.

    Raises:
        CheckpointError: a weight is missing, unknown, not finite, or of another shape than `args`
            say.
    """
    reader = SafetensorsReader(source, hf_map(spec).names(args))
    check_hf(reader, spec, args)
    stored = reader.read_metadata().state_dict_metadata
    state = model_state([on_meta(spec, args)])
    for name, about in stored.items():
        state[name] = torch.empty(
            about.size,
            dtype=about.properties.dtype,
            device="meta",
        )

    def read(key: str) -> Tensor:
        name = key.removeprefix("model.")
        # What Hugging Face doesn't store are buffers, which start at zero.
        return reader.read(name) if name in stored else torch.zeros_like(state[name], device="cpu")

    write_streamed(target, manifest, {"model": state}, read)
    return sum(about.size.numel() for about in stored.values())
