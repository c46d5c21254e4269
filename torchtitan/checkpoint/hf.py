"""Hugging Face safetensors in and out, a bounded part of the weights at a time: models of any size, on any host."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, Metadata
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan.checkpoint.commit import begin, commit, discard, fsync, temporary_folder, write_json
from torchtitan.checkpoint.dcp_storage import CommittingWriter, Reader, alone
from torchtitan.checkpoint.state import model_state
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models import ModelSpec
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.storage import is_remote, make_folder, patiently

MAX_FILE_BYTES = 5 * 10**9
_GROUP_BYTES = 32 * 2**20
_PIECE = 16 * 2**20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""safetensors' names of types."""


# ---- in


class _SafetensorsReader(HuggingFaceStorageReader):
    """torch's reader, which reads the header of every file for each load; this one only once."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


def load_hf(models: Sequence[nn.Module], folder: Path, names: dict[str, str]) -> None:
    """Fill the weights of a model, or of this rank's stages of it, from a folder of safetensors.

    Args:
        names: our parameter names to Hugging Face's.

    Raises:
        CheckpointError: no such folder, or a weight is missing or has another shape.
    """
    if not list(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"no .safetensors files in {folder} (checkpoint.initial_load_path, or model.hf_assets_path without it)"
        )
    reader = _SafetensorsReader(str(folder))
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
    for group in _groups({name: value.nbytes for name, value in ours.items()}, _GROUP_BYTES):
        # The reader fills tensors of the file's own type; the copy into the parameters converts.
        target = {
            names[name]: torch.empty_like(ours[name], dtype=stored[names[name]].properties.dtype) for name in group
        }
        with alone():  # no rank needs the others, and under pipeline parallelism they have other groups
            dcp.load(target, storage_reader=reader, no_dist=True)
        with torch.no_grad():
            for name in group:
                ours[name].copy_(target.pop(names[name]))


class _LazyPlanner(DefaultSavePlanner):
    """Plans a save by tensors without memory, and gets each real one only when it is written."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self.read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.read(write_item.index.fqn)


def import_hf(source: Path, target: Path, spec: ModelSpec, args: Any, manifest: dict[str, Any]) -> int:
    """Write the weights in a folder of safetensors as a checkpoint of their own types; their number.

    Args:
        target: the checkpoint, `.../step-0`.
        manifest: what its manifest says.

    Raises:
        CheckpointError: a weight is missing, too many, or has another shape than `args` say.
    """
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in spec.build(args, None).named_parameters()}
    theirs = spec.hf.names(args)
    where: dict[str, Path] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            where |= dict.fromkeys(content.keys(), file)

    def read(name: str) -> Tensor:
        with safe_open(where[theirs[name]], "pt") as content:  # opened each time: what was read is released
            return content.get_tensor(theirs[name])

    wrong = [f"{theirs[name]} is missing" for name in shapes if theirs[name] not in where]
    unused = where.keys() - set(theirs.values()) - {"lm_head.weight"}
    wrong += [f"{name} is unknown" for name in sorted(unused) if not name.endswith("rotary_emb.inv_freq")]
    state = {}
    for name in shapes if not wrong else ():
        with safe_open(where[theirs[name]], "pt") as content:
            about = content.get_slice(theirs[name])
            if (shape := about.get_shape()) != list(shapes[name]):
                wrong += [f"{theirs[name]} is {shape}, should be {list(shapes[name])}"]
            dtype = {text: known for known, text in _DTYPES.items()}.get(about.get_dtype())
            if dtype is None:
                wrong += [f"{theirs[name]} is of the type {about.get_dtype()}"]
            state[name] = torch.empty(shape, dtype=dtype, device="meta")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(f"{source} is not the model of its config.json: {'; '.join(wrong[:3])}{more}")
    # DCP holds the tensors of a file until it is complete: one file for each.
    writer = CommittingWriter(target, manifest, file_per_tensor=True)
    planner = _LazyPlanner(lambda key: read(key.removeprefix("model.")))
    with alone():
        dcp.save({"model": state}, storage_writer=writer, planner=planner, no_dist=True)
    return sum(weight.numel() for weight in state.values())


