"""The mean of several checkpoints' weights, as a checkpoint of its own (Izmailov et al., "Averaging
Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.checkpoint.commit import checkpoints_at, damage, remove, versions
from torchtitan.checkpoint.format.index import read_index
from torchtitan.checkpoint.format.manifest import CheckpointInfo, Manifest, Merged, read_manifest
from torchtitan.checkpoint.load import Reader, read_tensor
from torchtitan.checkpoint.save import write_streamed
from torchtitan.checkpoint.state import check_averaged
from torchtitan.utils.errors import CheckpointError, ConfigError, UserError
from torchtitan.utils.storage import is_remote

_BIAS = ".router.expert_bias"
"""End of the name of a tensor that keeps its dtype: updates of a bias in bfloat16 would vanish."""
_PIECE = 1 << 18
"""Elements that are converted to fp64 at a time."""


@dataclass(frozen=True)
class _Source:
    """A checkpoint to average."""

    path: Path
    manifest: Manifest
    reader: Reader
    weight: float
    """The checkpoint's share of the mean."""
    averaged: bool
    """Whether to take the average that its run kept."""

    def key(self, name: str) -> str:
        """The key of the tensor to average for the key `name`. Buffers have no average."""
        average = f"ema.{name.removeprefix('model.')}"
        stored = self.reader.read_metadata().state_dict_metadata
        return average if self.averaged and average in stored else name

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that the mean may need, by key."""
        stored = self.reader.read_metadata().state_dict_metadata
        sections = ("model", "ema")[: 1 + self.averaged]
        return {
            key: tuple(tensor.size)
            for key, tensor in stored.items()
            if key.split(".")[0] in sections
        }


def merge(
    paths: Sequence[Path], output: Path, weights: Sequence[float], dtype: str, *, averaged: bool
) -> None:
    """Write the mean of the weights of checkpoints as the model-only checkpoint `output`, then
    verify it.

    Args:
        paths: checkpoints, or folders of which the newest is taken.
        weights: the share of each in the mean, relative to the others; empty: equal shares.
        dtype: the dtype of the written weights. The mean is computed in fp64.
        averaged: merge the averages of the weights that the runs kept.

    Raises:
        UserError: a checkpoint is missing, damaged, named twice or of another model, or `output`
        exists.
    """
    sources = _sources(paths, weights, averaged)
    if output.exists() and any(output.iterdir()):
        raise UserError(f"--output: {output} exists; delete it, or choose another folder")
    for source in sources:
        source.reader.check_files(source.manifest)
    newest = sources[-1]
    info = CheckpointInfo(
        step=newest.manifest.step,
        model_only=True,
        versions=versions(),
        model=newest.manifest.model,
        data=newest.manifest.data,
        config=newest.manifest.config,
        train_state=None,
        merged=[_record(source) for source in sources],
    )
    merged_dtype = getattr(torch, dtype)
    stored = newest.reader.read_metadata().state_dict_metadata
    state = {}
    for name in (key for key in stored if key.startswith("model.")):
        stored_dtype = stored[name].properties.dtype
        converted = stored_dtype.is_floating_point and not name.endswith(_BIAS)
        target_dtype = merged_dtype if converted else stored_dtype
        state[name] = torch.empty(stored[name].size, dtype=target_dtype, device="meta")
    mean_of_box = lambda name, box: _mean(sources, name, state[name].dtype)  # noqa: E731
    write_streamed(output, info, state, mean_of_box, max_bytes=math.inf)
    written = read_manifest(output)
    if problem := next(damage(output, written), None):
        remove(output)
        raise CheckpointError(f"{output} was written, but not as it should be: {problem}")
    read_index(output)
    terms = ", ".join(f"{source.weight:.3g} x {source.path}" for source in sources)
    print(f"{terms} -> {output}: {written.parameters:,} parameters, {dtype}")


def _sources(paths: Sequence[Path], weights: Sequence[float], averaged: bool) -> list[_Source]:
    """The checkpoints by step and path, so that the order of their names doesn't change the mean.

    Raises:
        UserError: they can't be merged.
    """
    shares = list(weights) or [1.0] * len(paths)
    if len(shares) != len(paths):
        problem = f"--weights: got {len(shares)} for {len(paths)} checkpoints; give one for each"
        raise ConfigError([problem])
    if len(paths) < 2 and not averaged:
        problem = (
            "name two checkpoints or more; a single one only with --ema, to extract its average"
        )
        raise ConfigError([problem])
    total = math.fsum(shares)
    sources: list[_Source] = []
    for path, share in zip(paths, shares, strict=True):
        step = checkpoints_at(path)[-1]
        step = step if is_remote(step) else step.resolve()
        if twice := [source for source in sources if source.path == step]:
            raise UserError(
                f"{twice[0].path} is named twice (a folder of checkpoints means its newest); "
                "name it once"
            )
        manifest = read_manifest(step)
        if averaged:
            check_averaged(step, manifest)
        sources.append(_Source(step, manifest, Reader(step), share / total, averaged=averaged))
    for source in sources[1:]:
        for difference in _differences(sources[0], source):
            raise UserError(
                f"{source.path} is of another model than {sources[0].path}: {difference}"
            )
    return sorted(sources, key=lambda source: (source.manifest.step, str(source.path)))


def _differences(a: _Source, b: _Source) -> Iterator[str]:
    """The differences that keep two checkpoints from being merged."""
    first = a.manifest.model
    second = b.manifest.model
    for key in sorted(first.keys() | second.keys()):
        if key == "max_seq_len":  # follows from training.seq_len
            continue
        if first.get(key) != second.get(key):
            yield f"{key} is {second.get(key)} instead of {first.get(key)}"
    tokenizers = [source.manifest.data.get("tokenizer") for source in (a, b)]
    if None not in tokenizers and tokenizers[0] != tokenizers[1]:
        yield "it was trained with another tokenizer"
    shapes = a.shapes()
    others = b.shapes()
    for name in sorted(shapes.keys() | others.keys()):
        here = shapes.get(name, "missing")
        there = others.get(name, "missing")
        if here != there:
            yield f"{name} is {there} instead of {here}"


def _record(source: _Source) -> Merged:
    """The manifest's record of a source."""
    return Merged(
        checkpoint=str(source.path),
        step=source.manifest.step,
        averaged=source.averaged,
        weight=source.weight,
    )


def _mean(sources: Sequence[_Source], name: str, dtype: torch.dtype) -> Tensor:
    """The mean of one tensor in `dtype`. Integers are counters: their newest values are taken."""
    if not dtype.is_floating_point:
        return read_tensor(sources[-1].reader, name)
    size = sources[-1].reader.read_metadata().state_dict_metadata[name].size
    total = torch.zeros(size.numel(), dtype=torch.float64)
    for source in sources:
        _add(total, read_tensor(source.reader, source.key(name)).flatten(), source.weight)
    mean = torch.empty(len(total), dtype=dtype)
    for target, piece in zip(mean.split(_PIECE), total.split(_PIECE), strict=True):
        target.copy_(piece)
    if not all(target.isfinite().all() for target in mean.split(_PIECE)):
        raise CheckpointError(
            f"{name}: the mean holds NaN or infinity, in {str(dtype).removeprefix('torch.')}"
        )
    return mean.view(size)


def _add(total: Tensor, value: Tensor, weight: float) -> None:
    """Add `weight` times `value` to a sum in fp64. `value` is freed before the next one is read."""
    for target, piece in zip(total.split(_PIECE), value.split(_PIECE), strict=True):
        target.add_(piece.double(), alpha=weight)
