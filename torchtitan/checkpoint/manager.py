"""When to save, what to resume, what to keep."""

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from torchtitan.checkpoint.commit import (
    MANIFEST,
    clean,
    committed_steps,
    damage,
    discard,
    disposable,
    read_manifest,
    remove,
    step_folder,
    unknown,
)
from torchtitan.checkpoint.dcp_storage import CommittingWriter, root_cause
from torchtitan.checkpoint.hf import export_hf
from torchtitan.checkpoint.state import (
    State,
    allocate_optimizer_state,
    model_state,
    optimizer_state,
    read_tensors,
)
from torchtitan.config import schema
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models import ModelSpec
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.logging import logger
from torchtitan.utils.phase import CHECKPOINT_GROUP
from torchtitan.utils.storage import is_remote, make_folder, patiently, storage_path


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that was loaded."""

    step: int
    train_state: dict[str, Any]
    """Everything but tensors: counters, schedule, data position."""
    manifest: dict[str, Any]


class Checkpointer:
    """Saves and resumes one run's model and optimizer. Every method is called by all ranks together."""

    def __init__(
        self,
        config: schema.Checkpoint,
        dump_folder: str,
        models: Sequence[nn.Module],
        optimizer: AnyOptimizer,
        about: dict[str, Any],
    ):
        """
        Args:
            models: this rank's pipeline stages, or the whole model.
            about: what the manifest records of the run: config, versions, data fingerprint.
        """
        self.config = config
        self.folder = storage_path(config.folder, dump_folder)
        self.models, self.optimizer, self.about = models, optimizer, about
        self.saving = config.enable and not config.load_only
        self._upload: Future[Any] | None = None
        self._staging: Future[Any] | None = None
        self._step_in_flight = 0
        self._stager: _Stager | None = None
        # A group of its own: a save in the background must not mix its collectives with training's.
        self._group = dist.new_group(backend="gloo", group_desc=CHECKPOINT_GROUP) if self.saving else None
        if self.saving and config.async_mode != "disabled":
            cuda = torch.cuda.is_available()
            overlap = config.async_mode == "async_with_pinned_mem"
            self._stager = _Stager(
                StagingOptions(
                    use_pinned_memory=cuda and overlap,
                    use_shared_memory=False,
                    use_async_staging=overlap,
                    use_non_blocking_copy=cuda and overlap,
                )
            )
        if self.saving:
            self._prepare_folder()

    def _prepare_folder(self) -> None:
        problem = None
        if dist.get_rank() == 0:
            try:
                make_folder(self.folder)
                if is_remote(self.folder):
                    probe = self.folder / ".writable"
                    patiently(probe, probe.touch)
                    patiently(probe, probe.unlink)
                if leftovers := clean(self.folder):
                    logger.info(f"Removed what an interrupted save left behind: {', '.join(leftovers)}")
                if others := [path.name for path in unknown(self.folder)]:
                    text = f"{', '.join(others)} in {self.folder} without {MANIFEST}"
                    logger.warning(f"Not a checkpoint of this project, or a damaged one: {text}")
                    if not committed_steps(self.folder):
                        problem = (
                            f"checkpoint.folder: there is {text}: no checkpoint that can be resumed. The run would "
                            "start anew and in time replace it; move it away, or choose another folder"
                        )
            except OSError as error:
                problem = f"checkpoint.folder: can't write to {self.folder}: {error.strerror or error}"
        if problem := _from_rank_0(problem):
            raise CheckpointError(problem)

    # ---- saving

    def due(self, step: int, last_step: int) -> bool:
        """Whether a checkpoint is to be saved after `step`."""
        first = step == 1 and self.config.enable_first_step_checkpoint
        return self.saving and (step % self.config.interval == 0 or step == last_step or first)

    def save(self, step: int, train_state: dict[str, Any], *, model_only: bool = False) -> None:
        """Save after `step`; in an async mode, return as soon as training may go on.

        Raises:
            CheckpointError: this save, or the one before in the background, failed.
        """
        self.wait()
        dtype = getattr(torch, self.config.export_dtype)
        if model_only:
            state: State = {"model": {name: value.to(dtype) for name, value in model_state(self.models).items()}}
        else:
            state = {"model": model_state(self.models), "optimizer": optimizer_state(self.models, self.optimizer)}
        manifest = {"step": step, "model_only": model_only, **self.about, "train_state": train_state}
        writer = CommittingWriter(step_folder(self.folder, step), manifest, self._purge)
        self._step_in_flight = step
        if self._stager is None:
            self._guard(lambda: dcp.save(state, storage_writer=writer, process_group=self._group))
            logger.info(f"Saved {writer.final}")
            return
        writer.per_thread_copy_ahead = 0  # what is staged is on the host; DCP would ask the first GPU for a stream
        response = dcp.async_save(state, storage_writer=writer, process_group=self._group, async_stager=self._stager)
        if isinstance(response, AsyncSaveResponse):
            self._staging, self._upload = response.staging_completion, response.upload_completion
        else:
            self._upload = response

    def export_hf(self, step: int, spec: ModelSpec, args: Any, tokenizer: Tokenizer) -> Path:
        """Write the checkpoint of `step` as Hugging Face safetensors, to the folder that is returned."""
        self.wait()
        folder = self.folder / f"step-{step}-hf"
        dtype = getattr(torch, self.config.export_dtype)
        export_hf(step_folder(self.folder, step), folder, spec, args, dtype, tokenizer, group=self._group)
        return folder

    def wait_staged(self) -> None:
        """Wait until a save in the background has its copy of the weights: before they change."""
        if self._staging is not None:
            self._guard(self._staging.result)
            self._staging = None

    def wait(self) -> None:
        """Wait for a save in the background to be committed."""
        self.wait_staged()
        if self._upload is not None:
            upload, self._upload = self._upload, None
            self._guard(upload.result)
            logger.info(f"Saved {step_folder(self.folder, self._step_in_flight)}")

    def close(self) -> None:
        """Finish the save in flight and release the staging buffers."""
        try:
            self.wait()
        finally:
            if self._stager is not None:
                self._stager.release()
                self._stager = None
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def _guard(self, action: Callable[[], Any]) -> None:
        """Run a part of a save; a failure becomes one sentence, and leaves nothing half-written."""
        try:
            action()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            target = step_folder(self.folder, self._step_in_flight)
            cause = _describe(error)
            with suppress(Exception):
                discard(target)
            advice = "Free some space or set checkpoint.folder to another disk" if _is_full(cause) else "Mend that"
            raise CheckpointError(
                f"can't save {target}: {cause}. {advice}, then run the same command again: {self.last_good()}."
            ) from error

    def last_good(self) -> str:
        """The newest complete checkpoint, in words."""
        steps = committed_steps(self.folder) if self.config.enable else []
        return f"the last good checkpoint is {step_folder(self.folder, steps[-1])}" if steps else "no checkpoint exists"

    def _purge(self) -> None:
        """Delete all but the newest `keep_latest_k` checkpoints, never the newest that can be resumed."""
        if self.config.keep_latest_k:
            for step in disposable(self.folder, self.config.keep_latest_k):
                remove(step_folder(self.folder, step))

    # ---- resuming

    def resume(self) -> Resumed | None:
        """Load the newest complete checkpoint of this run (or `load_step`); None if there is none.

        A damaged one is named and the one before it is taken.

        Raises:
            CheckpointError: `load_step` is missing or damaged, or every checkpoint is, or it is of another model.
        """
        if not self.config.enable:
            return None
        steps = self._listed()
        if self.config.load_step >= 0:
            if self.config.load_step not in steps:
                have = ", ".join(map(str, steps)) or "none"
                raise CheckpointError(
                    f"checkpoint.load_step: {self.folder} has no step {self.config.load_step} (it has: {have})"
                )
            steps = [self.config.load_step]
        return self._load_newest(steps, set(self.config.exclude_from_loading))

    def rewind(self, step: int) -> Resumed | None:
        """Load the newest complete checkpoint before `step` of the run that is under way; None if there is none.

        Raises:
            CheckpointError: every one is damaged, or the save in flight failed.
        """
        self.wait()
        return self._load_newest([s for s in self._listed() if s < step], set())

    def _load_newest(self, steps: Sequence[int], exclude: set[str]) -> Resumed | None:
        problems = []
        for step in reversed(steps):
            path = step_folder(self.folder, step)
            manifest, problem = self._verified(path)
            if manifest is not None and manifest["model_only"]:
                problem = "holds only weights (checkpoint.last_save_model_only)"
            if manifest is None or problem:
                problems.append(f"{path}: {problem}")
                logger.error(f"Can't resume from {problems[-1]}")
                continue
            self._load(path, exclude)
            logger.info(f"Resumed from {path}")
            return Resumed(step, manifest["train_state"], manifest)
        if problems:
            raise CheckpointError(
                "no checkpoint can be resumed:\n" + "\n".join(problems) + "\nRestore one of them, or start anew with "
                "another checkpoint.folder (checkpoint.initial_load_path takes weights only)."
            )
        return None

    def _listed(self) -> list[int]:
        """The committed steps, as rank 0 sees them."""
        found: list[int] | str = []
        if dist.get_rank() == 0:
            try:
                found = committed_steps(self.folder)
            except OSError as error:
                found = f"checkpoint.folder: can't read {self.folder}: {error.strerror or error}"
        found = _from_rank_0(found)
        if isinstance(found, str):
            raise CheckpointError(found)
        return found

    def load_initial(self, path: Path) -> Resumed | None:
        """Start from a checkpoint of another run: weights only, or everything as `initial_load_model_only` says."""
        manifest, problem = self._verified(path)
        if manifest is None or problem:
            raise CheckpointError(f"checkpoint.initial_load_path: {path}: {problem}")
        if self.config.initial_load_model_only:
            self._load(path, {"optimizer"})
            return None
        if manifest["model_only"]:
            raise CheckpointError(
                f"checkpoint.initial_load_path: {path} has only weights; set checkpoint.initial_load_model_only = true"
            )
        self._load(path, set())
        return Resumed(manifest["step"], manifest["train_state"], manifest)

    def _verified(self, path: Path) -> tuple[dict[str, Any] | None, str | None]:
        """The manifest, and what is wrong with the files; the ranks share the reading."""
        manifest, problem = None, None
        try:
            manifest = read_manifest(path)
            problem = next(damage(path, manifest, dist.get_rank(), dist.get_world_size()), None)
        except (CheckpointError, KeyError) as error:
            problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        return manifest, next((p for p in problems if p), None)

    def _load(self, path: Path, exclude: set[str]) -> None:
        state: State = {}
        if "model" not in exclude:
            state["model"] = model_state(self.models)
        if "optimizer" not in exclude:
            allocate_optimizer_state(self.optimizer)
            state["optimizer"] = optimizer_state(self.models, self.optimizer)
        if state:
            read_tensors(state, path)


class _Stager(DefaultStager):
    """DCP's, with three faults mended.

    Torch before 2.13 drops its buffers after each save. Its copies begin while the optimizer, which was only enqueued,
    may still write. And its thread opens a context on the first GPU, whichever this rank uses.
    """

    def __init__(self, options: StagingOptions):
        super().__init__(options)
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._drop_buffers = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None

    def stage(self, state_dict: State, **kwargs: Any) -> Any:
        if self._staging_stream is not None:
            self._staging_stream.wait_stream(torch.accelerator.current_stream())
        return super().stage(state_dict, **kwargs)

    def _stage(self, state_dict: State, **kwargs: Any) -> Any:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        return super()._stage(state_dict, **kwargs)

    def close(self) -> None: ...

    def release(self) -> None:
        super().close()
        self._drop_buffers()


def _from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _describe(error: BaseException) -> str:
    """Rank and reason of a failed save: DCP wraps the ranks' exceptions."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = sorted(failures.items())[0]
        return f"rank {rank}: {_describe(cause)}"
    cause = root_cause(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def _is_full(cause: str) -> bool:
    return any(f"[Errno {code}]" in cause for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
