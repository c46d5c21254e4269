"""Export of a checkpoint as Hugging Face safetensors, in bounded host memory."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.checkpoint.commit import (
    begin,
    commit,
    discard,
    fsync,
    step_folder,
    temporary_folder,
    write_json,
)
from torchtitan.checkpoint.format.manifest import read_manifest
from torchtitan.checkpoint.hf import check as hf_check
from torchtitan.checkpoint.hf.folder import batches
from torchtitan.checkpoint.hf.opening import GENERATION, meta_model
from torchtitan.checkpoint.hf.pieces import HFTensor, arrange, blocks, full_box
from torchtitan.checkpoint.hf.tensors import DTYPES, Box, FileTensor, OpenSafetensors, shape_of
from torchtitan.checkpoint.hf.tokenizer import write_tokenizer
from torchtitan.checkpoint.load import BoxReader, PhaseError, Reader, describe, read_tensor
from torchtitan.checkpoint.manager import Checkpointer
from torchtitan.checkpoint.resume import wait_until_visible
from torchtitan.checkpoint.save import Phases
from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.models import ModelSpec, export_problems, hf_map
from torchtitan.models.hf_names import hf_slices, is_buffer
from torchtitan.parallel.agree import together
from torchtitan.utils.errors import CheckpointError, UserError, from_another_rank
from torchtitan.utils.logging import logger
from torchtitan.utils.storage import is_remote, make_folder, patiently

_PIECE = 16 * 2**20


class HFExport:
    """A checkpoint's weights as Hugging Face safetensors, with `config.json` and tokenizer.

    Called by one process, or by all ranks together, which divide the files among them. Atomic: the
    files are compared with the checkpoint, and with transformers if it is installed, before the
    folder gets its name.
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
        max_compared_parameters: float = math.inf,
    ):
        """
        Args:
            source: a checkpoint, `.../step-N`.
            dtype: the dtype of the exported weights; None: as in the checkpoint.
            averaged: write the average of the weights.
            check: whether to read the files back, and compare logits and token ids with
                transformers; None: as far as transformers is installed and memory suffices.
            max_compared_parameters: compare the logits of models of up to this many parameters.

        Raises:
            CheckpointError: Hugging Face's class can't express the model, or the checkpoint is of
                another model.
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
        self.max_compared_parameters = max_compared_parameters
        self.notes: list[str] = []
        """Messages about the comparisons; on rank 0, after `write`."""
        self.rank = 0
        self.world = 1
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
        self.target = temporary_folder(folder)
        self.reader = Reader(source)
        self.manifest = read_manifest(source)
        metadata = self.reader.read_metadata().state_dict_metadata
        self.names = self.hf.names(args)
        self._averaged = averaged
        self._check()
        shapes = {}
        dtypes = {}
        for ours in self.names:
            tensor = metadata[self._key(ours)]
            shapes[ours] = tuple(tensor.size)
            dtypes[ours] = dtype or tensor.properties.dtype
        self.tensors = arrange(self.names, shapes, dtypes)
        """The tensors to write, by Hugging Face's names."""
        self._boxes = BoxReader(self.reader)
        self.dtype = next(iter(self.tensors.values())).dtype
        """The dtype of the first exported weight."""
        sizes = ((name, tensor.nbytes) for name, tensor in self.tensors.items())
        groups = list(batches(sizes, max_file_bytes))
        count = len(groups)
        self.files = {"model.safetensors": groups[0]}
        """The names of the weights in each file."""
        if count > 1:
            numbered = enumerate(groups, 1)
            self.files = {f"model-{i:05}-of-{count:05}.safetensors": g for i, g in numbered}

    def _key(self, ours: str) -> str:
        """The checkpoint's key of a tensor to export. Buffers have no average."""
        average = self._averaged and not is_buffer(self.names[ours])
        return f"ema.{ours}" if average else f"model.{ours}"

    def _check(self) -> None:
        """
        Raises:
            CheckpointError: the checkpoint lacks weights, or has further ones that matter.
        """
        names = {f"model.{name}" for name in self.names}
        source = self.reader.path
        metadata = self.reader.read_metadata().state_dict_metadata
        wrong_model = f"{source} is not of the model in its manifest"
        for key in map(self._key, self.names):
            if key not in metadata:
                raise CheckpointError(f"{wrong_model}: {key} is missing")
        buffers = {f"model.{name}" for name, _ in meta_model(self.spec, self.args).named_buffers()}
        for key in sorted(key for key in metadata if key.startswith("model.") and key not in names):
            if key not in buffers:
                raise CheckpointError(f"{wrong_model}: {key} is unknown")
            matters = metadata[key].properties.dtype.is_floating_point
            if matters and read_tensor(self.reader, key).any():
                raise CheckpointError(
                    f"{source}: {key.removeprefix('model.')} is not zero, and Hugging Face's "
                    f"{self.hf.model_type} has no place for it: the exported model would choose "
                    "other experts. To export, train with moe.balance_bias_rate = 0, and balance "
                    "by moe.global_balance_loss"
                )

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the folder. `group` holds all ranks.

        Raises:
            CheckpointError: on every rank, if it failed on any.
        """
        check = (self._read_back, self._compare)
        try:
            for phase in (self._prepare, self._write_weights, self._describe, *check, self._name):
                self._together(phase, group)
        except BaseException:
            if self.rank == 0:  # another rank would delete what rank 0 is about to commit
                with suppress(Exception):
                    discard(self.folder)
            raise

    def _together(self, phase: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        """Run a phase on every rank and wait for all."""
        phases = Phases(group)

        def act() -> tuple[()]:
            try:
                phase()
            except UserError as error:  # without the name of its class
                raise PhaseError(str(error)) from error
            return ()

        try:
            phases.run(act)
        except Exception as error:
            if from_another_rank(error) and not isinstance(error, PhaseError):
                raise  # the cause is that the other rank ended
            rank = "rank 0: " if phases.alone else ""
            raise CheckpointError(
                f"can't export to Hugging Face: {rank}{describe(error)}; nothing is left of the "
                f"export; {self.reader.path} stays"
            ) from error

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
            total = {"total_size": sum(tensor.nbytes for tensor in self.tensors.values())}
            file_of = {name: file for file, names in self.files.items() for name in names}
            index = {"metadata": total, "weight_map": file_of}
            write_json(self.target / "model.safetensors.index.json", index)
        generation = self.manifest.generation
        bos = generation.get("bos_token_id")
        ends = self.manifest.ends
        if tokenizer := self.tokenizer:
            bos = bos if tokenizer.bos_id is None else tokenizer.bos_id
            ends = tokenizer.all_ends
            write_tokenizer(tokenizer, self.target, self.args.max_seq_len)
        eos = ends if len(ends) > 1 else next(iter(ends), None)
        special = {"bos_token_id": bos, "eos_token_id": eos}
        write_json(self.target / GENERATION, generation | special)
        config = self.hf.config(self.args, str(self.dtype).removeprefix("torch."))
        write_json(self.target / "config.json", config | special)

    def _read_back(self) -> None:
        """Compare each tensor that this rank wrote with the checkpoint's, bit by bit."""
        if self.check is False or is_remote(self.target):
            return
        for file, names in list(self.files.items())[self.rank :: self.world]:
            path = self.target / file
            with OpenSafetensors() as files:
                for name in names:
                    self._compare_bits(files, name, path)

    def _compare_bits(self, files: OpenSafetensors, name: str, path: Path) -> None:
        tensor = self.tensors[name]
        entry = FileTensor(name, str(path), tensor.shape, DTYPES[tensor.dtype])
        for box, values in self._read(tensor):
            if not _same_bits(entry.read(files, box), values):
                raise CheckpointError(
                    f"{path.name}: {name} is not what was written; the storage is faulty"
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
            self._weight,
            self.max_compared_parameters,
            anyway=bool(self.check),
        )

    def _name(self) -> None:
        if self.rank == 0:
            commit(self.folder)

    def _weight(self, ours: str) -> Tensor:
        """The exported weight with one of our names."""
        first = hf_slices(self.names[ours])[0].name
        return read_tensor(self.reader, self._key(ours), self.tensors[first].dtype)

    def _read(self, tensor: HFTensor) -> Iterator[tuple[Box, Tensor]]:
        """Compute one of Hugging Face's tensors, box by box in the order of its elements."""
        self._boxes.forget(besides={self._key(source.ours) for source in tensor.sources})
        elements = _PIECE // tensor.dtype.itemsize
        for box in blocks(full_box(tensor.shape), elements):
            value = torch.empty(shape_of(box), dtype=tensor.dtype)
            for source in tensor.sources:
                source_box = source.box(box)
                if all(shape_of(source_box)):
                    our_values = self._boxes.read(self._key(source.ours), source_box)
                    source.write(our_values, value, box)
            yield box, value


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _write_safetensors(
    path: Path,
    tensors: Mapping[str, HFTensor],
    read: Callable[[HFTensor], Iterable[tuple[Box, Tensor]]],
) -> None:
    """Write a safetensors file with a piece of a tensor in memory at a time; the library would hold
    the whole file.

    The format is 8 bytes with the header's length, the header (JSON), and the tensors' bytes
    (https://github.com/huggingface/safetensors#format).

    Args:
        tensors: the tensors by name.
        read: returns a tensor in pieces, in the order of its elements.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for _, piece in read(tensor):
                file.write(piece.flatten().view(torch.uint8).numpy().data)
    if not is_remote(path):
        fsync(path)


def export_checkpoint(
    checkpointer: Checkpointer, step: int, spec: ModelSpec, args: Any, tokenizer: Tokenizer
) -> Path:
    """Export the checkpoint that a run has saved at `step`, on all ranks together; returns the
    folder.

    Raises:
        CheckpointError: on every rank, if it failed on any, or the files aren't the model.
    """
    checkpointer.wait()
    source = step_folder(checkpointer.folder, step)
    folder = checkpointer.folder / f"step-{step}-hf"
    wait_until_visible(source, checkpointer.storage)

    def open_export() -> HFExport:
        averaged = checkpointer.exports_average and not read_manifest(source).model_only
        return HFExport(
            source,
            folder,
            spec,
            args,
            dtype=getattr(torch, checkpointer.config.export_dtype),
            tokenizer=tokenizer,
            averaged=averaged,
            max_compared_parameters=hf_check.MAX_COMPARED_IN_RUN,
        )

    export = together(open_export)
    export.write(checkpointer.group)
    for note in export.notes:
        logger.info(note)
    return folder
