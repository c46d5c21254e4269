"""The checkpoints of one run: saving, retention and resuming."""

import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.checkpoint.backend import Storage
from torchtitan.checkpoint.commit import discard, go_back, prepare, purge, step_folder
from torchtitan.checkpoint.format.manifest import CheckpointInfo, validate
from torchtitan.checkpoint.load import PhaseError, describe
from torchtitan.checkpoint.resume import Resumed, agreed_steps, load_initial, load_newest
from torchtitan.checkpoint.save import Stager, Writer, build_stager, save
from torchtitan.checkpoint.state import TrainedModel
from torchtitan.config.sections import schema
from torchtitan.data.read.contents import CONTENTS
from torchtitan.parallel.agree import from_rank_0, together
from torchtitan.parallel.collectives import local
from torchtitan.utils.activity import CHECKPOINT_GROUP, SAVING, phase
from torchtitan.utils.device import local_ranks
from torchtitan.utils.errors import CheckpointError, FormatBugError, from_another_rank
from torchtitan.utils.logging import event, logger
from torchtitan.utils.storage import storage_path
from torchtitan.utils.wording import listed, plural, show_size


class Checkpointer:
    """Saves and resumes one run's tensors. Every method is called by all ranks together."""

    def __init__(
        self,
        config: schema.Checkpoint,
        dump_folder: str,
        trained: TrainedModel,
        run_info: dict[str, Any],
        confirm: Callable[[], object] = lambda: None,
        data_files: Callable[[], bytes] | None = None,
        storage: Storage | None = None,
    ):
        """
        Args:
            run_info: entries of the manifests: config, versions, data fingerprint.
            confirm: called by rank 0 before it writes to the folder; raises if another run has
                locked it.
            data_files: renders the list of data files, for checkpoints that can be resumed.
            storage: storage of the checkpoints; None: folders.

        Raises:
            CheckpointError: the folder can't be written to, or holds only another program's
                checkpoints.
        """
        self.config = config
        self.folder = storage_path(config.folder, dump_folder)
        self.trained = trained
        self.run_info = run_info
        self.confirm = confirm
        self.data_files = data_files
        self.storage = storage or Storage()
        self.exports_average = trained.average is not None and trained.average.config.export
        self.saving = config.enable and not config.load_only
        self._writing: Future[Any] | None = None
        self._staging: Future[Any] | None = None
        self._step_in_flight = 0
        self.newest_step = 0
        """The step last saved or resumed from, on rank 0; 0 if there is none."""
        self.group: dist.ProcessGroup | None = None
        """The group of all ranks for the collectives of saves and exports."""
        self._stager: Stager | None = None
        if not self.saving:
            return
        # The collectives of a save in the background must not mix with training's collectives.
        self.group = dist.new_group(backend="gloo", group_desc=CHECKPOINT_GROUP)
        self._stager = build_stager(config.async_mode)
        problem = from_rank_0(prepare(self.folder) if dist.get_rank() == 0 else None)
        if problem:
            raise CheckpointError(problem)

    # ---- saving

    def due(self, step: int, last_step: int) -> bool:
        """Whether to save after `step`."""
        first = step == 1 and self.config.enable_first_step_checkpoint
        return self.saving and (step % self.config.interval == 0 or step == last_step or first)

    def log_copies(self) -> None:
        """Log the host memory that copies of the state will occupy, pinned with CUDA. The state
        exists after the first step.
        """
        if not self.saving or self.config.async_mode != "async_with_pinned_mem":
            return
        tensors = [x for section in self.trained.tensors().values() for x in section.values()]
        size = sum(local(x).nbytes for x in tensors)
        ranks = local_ranks()
        logger.info(
            f'checkpoint.async_mode "{self.config.async_mode}": from the first save on, copies of '
            f"the state take {show_size(size)} of host memory per rank, "
            f"{show_size(ranks * size)} for {plural(ranks, 'rank')} here"
        )

    def save(self, step: int, train_state: dict[str, Any], *, model_only: bool = False) -> None:
        """Save after `step`. In the async modes, return as soon as training may continue.

        Raises:
            CheckpointError: this save failed, or the previous one in the background.
        """
        self.wait()
        content = {
            "step": step,
            "model_only": model_only,
            **self.run_info,
            "train_state": train_state,
        }
        if model_only:
            dtype = getattr(torch, self.config.export_dtype)
            state = self.trained.weights(dtype, averaged=self.exports_average)
            content["averaged"] = self.exports_average
            content["train_state"] = {k: v for k, v in train_state.items() if k != "ema"}
        else:
            state = self.trained.tensors()
        extra_files = {}
        if self.data_files is not None and not model_only:
            extra_files[CONTENTS] = self.data_files()
        target = step_folder(self.folder, step)

        def open_writer() -> Writer:
            return self.storage.writer(
                target,
                validate(CheckpointInfo, content),
                self.confirm,
                self._on_commit,
                extra_files=extra_files,
                staged=self._stager is not None,
            )

        self._step_in_flight = step
        write = partial(
            save, open_writer=open_writer, group=self.group, pp_degree=self.trained.pp_degree
        )
        if self._stager is None:
            self._guard(lambda: write(state))
            return
        copies = self._stager.stage(state)
        if isinstance(copies, Future):
            self._staging = copies
        thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._writing = thread.submit(write, copies)
        thread.shutdown(wait=False)

    def wait_staged(self) -> None:
        """Wait until a save in the background has copied the weights, before they change."""
        if self._staging is not None:
            self._guard(self._staging.result)
            self._staging = None

    def wait(self) -> None:
        """Wait until a save in the background is committed."""
        self.wait_staged()
        if self._writing is not None:
            writing = self._writing
            self._writing = None
            with phase("saves", SAVING):
                self._guard(writing.result)

    def settle(self, seconds: float) -> None:
        """After an error, wait this long for a save in the background to end. Never raises."""
        if self._writing is not None:
            wait([self._writing], timeout=seconds)

    def _on_commit(self) -> None:
        """Report a complete checkpoint and delete old ones; on rank 0, in the committing thread."""
        step = self._step_in_flight
        self.newest_step = step
        logger.info(f"Saved {step_folder(self.folder, step)}", extra=event("saved", step))
        self._purge(step)

    def close(self) -> None:
        """Finish the save in flight and release the staging buffers."""
        try:
            self.wait()
        finally:
            if self._stager is not None:
                self._stager.release()
                self._stager = None
            if self.group is not None:
                dist.destroy_process_group(self.group)
                self.group = None

    def _guard(self, action: Callable[[], Any]) -> None:
        """Run a step of a save; if it fails, delete the incomplete checkpoint and raise one error.

        If the ranks couldn't agree that it failed, some may still write, or rank 0 may commit: then
        the next start deletes the remains.
        """
        try:
            action()
        except Exception as error:
            agreed = isinstance(error, PhaseError | FormatBugError)
            if from_another_rank(error) and not agreed:
                raise  # the cause is that the other rank ended
            target = step_folder(self.folder, self._step_in_flight)
            cause = describe(error)
            if agreed and dist.get_rank() == 0:
                with suppress(Exception):
                    discard(target)
            failure = CheckpointError(
                f"can't save {target}: {cause}. {_advice(cause)}: {self.last_good()}."
            )
            failure.on_all_ranks = agreed
            raise failure from error

    def last_good(self) -> str:
        """A phrase that names the newest complete checkpoint."""
        steps = self.storage.steps(self.folder) if self.config.enable else []
        if not steps:
            return "no checkpoint exists"
        return f"the last good checkpoint is {step_folder(self.folder, steps[-1])}"

    def _purge(self, step: int) -> None:
        """Delete the checkpoints up to `step` that retention doesn't keep."""
        purge(self.folder, self.config.keep_latest_k, self.config.keep_every_n, step)

    # ---- resuming

    def resume(self) -> Resumed | None:
        """Load the newest complete checkpoint of this run, or `load_step`; None if there is none.

        A damaged checkpoint is reported, and the previous one is loaded instead. If the same
        command has gone back to `load_step` before, and saved since, it continues from there.

        Raises:
            CheckpointError: `load_step` or every checkpoint is missing or damaged, or they are of
                another model.
        """
        if not self.config.enable:
            return None
        folder = self.folder
        step = self.config.load_step
        steps = agreed_steps(self.storage, folder, step, self.run_info["config"])
        if steps and steps[-1] > step >= 0:
            logger.warning(
                f"checkpoint.load_step = {step}: the same command has gone back to step {step} "
                "before, and continues from what it has saved since. To go back once more, move "
                f"{listed(f'step-{later}' for later in steps if later > step)} out of {folder}"
            )
        return self._at(
            load_newest(
                self.storage, folder, steps, self.trained, exclude=self.config.exclude_from_loading
            )
        )

    def continue_after(self, step: int) -> None:
        """Adapt the folder to the step that the run has resumed from or gone back to, and trains
        from: abandon later checkpoints, and complete the retention of older ones.

        Raises:
            CheckpointError: the folder can't be written to.
        """

        def settle() -> None:
            try:
                if dist.get_rank() == 0:
                    go_back(self.folder, step)
                    self._purge(step)
            except OSError as error:
                raise CheckpointError(
                    f"can't write to {self.folder}: {error.strerror or error}"
                ) from error

        if self.saving and step:
            together(settle)

    def rewind(self, step: int) -> Resumed | None:
        """Load this run's newest complete checkpoint before `step`; None if there is none.

        Raises:
            CheckpointError: all earlier checkpoints are damaged, or the save in flight failed.
        """
        self.wait()
        steps = [earlier for earlier in agreed_steps(self.storage, self.folder) if earlier < step]
        resumed = self._at(load_newest(self.storage, self.folder, steps, self.trained))
        if resumed is not None:
            self.continue_after(resumed.step)
        return resumed

    def _at(self, resumed: Resumed | None) -> Resumed | None:
        self.newest_step = resumed.step if resumed is not None else 0
        return resumed

    def load_initial(self, path: Path) -> Resumed:
        """Start from another run's checkpoint, or its weights (`initial_load_model_only`)."""
        model_only = self.config.initial_load_model_only
        return load_initial(self.storage, path, self.trained, model_only=model_only)


def _advice(cause: str) -> str:
    """Advice about a failed save."""
    if FormatBugError.__name__ in cause:
        return "Another try would probably fail in the same way"
    if any(f"[Errno {code}]" in cause for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
        return (
            "Free some space or set checkpoint.folder to another disk, then run the same "
            "command again"
        )
    return "Fix the cause, then run the same command again"
