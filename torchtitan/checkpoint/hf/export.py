"""Export of a checkpoint as Hugging Face safetensors, in bounded host memory."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from torchtitan.checkpoint.commit import begin, commit, discard, fsync, temporary_folder, write_json
from torchtitan.checkpoint.hf import check as hf_check
from torchtitan.checkpoint.hf.folder import DTYPES, MAPPED_BYTES, batches, parts_of
from torchtitan.checkpoint.hf.tokenizer import write_tokenizer
from torchtitan.checkpoint.hf.weights import on_meta
from torchtitan.checkpoint.load import Reader, read_tensor
from torchtitan.data.text.tokenizer import Tokenizer
from torchtitan.models import ModelSpec, export_problems, hf_map
from torchtitan.utils.errors import CheckpointError, UserError
from torchtitan.utils.storage import is_remote, make_folder, patiently

_PIECE = 16 * 2**20


class HFExport:
    """A checkpoint's weights as Hugging Face safetensors, with `config.json` and tokenizer.

    Called by one process, or by all ranks together, which divide the files among them. Atomic: what
    was written is compared with the checkpoint, and with transformers if that is installed, before
    the folder gets its name.
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
        check: bool | None = None,
        most_compared: float = math.inf,
    ):
        """
        Args:
            source: a checkpoint, `.../step-N`.
            dtype: of the written weights; None: as stored.
            averaged: write the average of the weights.
            check: whether to read the files back, and compare logits and token ids with those of
                transformers; None: as far as transformers is installed and memory suffices.
            most_compared: compare the logits of models of up to this many parameters.

        Raises:
            CheckpointError: Hugging Face's class can't express the model, or the checkpoint is of
                another one.
        """
        if problems := export_problems(spec, args):
            lines = [f"can't export to Hugging Face: {problem}" for problem in problems]
            raise CheckpointError("\n".join(lines))
        self.folder = folder
        self.spec = spec
        self.args = args
        self.hf = hf_map(spec)
        self.tokenizer = tokenizer
        self.check = check
        self.most_compared = most_compared
        self.notes: list[str] = []
        """What was compared and what wasn't, in words; on rank 0, after `write`."""
        self.rank = 0
        self.world = 1
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
        self.target = temporary_folder(folder)
        self.reader = Reader(source)
        stored = self.reader.read_metadata().state_dict_metadata
        self.names = self.hf.names(args)
        self._check(self.names, averaged)
        self.tensors: dict[str, Tensor] = {}
        """What is written, on the meta device."""
        self.places: dict[str, tuple[str, int | None]] = {}
        """Where it is in the checkpoint: a key, and the index in a stack."""
        for ours, theirs in self.names.items():
            key = f"ema.{ours}" if averaged else f"model.{ours}"
            about = stored[key]
            value = torch.empty(
                about.size,
                dtype=dtype or about.properties.dtype,
                device="meta",
            )
            whole = isinstance(theirs, str)
            for i, part in enumerate(parts_of(theirs)):
                self.tensors[part] = value if whole else value[i]
                self.places[part] = key, None if whole else i
        self._stack: tuple[str, Tensor] | None = None
        self.dtype = next(iter(self.tensors.values())).dtype
        """The dtype of the first written weight."""
        sizes = ((name, value.nbytes) for name, value in self.tensors.items())
        groups = list(batches(sizes, max_file_bytes))
        count = len(groups)
        self.files = {"model.safetensors": groups[0]}
        """The weights in each file."""
        if count > 1:
            numbered = enumerate(groups, 1)
            self.files = {f"model-{i:05}-of-{count:05}.safetensors": g for i, g in numbered}

    def _check(self, ours: Mapping[str, Any], averaged: bool) -> None:
        """
        Raises:
            CheckpointError: the checkpoint lacks some of the weights `ours`, or has some beside
            them that matter.
        """
        names = {f"model.{name}" for name in ours}
        wanted = [f"ema.{name}" for name in ours] if averaged else list(names)
        source = self.reader.path
        stored = self.reader.read_metadata().state_dict_metadata
        other = f"{source} is not of the model in its manifest"
        if missing := [key for key in wanted if key not in stored]:
            raise CheckpointError(f"{other}: {missing[0]} is missing")
        buffers = {f"model.{name}" for name, _ in on_meta(self.spec, self.args).named_buffers()}
        for key in sorted(key for key in stored if key.startswith("model.") and key not in names):
            if key not in buffers:
                raise CheckpointError(f"{other}: {key} is unknown")
            matters = stored[key].properties.dtype.is_floating_point
            if matters and read_tensor(self.reader, key).any():
                raise CheckpointError(
                    f"{source}: {key.removeprefix('model.')} is not zero, and Hugging Face's "
                    f"{self.hf.model_type} has no place for it: the exported model would choose "
                    "other experts. To export, train with moe.balance_bias_rate = 0, and balance "
                    "by moe.global_balance_loss"
                )

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the folder. `group` is that of all ranks.

        Raises:
            CheckpointError: on every rank, if it failed on any.
        """
        check = (self._read_back, self._compare)
        try:
            for phase in (self._prepare, self._write_weights, self._describe, *check, self._name):
                self._together(phase, group)
        except BaseException:
            with suppress(Exception):
                discard(self.folder)
            raise

    def _together(self, phase: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        """Run a phase on every rank and wait for all."""
        problem = None
        try:
            phase()
        except UserError as error:
            problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problems = [problem] * self.world
        if dist.is_initialized():
            dist.all_gather_object(problems, problem, group=group)
        for rank, text in enumerate(problems):
            if text:
                raise CheckpointError(
                    f"can't export to Hugging Face: rank {rank}: {text}; nothing is left of the "
                    f"export; {self.reader.path} stays"
                )

    def _prepare(self) -> None:
        if self.rank == 0:
            begin(self.folder)
            make_folder(self.target)

    def _write_weights(self) -> None:
        for file, names in list(self.files.items())[self.rank :: self.world]:
            path = self.target / file
            tensors = {name: self.tensors[name] for name in names}
            patiently(path, partial(_write_safetensors, path, tensors, self._read))

    def _describe(self) -> None:
        if self.rank != 0:
            return
        if len(self.files) > 1:
            total = {"total_size": sum(value.nbytes for value in self.tensors.values())}
            places = {name: file for file, names in self.files.items() for name in names}
            index = {"metadata": total, "weight_map": places}
            write_json(self.target / "model.safetensors.index.json", index)
        special: dict[str, int | None] = {}
        if tokenizer := self.tokenizer:
            special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            write_tokenizer(tokenizer, self.target)
        sampling = {
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.9,
        }
        write_json(self.target / "generation_config.json", sampling | special)
        about = self.hf.config(self.args, str(self.dtype).removeprefix("torch."))
        write_json(self.target / "config.json", about | special)

    def _read_back(self) -> None:
        """Compare each tensor that this rank wrote with the checkpoint's, bit by bit."""
        if self.check is False or is_remote(self.target):
            return
        for file, names in list(self.files.items())[self.rank :: self.world]:
            sizes = ((name, self.tensors[name].nbytes) for name in names)
            # The pages that are read of a mapped file are this process's memory until it is closed.
            for batch in batches(sizes, MAPPED_BYTES):
                self._compare_bits(file, batch)

    def _compare_bits(self, file: str, names: list[str]) -> None:
        with safe_open(self.target / file, framework="pt") as content:
            for name in names:
                if not _same_bits(content.get_tensor(name), self._read(name)):
                    raise CheckpointError(
                        f"{file}: {name} is not what was written; the storage is faulty"
                    )

    def _compare(self) -> None:
        if self.rank != 0:
            return
        if self.check is False or is_remote(self.target):
            why = "as asked" if self.check is False else "it is not on this machine"
            self.notes = [f"Not read back, and not compared with transformers: {why}"]
            return
        hf_check.check_description(self.target, self.spec, self.args)
        hf_check.check_tokenizer_file(self.target, self.tokenizer)
        self.notes = hf_check.compare(
            self.target,
            self.spec,
            self.args,
            self.tokenizer,
            self._whole,
            self.most_compared,
            anyway=bool(self.check),
        )

    def _name(self) -> None:
        if self.rank == 0:
            commit(self.folder)

    def _whole(self, ours: str) -> Tensor:
        """The weight of one of our names, as it was exported."""
        first = parts_of(self.names[ours])[0]
        key, _ = self.places[first]
        return read_tensor(self.reader, key, self.tensors[first].dtype)

    def _read(self, name: str) -> Tensor:
        key, index = self.places[name]
        if index is None:
            return read_tensor(self.reader, key, self.tensors[name].dtype)
        if self._stack is None or self._stack[0] != key:
            self._stack = None  # before the next one needs memory
            self._stack = key, read_tensor(self.reader, key, self.tensors[name].dtype)
        return self._stack[1][index]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
) -> None:
    """Write a safetensors file with one tensor in memory at a time; other writers hold whole files.

    The format is 8 bytes with the header's length, the header (JSON), and the tensors' bytes
    (https://github.com/huggingface/safetensors#format).

    Args:
        tensors: by name, on the meta device.
        read: returns a tensor by name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        start = end
        end = end + value.nbytes
        header[name] = {
            "dtype": DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            for piece in read(name).flatten().view(torch.uint8).split(_PIECE):
                file.write(piece.numpy().data)
    if not is_remote(path):
        fsync(path)
