"""Finding and loading a checkpoint. Every function is called by all ranks together."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from torchtitan.checkpoint.commit import committed_steps, damage, read_manifest, step_folder
from torchtitan.checkpoint.state import State, allocate_optimizer_state, model_state, optimizer_state, read_tensors
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.logging import logger


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that was loaded."""

    step: int
    train_state: dict[str, Any]
    """Everything but tensors: counters, schedule, data position."""
    manifest: dict[str, Any]


def load_newest(
    folder: Path,
    steps: Sequence[int],
    models: Sequence[nn.Module],
    optimizer: AnyOptimizer,
    exclude: Collection[str] = (),
) -> Resumed | None:
    """Load the newest of `steps` that is undamaged and resumable; None if there are no steps.

    Args:
        exclude: `model` and `optimizer` keep their current values if listed here.

    Raises:
        CheckpointError: none can be resumed, or it is of another model.
    """
    problems = []
    for step in reversed(steps):
        path = step_folder(folder, step)
        manifest, problem = _verified(path)
        if manifest is not None and manifest["model_only"]:
            problem = "holds only weights (checkpoint.last_save_model_only)"
        if manifest is None or problem:
            problems.append(f"{path}: {problem}")
            logger.error(f"Can't resume from {problems[-1]}")
            continue
        _load(path, models, optimizer, exclude)
        logger.info(f"Resumed from {path}")
        return Resumed(step, manifest["train_state"], manifest)
    if problems:
        raise CheckpointError(
            "no checkpoint can be resumed:\n" + "\n".join(problems) + "\nRestore one of them, or start again with "
            "another checkpoint.folder (checkpoint.initial_load_path loads only weights)."
        )
    return None


def load_initial(
    path: Path, models: Sequence[nn.Module], optimizer: AnyOptimizer, *, model_only: bool
) -> Resumed | None:
    """Start from a checkpoint of another run.

    Returns:
        None if `model_only`: only the weights were loaded.

    Raises:
        CheckpointError: it is damaged, of another model, or has only weights where more is needed.
    """
    manifest, problem = _verified(path)
    if manifest is None or problem:
        raise CheckpointError(f"checkpoint.initial_load_path: {path}: {problem}")
    if model_only:
        _load(path, models, optimizer, {"optimizer"})
        return None
    if manifest["model_only"]:
        raise CheckpointError(
            f"checkpoint.initial_load_path: {path} has only weights; set checkpoint.initial_load_model_only = true"
        )
    _load(path, models, optimizer)
    return Resumed(manifest["step"], manifest["train_state"], manifest)


def agreed_steps(folder: Path) -> list[int]:
    """The committed steps, as rank 0 sees them.

    Raises:
        CheckpointError: rank 0 can't read the folder.
    """
    found: list[int] | str = []
    if dist.get_rank() == 0:
        try:
            found = committed_steps(folder)
        except OSError as error:
            found = f"checkpoint.folder: can't read {folder}: {error.strerror or error}"
    found = from_rank_0(found)
    if isinstance(found, str):
        raise CheckpointError(found)
    return found


def from_rank_0(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _verified(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The manifest, and the first problem with the files; each rank reads a share of them."""
    manifest, problem = None, None
    try:
        manifest = read_manifest(path)
        problem = next(damage(path, manifest, dist.get_rank(), dist.get_world_size()), None)
    except (CheckpointError, KeyError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return manifest, next((p for p in problems if p), None)


def _load(path: Path, models: Sequence[nn.Module], optimizer: AnyOptimizer, exclude: Collection[str] = ()) -> None:
    state: State = {}
    if "model" not in exclude:
        state["model"] = model_state(models)
    if "optimizer" not in exclude:
        allocate_optimizer_state(optimizer)
        state["optimizer"] = optimizer_state(models, optimizer)
    if state:
        read_tensors(state, path)
