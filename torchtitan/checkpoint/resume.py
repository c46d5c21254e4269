"""Finding and loading a checkpoint.

All ranks call each function together, except for `steps_to_resume`.
"""

import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import torch.distributed as dist

from torchtitan.checkpoint.backend import Storage
from torchtitan.checkpoint.commit import step_folder
from torchtitan.checkpoint.format.index import data_files
from torchtitan.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from torchtitan.checkpoint.load import Reader, load
from torchtitan.checkpoint.state import TrainedModel, allocate_optimizer_state, check_tensors
from torchtitan.checkpoint.writer import VISIBLE_WITHIN
from torchtitan.data.read.contents import FileLists
from torchtitan.parallel.agree import from_rank_0, together
from torchtitan.utils.errors import CheckpointError, DamageError
from torchtitan.utils.logging import logger
from torchtitan.utils.process import first_of_node
from torchtitan.utils.wording import flat

_NUMBERS = (
    *("model.", "optimizer.", "lr_scheduler.", "ema.", "training.", "moe.", "quantize."),
    *("guard.", "debug.", "experimental.", "custom."),
    *("checkpoint.load_step", "checkpoint.exclude_from_loading"),
)
"""Beginnings of the keys that change what a run computes, apart from rounding."""
_SAME_NUMBERS = (
    "training.steps",
    "lr_scheduler.total_steps",
    "lr_scheduler.warmup_steps",
    "training.local_batch_size",
    "training.loss_chunks",
    "training.enable_cpu_offload",
    "training.dataloader.",
    "training.gc_",
    "optimizer.implementation",
    "ema.validation",
    "ema.export",
    "model.print_after_conversion",
    "debug.report_device_syncs",
    "guard.weight_hash_freq",
    "guard.straggler_",
)
"""Beginnings of keys among these that may differ when the same command is repeated."""


@dataclass(frozen=True)
class Resumed:
    """A loaded checkpoint."""

    step: int
    train_state: dict[str, Any]
    """Everything except tensors: counters, schedule, data position."""
    manifest: Manifest
    path: Path

    def data_files(self) -> FileLists:
        """The files of the checkpoint's data sources.

        Raises:
            DamageError: the list can't be read.
        """
        return data_files(self.path, self.manifest)


def load_newest(
    storage: Storage,
    folder: Path,
    steps: Sequence[int],
    trained: TrainedModel,
    exclude: Collection[str] = (),
) -> Resumed | None:
    """Load the newest of `steps` that is undamaged and resumable; None if there are no steps.

    Args:
        exclude: sections (`model`, `optimizer`, `ema`) that keep their current values.

    Raises:
        CheckpointError: none can be resumed, or the newest is of another model.
    """
    problems = []
    for step in reversed(steps):
        path = step_folder(folder, step)
        try:
            manifest, reader = _open(storage, path)
            if manifest.step != step:
                raise DamageError(f"{path}: its manifest is of step {manifest.step}")
            if manifest.model_only:
                raise DamageError(f"{path} holds only weights (checkpoint.last_save_model_only)")
            _load(reader, manifest, trained, exclude)
        except DamageError as error:
            problems.append(str(error))
            logger.error(f"Can't resume: {error}")
            continue
        logger.info(f"Resumed from {path}")
        return Resumed(step, manifest.state(), manifest, path)
    if problems:
        raise CheckpointError(
            "no checkpoint can be resumed:\n" + "\n".join(problems) + "\nRestore one of them, or "
            "start again with another checkpoint.folder (checkpoint.initial_load_path loads only "
            "weights)."
        )
    return None


def load_initial(
    storage: Storage, path: Path, trained: TrainedModel, *, model_only: bool
) -> Resumed:
    """Start from a checkpoint of another run.

    Args:
        model_only: load only the weights.

    Raises:
        CheckpointError: the checkpoint is damaged, of another model, or has only weights although
            `model_only` is False.
    """
    try:
        manifest, reader = _open(storage, path)
        if manifest.model_only and not model_only:
            raise CheckpointError(
                f"{path} has only weights; set checkpoint.initial_load_model_only = true"
            )
        _load(reader, manifest, trained, {"optimizer", "ema"} if model_only else ())
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.initial_load_path: {error}") from error
    return Resumed(manifest.step, manifest.state(), manifest, path)


