"""The tensors of a run under layout-free names: `model.<fqn>`, `optimizer.<fqn>.<slot>`, and
`ema.<fqn>`.

Hyper-parameters (learning rate, weight decay, ...) are not included: they come from the
configuration, so changes take effect on resume.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from torchtitan.checkpoint.format.manifest import Manifest, first_problem
from torchtitan.checkpoint.load import Reader, load
from torchtitan.config.load.extend import recorded_tokenizer
from torchtitan.config.load.toml_file import HERE
from torchtitan.config.registry import import_custom
from torchtitan.data.encode.tokenizer import Tokenizer, build_tokenizer
from torchtitan.models import ModelSpec, get_spec
from torchtitan.optim.ema import WeightAverage
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.parallel.collectives import local, sharded_like, storage_of
from torchtitan.utils.errors import CheckpointError, ConfigError, DamageError, UserError

State = dict[str, Any]


def model_state(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The weights of a model, or of this rank's stages, by their names in the whole model."""
    return {
        name: _plain(value)
        for model in models
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def _plain(weight: Tensor) -> Tensor:
    """The same memory without torchao's wrapper, which would be pickled into the checkpoint."""
    inner = storage_of(weight)
    return weight if inner is local(weight) else sharded_like(inner, weight)


def optimizer_state(models: Sequence[nn.Module], optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by parameter name, not copied."""
    state = optimizer.state
    return {
        f"{fqn}.{slot}": value
        for model in models
        for fqn, param in model.named_parameters()
        for slot, value in state[param].items()
        if isinstance(value, Tensor)
    }


@dataclass(frozen=True)
class TrainedModel:
    """The model that a run trains, with its optimizer and average: the contents of checkpoints."""

    models: Sequence[nn.Module]
    """This rank's pipeline stages, or the whole model."""
    optimizer: AnyOptimizer
    average: WeightAverage | None = None
    """The average of the weights, if the run keeps one."""
    pp_degree: int = 1
    """Pipeline-parallel degree. Ranks at one position of the pipeline hold the same tensors, or
    shards of them.
    """

    def tensors(self, exclude: Collection[str] = ()) -> State:
        """All tensors by section (`model`, `optimizer`, `ema`), not copied.

        Args:
            exclude: sections to leave out.
        """
        state: State = {}
        if "model" not in exclude:
            state["model"] = model_state(self.models)
        if "optimizer" not in exclude:
            state["optimizer"] = optimizer_state(self.models, self.optimizer)
        if self.average is not None and "ema" not in exclude:
            state["ema"] = self.average.current()
        return state

    def weights(self, dtype: torch.dtype, *, averaged: bool) -> State:
        """The parameters, or their average, in `dtype`, and the buffers."""
        state = model_state(self.models)
        if averaged and self.average is not None:
            state |= self.average.current()
        parameters = {name for model in self.models for name, _ in model.named_parameters()}
        return {
            "model": {name: x.to(dtype) if name in parameters else x for name, x in state.items()}
        }


def allocate_optimizer_state(optimizer: AnyOptimizer) -> None:
    """Make a new optimizer create its tensors, by a step with zero gradients and rate."""
    if any(optimizer.state.values()):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def read_weights(models: Sequence[nn.Module], path: Path, *, averaged: bool = False) -> None:
    """Fill a model, or a rank's stages of it, in place from a checkpoint. Reads only the local
    shards.

    Args:
        averaged: read the parameters from the average of the weights; buffers have none.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    reader = Reader(path)
    state = {"model": model_state(models)}
    if averaged:
        names = [name for model in models for name, _ in model.named_parameters()]
        state["ema"] = {name: state["model"].pop(name) for name in names}
    check_tensors(state, reader)
    load(state, reader)


def check_tensors(state: State, reader: Reader) -> None:
    """
    Raises:
        CheckpointError: a tensor of `state` is missing or has another shape, so the checkpoint is
        of another model or optimizer.
    """
    if wrong := differences(state, reader):
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        kind = "optimizer" if all(name.startswith("optimizer.") for name in wrong) else "model"
        keys, other = {
            "model": (
                "model.name, model.flavor and [model.overrides]",
                "choose another checkpoint.folder",
            ),
            "optimizer": (
                "optimizer.name",
                'start with a new one by checkpoint.exclude_from_loading = ["optimizer"]',
            ),
        }[kind]
        raise CheckpointError(
            f"{reader.path} holds another {kind} than this configuration builds: "
            f"{'; '.join(wrong[:3])}{more}.\n"
            f"Set {keys} to the values in its manifest.json, or {other}."
        )


def check_matches_manifest(model: nn.Module, reader: Reader) -> None:
    """
    Args:
        model: as the checkpoint's manifest describes it, on the meta device: it may be larger than
        any memory.

    Raises:
        DamageError: the checkpoint's weights don't match `model`.
    """
    if wrong := differences({"model": model_state([model])}, reader):
        raise DamageError(
            f"{reader.path} is damaged: it is not of the model in its manifest: {wrong[0]}"
        )


def differences(state: State, reader: Reader) -> list[str]:
    """The tensors of `state` that the checkpoint lacks, or has in another shape."""
    tensors = reader.read_metadata().state_dict_metadata
    wrong = []
    for name, value in flatten_state_dict(state)[0].items():
        if name not in tensors:
            wrong.append(f"{name} is missing")
            continue
        size = list(tensors[name].size)
        shape = list(value.shape)
        if size != shape:
            wrong.append(f"{name} is {size} in the checkpoint, {shape} in the model")
    return wrong


# ---- the model in a manifest


def model_of(
    step: Path, manifest: Manifest, custom_import: str | None = None
) -> tuple[ModelSpec, Any]:
    """Family and hyper-parameters of a checkpoint's model.

    Args:
        custom_import: module that registers the family. The module in the checkpoint's
            configuration is never imported, or its author could run any code here.

    Raises:
        UserError: the family is unknown, or the manifest doesn't describe a model of it.
    """
    settings = manifest.settings()
    sizes = dict(manifest.model)
    name = sizes.pop("name", "")
    module = settings.get("experimental", {}).get("custom_import")
    if custom_import:
        import_custom(custom_import)
    try:
        spec = get_spec(str(name))
    except ConfigError:
        if custom_import or not module:
            raise
        raise UserError(
            f"{step} is of the model family {name!a}, which the module {module!a} registers; if "
            f"you trust that module, add --custom-import {module!a}"
        ) from None
    try:
        args = type(next(iter(spec.flavors.values()))).model_validate(sizes)
    except ValidationError as error:
        problem = first_problem(error)
        raise DamageError(f"{step} is damaged: the model in its manifest: {problem}") from None
    return spec, args


def tokenizer_builder(step: Path, manifest: Manifest) -> Callable[[str | None], Tokenizer]:
    """Opens the tokenizer of a checkpoint's run, or one of the same kind in another folder.

    Raises:
        UserError: it is registered by a module that isn't imported.
    """
    settings = manifest.settings()
    make = recorded_tokenizer(settings, step)
    section = settings.get("model", {})
    texts = {key: value for key, value in section.items() if isinstance(value, str)}

    def build(assets: str | None) -> Tokenizer:
        folder = assets or texts.get("hf_assets_path", "").replace(HERE, str(step.parent))
        end, template = map(texts.get, ("end_of_document", "chat_template"))
        tokenizer = build_tokenizer(folder, make, end, template)
        tokenizer.stop_ids += tuple(manifest.ends)
        return tokenizer

    return build


def check_averaged(step: Path, manifest: Manifest) -> None:
    """
    Raises:
        UserError: the checkpoint has no average of the weights.
    """
    if "ema" in manifest.tensor_bytes:
        return
    if manifest.averaged:
        why = "its weights are the average; leave --ema out"
    else:
        why = "its run had no ema.enable = true"
    raise UserError(f"--ema: {step} has no average of the weights: {why}")
