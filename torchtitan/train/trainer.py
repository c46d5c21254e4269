"""A run: build, restore, train step by step, save, close."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.checkpoint import Checkpointer, Trained
from torchtitan.config.derive import layout_degrees
from torchtitan.config.sections.schema import Comm, Config
from torchtitan.data.loader import StepBatch
from torchtitan.health.flight_recorder import configure_flight_recorder
from torchtitan.health.guard import Guard
from torchtitan.health.hang_watch import Watch
from torchtitan.inference.tasks import Tasks
from torchtitan.parallel.collectives import AnyRank
from torchtitan.parallel.groups import init_distributed, limit_groups
from torchtitan.parallel.quantize import check_hardware
from torchtitan.train.build import build, set_determinism
from torchtitan.train.built_in import built_in
from torchtitan.train.callbacks import Arrange, Callback, LoggedValues, Run, build_callbacks
from torchtitan.train.evaluations import load_tasks, stops_early
from torchtitan.train.folder_locks import hold_folders, open_log
from torchtitan.train.preflight import Setup
from torchtitan.train.restore import RunState, restore
from torchtitan.train.run_info import describe_run, skipped_documents, write_config
from torchtitan.train.state import Parts, Progress, seed_step
from torchtitan.train.step import prepare_weights, train_step
from torchtitan.train.telemetry import Telemetry
from torchtitan.utils.activity import DATA, SAVING, begin, note, phase
from torchtitan.utils.device import (
    current_device,
    describe_cpu_precision,
    device_syncs,
    is_out_of_memory,
    tune_cpu,
    unused_gpu,
)
from torchtitan.utils.errors import HangError, OutOfMemoryError
from torchtitan.utils.logging import logger
from torchtitan.utils.signals import StopRequest

COMMIT_SECONDS = 10.0
"""How long, after an error, to wait for a save in the background to be committed."""


class Trainer:
    """A run from start or resume to its last step. All ranks make the same calls."""

    def __init__(
        self,
        config: Config,
        setup: Setup,
        stop: StopRequest | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        arrange: Arrange = lambda callbacks: callbacks,
        connect: Callable[[Comm, torch.device], None] = init_distributed,
        build: Callable[[Config, Setup, torch.device], Parts] = build,
        device: torch.device | None = None,
    ):
        """
        Args:
            config: derived and validated.
            setup: from `preflight`.
            stop: whether this rank was asked to stop.
            callbacks: called after the built-in ones and those that `training.callbacks` names.
            arrange: takes all callbacks in order, and returns those to call.
            connect: starts the default process group, unless there is one.
            build: builds model, optimizer and data.
            device: where this rank computes; None: CUDA if available, else the CPU.
        """
        began = time.time()
        begin("start", "starting")
        self.config = config
        self.setup = setup
        self.device = device or current_device()
        tune_cpu()
        set_determinism(config.debug)
        check_hardware(config, self.device)
        self.owns_process_group = not dist.is_initialized()
        self.watch = _connect(config, self.device, connect) if self.owns_process_group else None
        self.stop = stop or StopRequest()
        self.stop.defer()  # a rank that left alone from now on would make the others fail
        self.stopped = False
        self.folders = hold_folders(config)
        open_log(config)
        precision = describe_cpu_precision(config.training.mixed_precision_param)
        if self.device.type == "cpu" and precision:
            logger.info(precision)
        if unused := unused_gpu():
            logger.info(unused)
        tasks = load_tasks(config.eval)
        note("building the model")
        self.parts = build(config, setup, self.device)
        if self.owns_process_group:
            limit_groups(config.comm.init_timeout_seconds)
        about = describe_run(config, setup, self.parts.loader.fingerprint)
        self.checkpointer = self._make_checkpointer(about)
        self.guard = self._make_guard()
        self.progress = Progress()
        self.state = RunState(
            self.progress, self.parts.schedule, self.parts.loader, self.guard, self.parts.average
        )
        note("loading a checkpoint")
        restore(config, setup, self.parts.models, self.checkpointer, self.state)
        self.parts.loader.check_enough(config.training.steps)
        self.parts.enter(self.parts.loader.stage_after(self.parts.loader.start))
        write_config(config)
        note("starting the metrics")
        if self.owns_process_group:
            began = torchtitan.IMPORTED  # this process exists for the run: its imports count, too
        self.telemetry = self._start_telemetry(about, began)
        self._record_skipped()
        added = (*build_callbacks(config), *callbacks)
        self.callbacks = tuple(arrange((*self._built_in(tasks), *added)))
        self.run = self._make_run(LoggedValues(gather=bool(added)))

    def _make_checkpointer(self, about: dict[str, Any]) -> Checkpointer:
        return Checkpointer(
            self.config.checkpoint,
            self.config.job.dump_folder,
            Trained(
                self.parts.models,
                self.parts.optimizer,
                self.parts.average,
                places=self.config.parallelism.pipeline_parallel_degree,
            ),
            about,
            confirm=lambda: self.folders.confirm(remote=True),
            confirm_copies=self.folders.confirm_copies,
            data_files=self.parts.loader.record.lists,
        )

    def _make_guard(self) -> Guard:
        return Guard(
            self.config.guard,
            self.config.training,
            self.checkpointer,
            self.config.job.dump_folder,
            updates_in_backward=self.config.optimizer.early_step_in_backward,
        )

    def _start_telemetry(self, about: dict[str, Any], began: float) -> Telemetry:
        return Telemetry(
            self.config,
            self.setup,
            about,
            step=self.progress.step,
            resumable=self.checkpointer.saving,
            began=began,
        )

    def _make_run(self, logged: LoggedValues) -> Run:
        parts = self.parts
        return Run(
            self.config,
            self.progress,
            parts.models,
            parts.optimizer,
            parts.mesh,
            self.device,
            parts.experts,
            logged,
        )

    def _built_in(self, tasks: Tasks | None) -> tuple[Callback, ...]:
        return built_in(
            self.config,
            self.setup,
            self.parts,
            self.state,
            self.checkpointer,
            self.telemetry,
            self.folders,
            self.watch,
            tasks,
            self._notify,
        )

    def _notify(self, event: str, *details: Any) -> None:
        """Call a method of all callbacks, in order."""
        for callback in self.callbacks:
            getattr(callback, event)(self.run, *details)

    # ---- the loop

    def train(self) -> Progress:
        """Train to the last step, or until a rank is asked to stop; then all save after one step.

        Raises:
            NonFiniteError: NaN or infinity, and `training.on_nonfinite = "stop"`.
            CheckpointError: a save failed.
            GuardError: repeated spikes, or replicas of the weights that differ.
            OutOfMemoryError: out of memory.
            UserError: the data can't be read.
        """
        steps = self.config.training.steps
        run_record = self.telemetry.run_record
        try:
            with self.telemetry.profiler.capture_oom():
                self._notify("on_start")
                batches = iter(self.parts.loader) if self.progress.step < steps else iter(())
                self.stopped = bool(AnyRank(self.stop.requested, self.device).answer() > 0)
                while self.progress.step < steps and not self.stopped:
                    step = self.progress.step + 1
                    begin("other", "between two steps", step)
                    with phase(run_record.kind_of(step), "starting a step", step):
                        self._train_one(batches)
                    run_record.step_done(step)
                with phase("saves", SAVING):
                    self.checkpointer.close()
                with phase("other", "counting documents that were skipped"):
                    self._record_skipped()
        except (RuntimeError, MemoryError) as error:
            if self.watch is not None and (hang := self.watch.explain(error)):
                raise HangError(hang) from error
            if is_out_of_memory(error):
                raise self._out_of_memory(error) from error
            raise
        return self.progress

    def _train_one(self, batches: Iterator[StepBatch]) -> None:
        config = self.config
        progress = self.progress
        step = progress.step + 1
        seed_step(config.debug.seed, progress.step, self.parts.mesh.dp_rank)
        with phase("data", f"{DATA} from {self.parts.loader.name}"):
            batch = next(batches)
        self.guard.spikes.rows_per_step = batch.count
        report_syncs = config.debug.report_device_syncs and progress.first_loss is not None
        with device_syncs(report=report_syncs):
            result = train_step(
                self.parts,
                batch,
                config,
                stop=self.stop.requested,
                agree=self.guard.spikes.acts,
                approve=lambda loss, grad_norm: self.guard.approve(step, loss, grad_norm),
                before_update=lambda: self._notify("before_update"),
            )
        progress.data = batch.position
        progress.epochs = batch.epochs
        if earlier := self.guard.handle_spike():
            self.state.rewind(earlier.train_state)
            prepare_weights(self.parts, config)
            self._notify("on_rewind", earlier.step)
            return
        progress.advance(result.tokens, result.loss, skipped=not result.updated)
        self.parts.schedule.advance()
        self.stopped = stops_early(self.run, result)
        self._notify("after_step", result)

    def _record_skipped(self) -> None:
        """Count skipped documents: those of files at the start, those of streams at the end."""
        if self.config.training.on_bad_document == "skip":
            skipped = skipped_documents(self.parts.loader, self.progress.data)
            self.telemetry.run_record.record("skipped_documents", skipped)

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"step {self.progress.step + 1}: out of memory; {self.checkpointer.last_good()}.\n"
            'Set activation_checkpoint.mode = "full" or training.loss_chunks, lower '
            "training.local_batch_size (training.global_batch_size keeps the batch, by "
            "accumulation), shard over more ranks, or set training.enable_cpu_offload = true; "
            f"`torchtitan plan` says what each takes.\n{error}"
        )

    # ---- the end

    def close(self, error: BaseException | None = None) -> None:
        """Release what the run holds. After an error other ranks may be gone: don't wait."""
        step = self.progress.step
        ended = self.telemetry.run_record.end(step, self.config.training.steps, error)
        reason = ended or ("failed" if error is not None else "completed")
        explained = isinstance(error, HangError)  # by the watch itself
        if self.watch is not None and isinstance(error, Exception) and not explained:
            self.watch.failed(error)
        if error is not None:
            self.checkpointer.settle(COMMIT_SECONDS)
        self.telemetry.close(step, ended, reason, self.progress.last_loss)
        self._end_callbacks(reason, error)
        self.parts.loader.close()
        if error is None and dist.get_rank() == 0:
            logger.info(self.telemetry.run_record.goodput())
        ends_together = self.owns_process_group and dist.is_initialized() and error is None
        if ends_together:
            note("ending")
            dist.barrier()
        if self.watch is not None:
            self.watch.close()
        if ends_together:
            dist.destroy_process_group()
        self.checkpointer.end_uploads(wait=error is None and not self.stopped)
        self.folders.release()

    def _end_callbacks(self, reason: str, error: BaseException | None) -> None:
        try:
            self._notify("on_end", reason)
        except Exception:
            if error is None:
                raise
            logger.exception("a callback failed after the error")


def _connect(
    config: Config, device: torch.device, connect: Callable[[Comm, torch.device], None]
) -> Watch | None:
    """Start the process group and the watch over it."""
    comm = config.comm
    folder = config.job.dump_folder
    configure_flight_recorder(comm, folder)
    connect(comm, device)
    return Watch(comm, folder, layout_degrees(config.parallelism)) if comm.trace_buf_size else None
