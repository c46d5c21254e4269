"""The tensors of a run under layout-free names: `model.<fqn>` and `optimizer.<fqn>.<slot>`.

Hyper-parameters (learning rate, weight decay, ...) are not included: they come from the configuration, so changes take
effect on resume.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan.checkpoint.dcp_storage import Reader, load
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.utils.errors import CheckpointError, DamageError

State = dict[str, Any]


def model_state(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The weights of a model or of this rank's pipeline stages, by the names they have in the whole model."""
    return {
        name: _plain(value)
        for model in models
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def _plain(weight: Tensor) -> Tensor:
    """The same memory without torchao's wrapper, which would be pickled into the checkpoint."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if not is_traceable_wrapper_subclass(local):
        return weight
    inner = getattr(local, local.__tensor_flatten__()[0][0])
    if not isinstance(weight, DTensor):
        return inner
    layout = {"shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(inner, weight.device_mesh, weight.placements, run_check=False, **layout)


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


def allocate_optimizer_state(optimizer: AnyOptimizer) -> None:
    """Make a new optimizer create its tensors, by a step with zero gradients and zero learning rate."""
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


def read_tensors(state: State, path: Path) -> None:
    """Fill the tensors of `state` in place from a checkpoint.

    Raises:
        CheckpointError: it is damaged, or of another model.
    """
    reader = Reader(path)
    check_tensors(state, reader)
    load(state, reader)


def check_tensors(state: State, reader: Reader) -> None:
    """
    Raises:
        CheckpointError: a tensor of `state` is missing or has another shape, so the checkpoint is of another model.
    """
    if wrong := differences(state, reader):
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{reader.path} holds another model than this configuration builds: {'; '.join(wrong[:3])}{more}.\n"
            "Set model.name, model.flavor and [model.overrides] to the values in its manifest.json, "
            "or choose another checkpoint.folder."
        )


def check_own_model(model: nn.Module, reader: Reader) -> None:
    """
    Args:
        model: as the checkpoint's manifest describes it, on the meta device: it may be larger than any memory.

    Raises:
        DamageError: the checkpoint's weights are not those of `model`.
    """
    if wrong := differences({"model": model_state([model])}, reader):
        raise DamageError(f"{reader.path} is damaged: it is not of the model in its manifest: {wrong[0]}")


def differences(state: State, reader: Reader) -> list[str]:
    """The tensors of `state` that the checkpoint lacks, or has in another shape."""
    stored = reader.read_metadata().state_dict_metadata
    wrong = []
    for name, value in flatten_state_dict(state)[0].items():
        if name not in stored:
            wrong.append(f"{name} is missing")
        elif (size := tuple(stored[name].size)) != tuple(value.shape):
            wrong.append(f"{name} is {list(size)} in the checkpoint, {list(value.shape)} in the model")
    return wrong
