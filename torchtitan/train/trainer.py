"""A run: build, restore, train step by step, save, close."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.checkpoint import Checkpointer, TrainedModel
from torchtitan.config.derive import layout_degrees
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch
from torchtitan.health.flight_recorder import configure_flight_recorder
from torchtitan.health.guard import UpdateGuard
from torchtitan.health.hang_watch import Watch
from torchtitan.inference.tasks import Tasks
from torchtitan.parallel.collectives import AnyRank
from torchtitan.parallel.groups import barrier, limit_groups
from torchtitan.parallel.precision.dense import check_hardware
from torchtitan.train.build import Builders, build, set_determinism
from torchtitan.train.built_in import all_callbacks, first_limit
from torchtitan.train.callbacks import Arrange, Callback, CallbackStates, build_callbacks
from torchtitan.train.evaluations import StopVote, load_tasks
from torchtitan.train.folder_locks import lock_folders, open_log
from torchtitan.train.preflight import Setup
from torchtitan.train.restore import RunState, restore
from torchtitan.train.run_info import describe_run, skipped_documents, write_config
from torchtitan.train.run_telemetry import Telemetry
from torchtitan.train.state import Progress, seed_step
from torchtitan.train.step import build_update, prepare_weights, train_step
from torchtitan.utils.accelerators import hardware_fault, read_accelerators
from torchtitan.utils.activity import DATA, SAVING, begin, current, note, phase
from torchtitan.utils.device import (
    current_device,
    describe_cpu_precision,
    device_syncs,
    is_out_of_memory,
    tune_cpu,
)
from torchtitan.utils.errors import HangError, OutOfMemoryError, UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.signals import StopRequest
from torchtitan.utils.wording import show_recent

COMMIT_SECONDS = 10.0
"""Time to wait after an error until an asynchronous save is committed."""


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
        builders: Builders | None = None,
        device: torch.device | None = None,
    ):
        """
        Args:
            config: derived and validated.
            setup: from `preflight`.
            stop: the request to stop this rank, if there is one.
            callbacks: called after those that `training.callbacks` names.
            arrange: selects and orders the callbacks to call.
            builders: build process groups, model and data.
            device: where this rank computes; None: CUDA if available, else the CPU.
        """
        began = time.time()
        begin("start", "starting")
        self.config = config
        self.setup = setup
        self.device = device or current_device()
        self.stop_request = stop or StopRequest()
        self.has_trained = False
        """Whether this start has trained a step."""
        builders = builders or Builders()
        self._connect(builders)
        user_callbacks = (*build_callbacks(config), *callbacks)
        tasks = load_tasks(config.eval)
        self._build(builders, user_callbacks)
        self._restore()
        self._start(began, tasks, user_callbacks, arrange)

    def _connect(self, builders: Builders) -> None:
        """Set up the device, start the process group, and lock the run's folders."""
        config = self.config
        tune_cpu()
        set_determinism(config.debug)
        check_hardware(config, self.device, self.setup.spec.expert_sizes(self.setup.args))
        self.owns_process_group = not dist.is_initialized()
        self.watch: Watch | None = None
        if self.owns_process_group:
            configure_flight_recorder(config.comm, config.job.dump_folder)
            builders.connect(config.comm, self.device)
            if config.comm.trace_buf_size:
                degrees = layout_degrees(config.parallelism)
                self.watch = Watch(config.comm, config.job.dump_folder, degrees)
        self.stop_request.defer()  # from now on a rank that exits alone makes the others fail
        self.folder_locks = lock_folders(config)
        open_log(config)
        if dist.get_rank() == 0:
            accelerators = read_accelerators()
            logger.info(str(accelerators))
            for warning in accelerators.warnings():
                logger.warning(warning)
        precision = describe_cpu_precision(config.training.mixed_precision_param)
        if self.device.type == "cpu" and precision:
            logger.info(precision)
        logger.info(self.setup.tokenizer.describe())

    def _build(self, builders: Builders, user_callbacks: Sequence[Callback]) -> None:
        """Build the engine, the checkpointer and the state that a checkpoint holds."""
        config = self.config
        note("building the model")
        engine = build(config, self.setup, self.device, builders)
        engine.logged.gather = bool(user_callbacks)
        self.engine = engine
        for model_user in (engine.validation, engine.probe):
            if model_user is not None:
                model_user.before_batch = StopVote(self.stop_request, engine)
        if self.owns_process_group:
            limit = first_limit(config, self.setup)
            limit_groups(limit)
            if self.watch is not None:
                self.watch.limit = limit
        self.checkpointer = Checkpointer(
            config.checkpoint,
            config.job.dump_folder,
            TrainedModel(
                engine.models,
                engine.optimizer,
                engine.average,
                pp_degree=config.parallelism.pipeline_parallel_degree,
            ),
            describe_run(config, self.setup, engine.loader.fingerprint),
            confirm=partial(self.folder_locks.confirm, remote=True),
            data_files=engine.loader.record.lists,
            storage=builders.storage,
        )
        guard = UpdateGuard(
            config.guard,
            config.training,
            self.checkpointer,
            config.job.dump_folder,
            updates_in_backward=config.optimizer.early_step_in_backward,
        )
        self.update = build_update(engine, agree=guard.spikes.acts)
        self.state = RunState(engine, guard, CallbackStates(user_callbacks))

    def _restore(self) -> None:
        """Load the checkpoint or the weights that the run starts from."""
        note("loading a checkpoint")
        loader = self.engine.loader
        restore(self.checkpointer, self.state)
        loader.check_enough(self.config.training.steps, step=self.progress.step)
        self.engine.enter_stage(loader.stage_after(loader.start))
        write_config(self.config)

    def _start(
        self,
        began: float,
        tasks: Tasks | None,
        user_callbacks: tuple[Callback, ...],
        arrange: Arrange,
    ) -> None:
        """Start telemetry, and build the callbacks."""
        config = self.config
        note("starting the metrics")
        self.telemetry = Telemetry(
            config,
            self.setup,
            self.checkpointer.run_info,
            self.state.history,
            step=self.progress.step,
            resumable=self.checkpointer.saving,
            # Imports are included if the process exists only for this run.
            began=torchtitan.IMPORTED if self.owns_process_group else began,
        )
        self._record_bad_documents()
        callbacks = all_callbacks(
            self.engine,
            self.state,
            self.checkpointer,
            self.telemetry,
            folder_locks=self.folder_locks,
            watch=self.watch,
            tasks=tasks,
            users=user_callbacks,
        )
        self.engine.callbacks = arrange(callbacks)

    @property
    def progress(self) -> Progress:
        return self.engine.progress

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
                self.engine.notify("on_start")
                batches = iter(self.engine.loader) if self.progress.step < steps else iter(())
                self.engine.stops = AnyRank(self.stop_request.requested, self.device).answer()
                while self.progress.step < steps and not self.engine.stops:
                    step = self.progress.step + 1
                    begin("other", "between two steps", step)
                    with phase(run_record.kind_of(step), "starting a step", step):
                        self._train_step(batches)
                    run_record.record_step(step)
                self.progress.settle()
                with phase("saves", SAVING):
                    self.checkpointer.close()
                with phase("other", "counting documents that were skipped"):
                    self._record_bad_documents()
        except (RuntimeError, MemoryError) as error:
            if self.watch is not None and (hang := self.watch.explain(error)):
                raise HangError(hang) from error
            if is_out_of_memory(error):
                raise self._out_of_memory(error) from error
            if fault := hardware_fault(error, self.device.index or 0):
                raise UserError(fault) from error
            raise
        return self.progress

    def _train_step(self, batches: Iterator[StepBatch]) -> None:
        config = self.config
        progress = self.progress
        guard = self.state.guard
        seed_step(config.debug.seed, progress.step, self.engine.mesh.dp_rank)
        if not self.engine.loader.is_ready:
            note("waiting for the device")
            progress.count()  # time in which the device still computes isn't spent on data
        with phase("data", f"{DATA} from {self.engine.loader.name}"):
            batch = next(batches)
        with device_syncs(report=config.debug.report_device_syncs and self.has_trained):
            result = train_step(
                self.engine,
                batch,
                update=self.update,
                stop=self.stop_request.requested,
                approve=partial(guard.approve, progress.step + 1, batch.count),
                before_update=partial(self.engine.notify, "before_update"),
            )
        progress.settle()  # the step before
        if not self.has_trained:
            result.judge()  # a start that fails until here leaves all as it was
            self.has_trained = True
            self.checkpointer.continue_after(progress.step)
            self.telemetry.metrics.continue_after(progress.step)
        progress.data = batch.position
        progress.epochs = batch.epochs
        if earlier := guard.handle_spike():
            self.state.rewind(earlier.train_state)
            prepare_weights(self.engine)
            self.engine.notify("on_rewind", earlier.step)
            self._warn_if_data_ends()
            return
        progress.advance(result)
        self.engine.schedule.advance()
        self.engine.stops = result.stop
        self.engine.notify("after_step", result)

    def _warn_if_data_ends(self) -> None:
        """A rewind leaves data out, so finite data may now end before the last step."""
        position = self.progress.data
        try:
            self.engine.loader.check_enough(
                self.config.training.steps, step=self.progress.step, position=position
            )
        except UserError as error:
            logger.warning(f"After the rewind: {error}")

    def _record_bad_documents(self) -> None:
        """Record the skipped documents of files at the start, and of streams at the end."""
        if self.config.training.on_bad_document == "skip":
            skipped = skipped_documents(self.engine.loader, self.progress.data)
            self.telemetry.run_record.record("skipped_documents", skipped)

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"step {self.progress.step + 1}: out of memory while {current().activity}; "
            f"{self.checkpointer.last_good()}.\n"
            'Set activation_checkpoint.mode = "full" or training.loss_chunks, lower '
            "training.local_batch_size (training.global_batch_size keeps the batch, by "
            "accumulation), shard over more ranks, or set training.enable_cpu_offload = true; "
            f"`torchtitan plan` prints what each needs.\n{error}"
        )

    # ---- the end

    def close(self, error: BaseException | None = None) -> None:
        """End the run: close what is open, and release folders and process group.

        After an error nothing waits for other ranks, which may be gone.

        The order matters: the error is recorded and sent to the other ranks' watches before
        anything may block; a save in flight gets a moment before its threads die; callbacks still
        see the loader; and folders are released last, when nothing writes any more.
        """
        step = self.progress.step
        reason = self.telemetry.run_record.end(step, self.config.training.steps, error)
        if self.watch is not None and isinstance(error, Exception):
            self.watch.failed(error)
        if error is not None:
            self.checkpointer.settle(COMMIT_SECONDS)
        # after an error, the device may never finish the last step
        loss = show_recent(self.progress.losses, "step") if error is None else None
        self.telemetry.close(step, reason, loss)
        self._end_callbacks(reason, error)
        self.engine.loader.close()
        if error is None and dist.get_rank() == 0:
            logger.info(self.telemetry.run_record.goodput())
        ends_together = self.owns_process_group and dist.is_initialized() and error is None
        if ends_together:
            note("ending")
            barrier()
        if self.watch is not None:
            if error is not None:
                self.watch.give_up()
            self.watch.close()
        if ends_together:
            dist.destroy_process_group()
        self.folder_locks.release()

    def _end_callbacks(self, reason: str, error: BaseException | None) -> None:
        try:
            self.engine.notify("on_end", reason)
        except Exception as failure:
            if error is None:
                if self.watch is not None:
                    self.watch.failed(failure)
                raise
            logger.exception("a callback failed after the error")
