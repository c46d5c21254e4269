"""Hugging Face safetensors in and out, in bounded host memory."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan.checkpoint.commit import begin, commit, discard, fsync, temporary_folder, write_json
from torchtitan.checkpoint.dcp_storage import CommittingWriter, Reader, alone, read_tensor
from torchtitan.checkpoint.hf_folder import DTYPES, SafetensorsReader, unwrapped
from torchtitan.checkpoint.state import model_state
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models import ModelSpec
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.storage import is_remote, make_folder, patiently

_GROUP_BYTES = 32 * 2**20
_PIECE = 16 * 2**20

# ---- in


def load_hf(models: Sequence[nn.Module], folder: Path, names: dict[str, str]) -> None:
    """Fill the weights of a model, or of this rank's pipeline stages, from a folder of safetensors.

    Args:
        names: our parameter names to Hugging Face's.

    Raises:
        CheckpointError: the folder has no safetensors, or one is damaged; or a weight is missing, has another shape, or
            holds NaN or infinity.
    """
    reader = SafetensorsReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    ours = model_state(models)
    if problems := reader.problems({names[name]: value.shape for name, value in ours.items()}):
        raise CheckpointError(
            f"{folder} holds another model than this configuration builds: {problems[0]}.\n"
            "Set model.flavor and [model.overrides] to the sizes in its config.json."
        )
    for group in _groups({name: value.nbytes for name, value in ours.items()}, _GROUP_BYTES):
        # The reader fills tensors of the stored dtype; the copy into the parameters converts.
        target = {
            names[name]: torch.empty_like(ours[name], dtype=stored[names[name]].properties.dtype) for name in group
        }
        with alone(), unwrapped():  # pipeline ranks load different groups of weights
            dcp.load(target, storage_reader=reader, no_dist=True)
        with torch.no_grad():
            for name in group:
                ours[name].copy_(reader.checked(names[name], target.pop(names[name])))


def check_hf(reader: SafetensorsReader, spec: ModelSpec, args: Any) -> None:
    """
    Raises:
        CheckpointError: the weights are not those of a model of these hyper-parameters, which came with them.
    """
    names = spec.hf.names(args)
    unused = reader.entries.keys() - set(names.values()) - {"lm_head.weight"}
    wrong = [f"{theirs} is missing" for theirs in names.values() if theirs not in reader.entries]
    wrong += [f"{theirs} is unknown" for theirs in sorted(unused) if not theirs.endswith("rotary_emb.inv_freq")]
    if not wrong:  # else the model could be of any size
        with torch.device("meta"):
            shapes = {names[ours]: weight.shape for ours, weight in spec.build(args, None).named_parameters()}
        wrong = reader.problems(shapes)
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(f"{reader.folder} is not the model of its config.json: {'; '.join(wrong[:3])}{more}")


class _LazyPlanner(DefaultSavePlanner):
    """Plans a save with tensors on the meta device, and reads each real one only when it is written."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self.read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.read(write_item.index.fqn)


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
    reader = SafetensorsReader(source)
    check_hf(reader, spec, args)
    stored = reader.read_metadata().state_dict_metadata
    names = spec.hf.names(args)

    state = {
        ours: torch.empty(stored[theirs].size, dtype=stored[theirs].properties.dtype, device="meta")
        for ours, theirs in names.items()
    }
    # DCP holds all tensors of a file until it is complete, hence one file per tensor.
    writer = CommittingWriter(target, manifest, file_per_tensor=True)
    planner = _LazyPlanner(lambda key: reader.read(names[key.removeprefix("model.")]))
    try:
        with alone(), unwrapped():
            dcp.save({"model": state}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointError:
        discard(target)
        raise
    return sum(weight.numel() for weight in state.values())


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
    ):
        """
        Args:
            source: a checkpoint, `.../step-N`.
            dtype: of the written weights; None: as stored.

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
        self.keys = {theirs: f"model.{ours}" for ours, theirs in spec.hf.names(args).items()}
        if missing := [key for key in self.keys.values() if key not in stored]:
            raise CheckpointError(f"{source} is not of the model in its manifest: {missing[0]} is missing")
        self.tensors = {
            theirs: torch.empty(stored[key].size, dtype=dtype or stored[key].properties.dtype, device="meta")
            for theirs, key in self.keys.items()
        }
        self.dtype = next(iter(self.tensors.values())).dtype
        """Of the first of the written weights."""
        groups = list(_groups({name: value.nbytes for name, value in self.tensors.items()}, max_file_bytes))
        count = len(groups)
        names = [f"model-{i:05}-of-{count:05}" for i in range(1, count + 1)] if count > 1 else ["model"]
        self.files = {f"{name}.safetensors": group for name, group in zip(names, groups, strict=True)}

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
        return read_tensor(self.reader, self.keys[name], self.tensors[name].dtype)


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


def _groups(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, in groups of at most `limit` bytes; a larger tensor is a group of its own."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group
