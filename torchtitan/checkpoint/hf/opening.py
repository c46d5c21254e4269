"""Opens a Hugging Face folder and checks that its tensors match its `config.json`. Imports, runs
that start from a folder, generation and evaluation all open it here.
"""

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan.checkpoint.hf.folder import SafetensorsReader, read_hf_config
from torchtitan.checkpoint.state import model_state
from torchtitan.models import HFNames, ModelSpec, hf_map, spec_of_hf
from torchtitan.models.hf.mapping import differing_settings
from torchtitan.models.hf_names import hf_slices
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.formats import read_json_object

GENERATION = "generation_config.json"
HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_BUFFERS = "*rotary_emb.inv_freq"
"""RoPE's frequencies in old files, which transformers ignores: they follow from `config.json`."""


class HFModel(NamedTuple):
    """The model in a folder, checked."""

    reader: SafetensorsReader
    spec: ModelSpec
    args: Any
    """Hyper-parameters, from `config.json`; `notes` has the exceptions."""
    notes: list[str]
    """Messages about differences from `config.json`, and about tensors that aren't read."""
    ends: list[int]
    """Every token that ends a text by `config.json` or `generation_config.json`: they may name
    different tokens, such as the end of a turn and the end of a text.
    """
    generation: dict[str, Any]
    """The other entries of `generation_config.json`."""


def open_hf(folder: Path, spec: ModelSpec | None = None, run: Any = None) -> HFModel:
    """Open a folder, and check that its tensors are the model of its `config.json`.

    Args:
        spec: the model's family; None: the one in `config.json`.
        run: hyper-parameters of a run that reads the folder, which must describe the same model.
            The reader then has the run's weights.

    Raises:
        CheckpointError: tensors are missing, unknown or of other shapes, or the run's model
            differs.
        ConfigError: no family can represent the model, or `spec` isn't its family.
    """
    config = read_hf_config(folder)
    spec = spec or spec_of_hf(config)
    hf = hf_map(spec)
    config_args = hf.args(config)
    reader = SafetensorsReader(folder, hf.names(config_args))
    args, notes = _adjust_args(reader, spec, config_args)
    if args is not config_args:
        reader = SafetensorsReader(folder, hf.names(args))
    ignored, problems = check_tensors(reader, spec, args)
    if run is not None:
        problems += _model_mismatch(reader, spec, args, run, notes)
    if problems:
        raise CheckpointError("\n".join(problems))
    if run is not None and hf.names(run) != reader.names:
        reader = SafetensorsReader(folder, hf.names(run))
        ignored = check_tensors(reader, spec, run)[0]
    if reader.quantization:
        notes.append(f"Dequantized from {reader.quantization.method} to bfloat16")
    if reader.extra_files:
        more = _more(reader.extra_files, 1)
        notes.append(f"Not read, because transformers doesn't: {reader.extra_files[0].name}{more}")
    if ignored:
        more = _more(ignored, 1)
        notes.append(f"Not read, because the model has no place for it: {ignored[0]}{more}")
    ends, generation = _read_generation(folder, config_args.vocab_size)
    return HFModel(reader, spec, args if run is None else run, notes, ends, generation)


def _read_generation(folder: Path, vocab_size: int) -> tuple[list[int], dict[str, Any]]:
    """`ends` and `generation` of a folder.

    Raises:
        CheckpointError: a file can't be read.
    """
    ends: list[int] = []
    for name in ("config.json", GENERATION):
        file = folder / name
        try:
            content = read_json_object(file) if file.is_file() else {}
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from None
        eos = content.pop("eos_token_id", None)
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        # transformers writes defaults of its classes there, which small vocabularies lack
        ends += [i for i in ids if type(i) is int and 0 <= i < vocab_size]
    content.pop("transformers_version", None)
    try:
        json.dumps(content, allow_nan=False)
    except ValueError:  # no manifest can hold it
        raise CheckpointError(f"{file} holds NaN or Infinity") from None
    return list(dict.fromkeys(ends)), content


# ---- hyper-parameters


