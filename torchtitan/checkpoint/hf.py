"""Hugging Face safetensors in and out, in bounded host memory."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.checkpoint.commit import begin, commit, discard, fsync, temporary_folder, write_json
from torchtitan.checkpoint.dcp_storage import Reader, read_tensor, write_streamed
from torchtitan.checkpoint.hf_folder import DTYPES, SafetensorsReader, batches, parts_of
from torchtitan.checkpoint.state import model_state
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models import HFNames, ModelSpec
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.storage import is_remote, make_folder, patiently

_PIECE = 16 * 2**20

# ---- in


def load_hf(models: Sequence[nn.Module], folder: Path, names: HFNames) -> None:
    """Fill the weights of a model, or of this rank's pipeline stages, from a folder of safetensors.

    Buffers stay as they are: Hugging Face's formats have no place for them.

    Raises:
        CheckpointError: the folder has no safetensors, or one is damaged; or a weight is missing, has another shape, or
            holds NaN or infinity.
    """
    reader = SafetensorsReader(folder, names)
    buffers = {name for model in models for name, _ in model.named_buffers()}
    ours = {name: value for name, value in model_state(models).items() if name not in buffers}
    if problems := reader.problems({name: value.shape for name, value in ours.items()}):
        raise CheckpointError(
            f"{folder} holds another model than this configuration builds: {problems[0]}.\n"
            "Set model.flavor and [model.overrides] to the sizes in its config.json."
        )
    reader.load(ours)


def check_hf(reader: SafetensorsReader, spec: ModelSpec, args: Any) -> None:
    """
    Raises:
        CheckpointError: the weights are not those of a model of these hyper-parameters, which came with them.
    """
    known = {part: None for theirs in reader.names.values() for part in parts_of(theirs)}
    unused = reader.entries.keys() - known - {"lm_head.weight"}
    wrong = [f"{theirs} is missing" for theirs in known if theirs not in reader.entries]
    wrong += [f"{theirs} is unknown" for theirs in sorted(unused) if not theirs.endswith("rotary_emb.inv_freq")]
    if not wrong:  # else the model could be of any size
        wrong = reader.problems({name: weight.shape for name, weight in _on_meta(spec, args).named_parameters()})
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(f"{reader.folder} is not the model of its config.json: {'; '.join(wrong[:3])}{more}")


def _on_meta(spec: ModelSpec, args: Any) -> nn.Module:
    with torch.device("meta"):
        return spec.build(args, None)


def import_hf(source: Path, target: Path, spec: ModelSpec, args: Any, manifest: dict[str, Any]) -> int:
    """Write the weights in a folder of safetensors as a checkpoint of the same dtypes.

    Args:
        target: the checkpoint, `.../step-0`.
        manifest: the contents of its manifest.

    Returns:
        The number of parameters.

    Raises:
        CheckpointError: a weight is missing or unknown, holds NaN or infinity, or its shape doesn't follow from `args`.
    """
    reader = SafetensorsReader(source, spec.hf.names(args))
    check_hf(reader, spec, args)
    stored = reader.read_metadata().state_dict_metadata
    state = model_state([_on_meta(spec, args)])
    for name, about in stored.items():
        state[name] = torch.empty(about.size, dtype=about.properties.dtype, device="meta")

    def read(key: str) -> Tensor:
        name = key.removeprefix("model.")
        # What Hugging Face doesn't store are buffers, which start at zero.
        return reader.read(name) if name in stored else torch.zeros_like(state[name], device="cpu")

    write_streamed(target, manifest, {"model": state}, read)
    return sum(about.size.numel() for about in stored.values())


# ---- out


class HFExport:
    """An export of a checkpoint's weights as Hugging Face safetensors with `config.json` and tokenizer.

    Called by one process, or by all ranks together, which divide the files among them. Atomic.
    """

    def __init__(
        self,
        source: Path,
        folder: Path,
        spec: ModelSpec,
        args: Any,
        dtype: torch.dtype | None,
        tokenizer: Tokenizer | None,
        max_file_bytes: int = 5 * 10**9,
        *,
        averaged: bool = False,
    ):
        """
        Args:
            source: a checkpoint, `.../step-N`.
            dtype: of the written weights; None: as stored.
            averaged: write the average of the weights.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        self.folder, self.spec, self.args, self.tokenizer = folder, spec, args, tokenizer
        self.rank, self.world = 0, 1
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.target = temporary_folder(folder)
        self.reader = Reader(source)
        stored = self.reader.read_metadata().state_dict_metadata
        names = spec.hf.names(args)
        self._check(names, averaged)
        self.tensors: dict[str, Tensor] = {}
        """What is written, on the meta device."""
        self.places: dict[str, tuple[str, int | None]] = {}
        """Where it is in the checkpoint: a key, and the index in a stack."""
        for ours, theirs in names.items():
            key = f"ema.{ours}" if averaged else f"model.{ours}"
            about = stored[key]
            value = torch.empty(about.size, dtype=dtype or about.properties.dtype, device="meta")
            whole = isinstance(theirs, str)
            for i, part in enumerate(parts_of(theirs)):
                self.tensors[part] = value if whole else value[i]
                self.places[part] = key, None if whole else i
        self._stack: tuple[str, Tensor] | None = None
        self.dtype = next(iter(self.tensors.values())).dtype
        """Of the first of the written weights."""
        groups = list(batches(((name, value.nbytes) for name, value in self.tensors.items()), max_file_bytes))
        count = len(groups)
        files = [f"model-{i:05}-of-{count:05}" for i in range(1, count + 1)] if count > 1 else ["model"]
        self.files = {f"{name}.safetensors": group for name, group in zip(files, groups, strict=True)}

    def _check(self, ours: Mapping[str, Any], averaged: bool) -> None:
        """
        Raises:
            CheckpointError: the checkpoint lacks some of the weights `ours`, or has some beside them that matter.
        """
        names = {f"model.{name}" for name in ours}
        wanted = [f"ema.{name}" for name in ours] if averaged else list(names)
        source, stored = self.reader.path, self.reader.read_metadata().state_dict_metadata
        if missing := [key for key in wanted if key not in stored]:
            raise CheckpointError(f"{source} is not of the model in its manifest: {missing[0]} is missing")
        buffers = {f"model.{name}" for name, _ in _on_meta(self.spec, self.args).named_buffers()}
        for key in sorted(key for key in stored if key.startswith("model.") and key not in names):
            if key not in buffers:
                raise CheckpointError(f"{source} is not of the model in its manifest: {key} is unknown")
            if stored[key].properties.dtype.is_floating_point and read_tensor(self.reader, key).any():
                raise CheckpointError(
                    f"{source}: {key.removeprefix('model.')} is not zero, and Hugging Face's {self.spec.hf.model_type} "
                    "has no place for it: the exported model would choose other experts. To export, train with "
                    "moe.balance_bias_rate = 0, and balance by moe.global_balance_loss"
                )

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the folder. `group` is that of all ranks.

        Raises:
            CheckpointError: on every rank, if it failed on any.
        """
        try:
            for phase in (self._prepare, self._write_weights, self._finish):
                self._together(phase, group)
        except CheckpointError:
            with suppress(Exception):
                discard(self.folder)
            raise

    def _together(self, phase: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        """Run a phase on every rank and wait for all."""
        problem = None
        try:
            phase()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problems = [problem] * self.world
        if dist.is_initialized():
            dist.all_gather_object(problems, problem, group=group)
        for rank, text in enumerate(problems):
            if text:
                raise CheckpointError(f"can't export to Hugging Face: rank {rank}: {text}")

    def _prepare(self) -> None:
        if self.rank == 0:
            begin(self.folder)
            make_folder(self.target)

    def _write_weights(self) -> None:
        for file, names in list(self.files.items())[self.rank :: self.world]:
            path, tensors = self.target / file, {name: self.tensors[name] for name in names}
            patiently(path, partial(_write_safetensors, path, tensors, self._read))

    def _finish(self) -> None:
        if self.rank != 0:
            return
        if len(self.files) > 1:
            total = {"total_size": sum(value.nbytes for value in self.tensors.values())}
            places = {name: file for file, names in self.files.items() for name in names}
            write_json(self.target / "model.safetensors.index.json", {"metadata": total, "weight_map": places})
        special: dict[str, int | None] = {}
        if tokenizer := self.tokenizer:
            special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            for path in tokenizer.files:
                with path.open("rb") as original, (self.target / path.name).open("wb") as copy:
                    shutil.copyfileobj(original, copy)
        sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
        write_json(self.target / "generation_config.json", sampling | special)
        about = self.spec.hf.config(self.args, str(self.dtype).removeprefix("torch."))
        write_json(self.target / "config.json", about | special)
        commit(self.folder)

    def _read(self, name: str) -> Tensor:
        key, index = self.places[name]
        if index is None:
            return read_tensor(self.reader, key, self.tensors[name].dtype)
        if self._stack is None or self._stack[0] != key:
            self._stack = None  # before the next one needs memory
            self._stack = key, read_tensor(self.reader, key, self.tensors[name].dtype)
        return self._stack[1][index]


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write a safetensors file with one tensor in memory at a time; torch's and safetensors' writers hold whole files.

    The format is 8 bytes with the header's length, the header (JSON), and the tensors' bytes
    (https://github.com/huggingface/safetensors#format).

    Args:
        tensors: by name, on the meta device.
        read: returns a tensor by name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            for piece in read(name).flatten().view(torch.uint8).split(_PIECE):
                file.write(piece.numpy().data)
    if not is_remote(path):
        fsync(path)