def agreed_steps(
    storage: Storage, folder: Path, load_step: int = -1, config: str = ""
) -> list[int]:
    """`steps_to_resume`, as rank 0 sees them."""

    def look() -> list[int]:
        if dist.get_rank():
            return []
        return steps_to_resume(storage, folder, load_step, config)

    return from_rank_0(together(look))


def steps_to_resume(storage: Storage, folder: Path, load_step: int, config: str) -> list[int]:
    """The steps that a start may resume from, oldest first: all, or only `load_step` if it isn't
    -1.

    If the same command has gone back to `load_step` before, and has saved the newest step since, it
    continues from there. It is the same if it computes the same numbers, on any layout and for any
    time.

    Args:
        config: this run's configuration, as in manifests.

    Raises:
        CheckpointError: there is no `load_step`, or the folder can't be read.
    """
    try:
        steps = storage.steps(folder)
        if load_step < 0:
            return steps
        for later in reversed([other for other in steps if other > load_step]):
            path = step_folder(folder, later)
            with suppress(DamageError, OSError):
                settings = read_manifest(path, storage.manifest_bytes(path)).settings()
                if _comparable(settings) == _comparable(tomli.loads(config)):
                    return steps
                break
        steps = sorted([*steps, *storage.steps(folder, abandoned=True)])
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.folder: can't read {folder}: {error.strerror or error}"
        ) from None
    if load_step in steps:
        return [load_step]
    raise CheckpointError(
        f"checkpoint.load_step: {folder} has no step {load_step} (it has: "
        f"{', '.join(map(str, steps)) or 'none'})"
    )


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in flat(settings).items()
        if key.startswith(_NUMBERS) and not key.startswith(_SAME_NUMBERS)
    }


def wait_until_visible(path: Path, storage: Storage) -> bytes | None:
    """Wait until every node sees the manifest that rank 0 sees. A network file system may show a
    commit late.

    Returns:
        The manifest's content, damaged or not; None if rank 0 can't read it.

    Raises:
        CheckpointError: on every rank, if a node doesn't see it within `VISIBLE_WITHIN` seconds.
    """

    def read() -> bytes | None:
        try:
            return storage.manifest_bytes(path)
        except OSError:
            return None

    expected = from_rank_0(read() if dist.get_rank() == 0 else None)

    def wait() -> None:
        start = time.monotonic()
        pause = 0.05
        while expected is not None and not storage.sees(path, expected):
            if time.monotonic() - start > VISIBLE_WITHIN:
                raise CheckpointError(
                    f"rank {dist.get_rank()} on {socket.gethostname()} doesn't see "
                    f"{path / MANIFEST} as rank 0 does, after {VISIBLE_WITHIN:g} s; checkpoints "
                    "must be in a folder that all nodes share, or at a URL"
                )
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    together(wait if first_of_node() else lambda: None)
    return expected


def _open(storage: Storage, path: Path) -> tuple[Manifest, Reader]:
    """Open a checkpoint and check that it looks intact: each rank checks the sizes of some files.

    Only rank 0 reads the manifest and the index.

    Raises:
        DamageError: it is damaged.
        CheckpointError: a rank doesn't see it.
    """
    content = wait_until_visible(path, storage)
    manifest = together(lambda: read_manifest(path, content))

    def fetch() -> bytes | None:
        return storage.index_bytes(path, manifest) if dist.get_rank() == 0 else None

    index = from_rank_0(together(fetch))

    def check() -> Reader:
        reader = storage.reader(path, manifest, index)
        reader.check_files(manifest, dist.get_rank(), dist.get_world_size())
        return reader

    return manifest, together(check)


def _load(
    reader: Reader, manifest: Manifest, trained: TrainedModel, exclude: Collection[str]
) -> None:
    """Load the tensors in place.

    Raises:
        DamageError: a tensor is damaged; some may be loaded already, so load another checkpoint.
        CheckpointError: the tensors are of another model.
    """
    if trained.average is not None and "ema" not in {*exclude, *manifest.tensor_bytes}:
        logger.info(f"{reader.path} has no average of the weights: it starts from the weights")
        exclude = {*exclude, "ema"}
    if "optimizer" not in exclude:
        allocate_optimizer_state(trained.optimizer)
    if state := trained.tensors(exclude):
        together(lambda: check_tensors(state, reader))
        load(state, reader)