# ---- out


def export_hf(
    source: Path,
    folder: Path,
    spec: ModelSpec,
    args: Any,
    dtype: torch.dtype | None,
    tokenizer: Tokenizer | None,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    group: dist.ProcessGroup | None = None,
) -> torch.dtype:
    """Write a checkpoint's weights as Hugging Face safetensors with `config.json` and tokenizer, atomically.

    Called by one process, or by all ranks together, which share the files among them.

    Args:
        source: a checkpoint, `.../step-N`.
        dtype: of the written weights; None: as they are stored.
        group: of all ranks, for their collectives.

    Returns:
        The type of the written weights, or of the first of them.

    Raises:
        CheckpointError: the checkpoint is of another model, or a file can't be written.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    reader = Reader(source)
    stored = reader.read_metadata().state_dict_metadata
    keys = {theirs: f"model.{ours}" for ours, theirs in spec.hf.names(args).items()}
    if missing := [key for key in keys.values() if key not in stored]:
        raise CheckpointError(f"{source} is not the model that its manifest says: {missing[0]} is missing")
    tensors = {
        theirs: torch.empty(stored[key].size, dtype=dtype or stored[key].properties.dtype, device="meta")
        for theirs, key in keys.items()
    }
    dtype = next(iter(tensors.values())).dtype  # what config.json says; the tensors may have several
    groups = list(_groups({name: value.nbytes for name, value in tensors.items()}, max_file_bytes))
    count = len(groups)
    numbers = [f"-{i:05}-of-{count:05}" if count > 1 else "" for i in range(1, count + 1)]
    files = {f"model{number}.safetensors": names for number, names in zip(numbers, groups, strict=True)}
    target = temporary_folder(folder)

    def read(name: str) -> Tensor:
        out = torch.empty_like(tensors[name], device="cpu")
        with alone():
            dcp.load({keys[name]: out}, storage_reader=reader, no_dist=True)
        return out

    def prepare() -> None:
        if rank == 0:
            begin(folder)
            make_folder(target)

    def write_weights() -> None:
        for file, names in list(files.items())[rank::world]:
            part = {name: tensors[name] for name in names}
            patiently(target, lambda path=target / file, part=part: _write_safetensors(path, part, read))  # type: ignore[misc]

    def finish() -> None:
        if rank != 0:
            return
        special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id} if tokenizer else {}
        sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
        if count > 1:
            total = {"total_size": sum(value.nbytes for value in tensors.values())}
            places = {name: file for file, names in files.items() for name in names}
            write_json(target / "model.safetensors.index.json", {"metadata": total, "weight_map": places})
        for path in tokenizer.files if tokenizer else ():
            with path.open("rb") as original, (target / path.name).open("wb") as copy:
                shutil.copyfileobj(original, copy)
        write_json(target / "generation_config.json", sampling | special)
        write_json(target / "config.json", spec.hf.config(args, str(dtype).removeprefix("torch.")) | special)
        commit(folder)

    try:
        for phase in (prepare, write_weights, finish):
            _together(phase, group, world)
    except CheckpointError:
        with suppress(Exception):
            discard(folder)
        raise
    return dtype


def _together(phase: Callable[[], None], group: dist.ProcessGroup | None, world: int) -> None:
    """Run a phase on every rank and wait for all; if it fails on one, all raise."""
    problem = None
    try:
        phase()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems: list[str | None] = [problem] * world
    if dist.is_initialized():
        dist.all_gather_object(problems, problem, group=group)
    for rank, text in enumerate(problems):
        if text:
            raise CheckpointError(f"can't export to Hugging Face: rank {rank}: {text}")


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write a file of the safetensors format, one tensor in memory at a time.

    8 bytes with the length of the header, the header (JSON), then the tensors' bytes
    (https://github.com/huggingface/safetensors#format).

    Args:
        tensors: names to types and shapes.
        read: gets a tensor by name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
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
    """Names in order, in groups of at most `limit` bytes; a larger one is alone."""
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