def _adjust_args(reader: SafetensorsReader, spec: ModelSpec, args: Any) -> tuple[Any, list[str]]:
    """The hyper-parameters in `config.json`, corrected where transformers goes by the tensors, and
    notes on the corrections.
    """
    notes = []
    if modules := spec.mtp_modules(args):
        key = f"config.json: num_nextn_predict_layers is {modules}"
        prefixes = tuple(f"model.layers.{i}." for i in args.mtp_layers)
        names = [name for name in _their_names(reader) if name.startswith(prefixes)]
        missing_names = [name for name in names if name not in reader.entries]
        if len(missing_names) == len(names):
            # transformers saves the key without the modules.
            notes.append(f"{key}, but the folder has no such modules: read without them")
            args = args.model_copy(update={"n_mtp": 0})
        elif missing_names:
            raise CheckpointError(
                f"{reader.folder}: {key}, but of these modules {missing_names[0]} is missing"
                f"{_more(missing_names, 1)}; set the key to 0 to read the model without them"
            )
    both = reader.entries.keys() >= {HEAD, _EMBEDDING}
    if spec.tied_modules(args) and both and not reader.equal(HEAD, _EMBEDDING):
        notes.append(
            f"config.json: tie_word_embeddings is true, but {HEAD} is not {_EMBEDDING}: read as a "
            "model that isn't tied, as transformers 5 does"
        )
        args = args.model_copy(update={"tie_embeddings": False})
    return args, notes


def _model_mismatch(
    reader: SafetensorsReader, spec: ModelSpec, args: Any, run: Any, notes: list[str]
) -> list[str]:
    """Differences between the run's model and the folder's, as lines; empty if they match."""
    differences = differing_settings(run, args)
    if HEAD in reader.entries and not spec.tied_modules(run):
        differences.pop("tie_embeddings", None)  # the folder has a separate head
    if spec.mtp_modules(run) > spec.mtp_modules(args):
        differences["n_mtp"] = f"n_mtp = {spec.mtp_modules(args)}"
    if not differences:
        return []
    advice = f"Set [model.overrides] {', '.join(differences.values())}."
    if any("rope" in name for name in differences):
        advice += (
            " To train on with another RoPE on purpose, give it in [[training.stages]] with "
            "from_step = 1."
        )
    return [f"{reader.folder} holds another model than this configuration builds.", *notes, advice]


# ---- the tensors


def check_tensors(
    reader: SafetensorsReader, spec: ModelSpec, args: Any
) -> tuple[list[str], list[str]]:
    """
    Returns:
        The folder's tensors that the family ignores, and problems with the others.
    """
    names = dict.fromkeys(_their_names(reader))
    copies = {copy: name for copy, name in _copies(reader.names) if copy in reader.entries}
    problems = [f"{name} is missing" for name in names if name not in reader.entries]
    tied = spec.tied_modules(args)  # then a head is the embedding: see _adjust_args
    ignored = []
    for name in sorted(reader.entries.keys() - names - copies.keys()):
        if hf_map(spec).ignores(name, args) and _is_extra(name, reader):
            ignored.append(name)
        elif not (fnmatchcase(name, _BUFFERS) or (tied and name == HEAD)):
            problems.append(f"{name} is unknown")
    if not problems:  # else the model could be of any size
        problems = reader.problems(_shapes(spec, args, reader.names))
    if not problems:
        pairs = copies.items()
        problems = [f"{copy} is not {name}" for copy, name in pairs if not reader.equal(copy, name)]
    if problems:
        some = f"{'; '.join(problems[:3])}{_more(problems, 3)}"
        problems = [f"{reader.folder} is not the model of its config.json: {some}"]
    return ignored, problems


def _is_extra(name: str, reader: SafetensorsReader) -> bool:
    """Whether a tensor of an ignored pattern is outside the model's layers. A layer behind the last
    one predicts further tokens; otherwise `config.json` has too few layers.
    """
    layer = re.match(r"model\.layers\.\d+\.", name)
    return layer is None or f"{layer[0]}eh_proj.weight" in reader.entries


def _their_names(reader: SafetensorsReader) -> list[str]:
    return [hf_slice.name for slices in reader.slices.values() for hf_slice in slices]


def _copies(names: HFNames) -> Iterable[tuple[str, str]]:
    """Pairs of a name that only repeats a tensor, and the tensor's name."""
    for theirs in names.values():
        for hf_slice in hf_slices(theirs):
            yield from ((copy, hf_slice.name) for copy in hf_slice.copies)


def _shapes(spec: ModelSpec, args: Any, names: HFNames) -> dict[str, torch.Size]:
    """The shapes of all tensors that a model needs from a folder."""
    model = meta_model(spec, args)
    buffers = {name for name, _ in model.named_buffers()} - names.keys()
    state = model_state([model])
    return {name: value.shape for name, value in state.items() if name not in buffers}


def _more(items: list[Any], shown: int) -> str:
    return f" (and {len(items) - shown} more)" if len(items) > shown else ""


def meta_model(spec: ModelSpec, args: Any) -> nn.Module:
    """A model on the meta device, without memory."""
    with torch.device("meta"):
        return spec.build(args, None)
