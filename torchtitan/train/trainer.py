"""A run: build, restore, train step by step, save, close."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

import torchtitan
from torchtitan.checkpoint import Checkpointer, Trained
from torchtitan.config.derive import layout_degrees
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch
from torchtitan.health.flight_recorder import configure_flight_recorder
from torchtitan.health.guard import Guard
from torchtitan.health.hang_watch import Watch
from torchtitan.health.replicas import check_replicas
from torchtitan.health.stragglers import Stragglers
from torchtitan.inference.tasks import Tasks, scores
from torchtitan.parallel.collectives import AnyRank
from torchtitan.parallel.groups import init_distributed, limit_groups, set_timeout
from torchtitan.parallel.quantize import check_hardware
from torchtitan.telemetry.events import Events
from torchtitan.telemetry.metrics import Metrics, describe_sources, peak_flops
from torchtitan.telemetry.notify import start_notifier
from torchtitan.telemetry.profiler import Profiler
from torchtitan.telemetry.run_record import RunRecord
from torchtitan.telemetry.trackers import Record
from torchtitan.train.announce import announce_stage, announce_start
from torchtitan.train.build import build, set_determinism
from torchtitan.train.folder_locks import hold_folders, open_log
from torchtitan.train.preflight import Setup
from torchtitan.train.restore import restore
from torchtitan.train.run_info import describe_run, describe_start, skipped_documents, write_config
from torchtitan.train.sampling import write_samples
from torchtitan.train.state import Progress, RunState, seed_step
from torchtitan.train.step import (
    StepResult,
    averaged_weights,
    max_over_ranks,
    prepare_weights,
    train_step,
)
from torchtitan.utils.activity import DATA, SAVING, begin, note, phase
from torchtitan.utils.device import (
    current_device,
    device_name,
    device_syncs,
    is_out_of_memory,
    tune_cpu,
)
from torchtitan.utils.errors import HangError, OutOfMemoryError
from torchtitan.utils.garbage import frozen_gc
from torchtitan.utils.logging import logger
from torchtitan.utils.signals import StopRequest
from torchtitan.utils.text import show_duration

COMMIT_SECONDS = 10.0
"""After an error, for a save in the background: a checkpoint that counts should be on record."""


class Trainer:
    """A run from start or resume to its last step. All ranks make the same calls."""

    def __init__(self, config: Config, setup: Setup, stop: StopRequest | None = None):
        """
        Args:
            config: derived and validated.
            setup: from `preflight`.
            stop: whether this rank was asked to stop.
        """
        began = time.time()
        begin("start", "starting")
        self.config = config
        self.setup = setup
        self.device = current_device()
        tune_cpu()
        set_determinism(config.debug)
        check_hardware(config, self.device)
        self.owns_process_group = not dist.is_initialized()
        self.watch = self._connect() if self.owns_process_group else None
        self.stop = stop or StopRequest()
        self.stop.defer()  # a rank that left alone from here on would make the others fail
        self.stopped = False
        self.folders = hold_folders(config)
        open_log(config)
        self.tasks = self._load_tasks() if config.eval.enable else None
        note("building the model")
        self.parts = build(config, setup, self.device)
        if self.owns_process_group:
            limit_groups(config.comm.init_timeout_seconds)
        about = describe_run(config, setup, self.parts.loader.fingerprint)
        self.checkpointer = Checkpointer(
            config.checkpoint,
            config.job.dump_folder,
            Trained(self.parts.models, self.parts.optimizer, self.parts.average),
            about,
            confirm=lambda: self.folders.confirm(remote=True),
            confirm_copies=self.folders.confirm_copies,
            data_files=self.parts.loader.record.lists,
        )
        self.guard = Guard(
            config.guard,
            config.training,
            self.checkpointer,
            config.job.dump_folder,
            updates_in_backward=config.optimizer.early_step_in_backward,
        )
        self.progress = Progress()
        self.state = RunState(
            self.progress, self.parts.schedule, self.parts.loader, self.guard, self.parts.average
        )
        note("loading a checkpoint")
        restore(config, setup, self.parts.models, self.checkpointer, self.state)
        self.parts.loader.check_enough(config.training.steps)
        write_config(config)
        note("starting the metrics")
        self._observe(about, torchtitan.IMPORTED if self.owns_process_group else began)
        self.after_step: tuple[Callable[[StepResult], None], ...] = (
            self._average,
            self._limit_collectives,
            lambda _: announce_stage(config.training, self.progress.step + 1),
            self._confirm_folder,
            self._report,
            lambda _: self.profiler.step(self.progress.step),
            self._check_replicas,  # before a save would make a fault permanent
            self._validate,
            self._write_samples,
            self._evaluate,
            self._save_if_due,
            self._collect_garbage,
        )
        """What follows an update, in order."""

    def _connect(self) -> Watch | None:
        """Start the process group and the watch over it."""
        comm = self.config.comm
        folder = self.config.job.dump_folder
        configure_flight_recorder(comm, folder)
        init_distributed(comm, self.device)
        return (
            Watch(comm, folder, layout_degrees(self.config.parallelism))
            if comm.trace_buf_size
            else None
        )

    def _load_tasks(self) -> Tasks:
        note("loading tasks of lm-eval")
        own = self.config.eval
        return Tasks(
            own.tasks,
            include_path=own.include_path,
            num_fewshot=own.num_fewshot,
            limit=own.limit,
        )

    def _observe(self, about: dict[str, Any], began: float) -> None:
        """Start what measures and reports the run.

        Args:
            about: from `describe_run`.
            began: when this start began, in seconds since the epoch.
        """
        config = self.config
        self.stragglers = Stragglers(config.guard)
        self.profiler = Profiler(config.profiling, config.job.dump_folder)
        self.ledger = RunRecord(
            Path(config.job.dump_folder),
            describe_start(about, config.parallelism),
            step=self.progress.step,
            resumable=self.checkpointer.saving,
            writes=dist.get_rank() == 0,
            began=began,
        )
        self.metrics = Metrics(
            config.metrics,
            config.job,
            config.model_dump(),
            self.ledger,
            start_step=self.progress.step,
            total_steps=config.training.steps,
            flops_per_token=self.setup.spec.flops_per_token(
                self.setup.args, config.training.seq_len
            ),
            peak_flops=peak_flops(device_name(), config.training.mixed_precision_param),
            experts=self.parts.experts is not None,
            custom=config.custom,
            samples=bool(config.sampling.prompts),
        )
        self.notifier = start_notifier(config) if dist.get_rank() == 0 else None
        self.events = Events(
            Path(config.job.dump_folder),
            writes=dist.get_rank() == 0,
            continues=len(self.ledger.starts) > 1,
            listeners=[self.metrics.event, *([self.notifier.listen] if self.notifier else [])],
        )
        announce_start(self.progress.step, config.training.steps, config.parallelism)
        self._record_skipped()

    def _record_skipped(self) -> None:
        """Count the bad documents that were left out: of files at the start, of streams at the
        end.
        """
        if self.config.training.on_bad_document == "skip":
            skipped = skipped_documents(self.parts.loader, self.progress.data)
            self.ledger.record("skipped_documents", skipped)

    # ---- the loop

    def train(self) -> Progress:
        """Train to the last step, or until any rank is asked to stop: then all ranks save after the
        same step.

        Raises:
            NonFiniteError: NaN or infinity, and `training.on_nonfinite = "stop"`.
            CheckpointError: a save failed.
            GuardError: repeated spikes, or replicas of the weights that differ.
            OutOfMemoryError: out of memory.
            UserError: the data can't be read.
        """
        steps = self.config.training.steps
        try:
            with frozen_gc(), self.profiler.capture_oom():
                batches = iter(self.parts.loader) if self.progress.step < steps else iter(())
                self.stopped = bool(AnyRank(self.stop.requested, self.device).answer() > 0)
                self._began = time.monotonic()
                self._warm = False
                while self.progress.step < steps and not self.stopped:
                    step = self.progress.step + 1
                    begin("other", "between two steps", step)
                    with phase(self.ledger.kind_of(step), "starting a step", step):
                        self._train_one(batches)
                    self.ledger.step_done(step)
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
        with device_syncs(
            report=config.debug.report_device_syncs and progress.first_loss is not None
        ):
            result = train_step(
                self.parts,
                batch,
                config,
                stop=self.stop.requested,
                agree=self.guard.spikes.acts,
                approve=lambda loss, grad_norm: self.guard.approve(step, loss, grad_norm),
                before_update=self._wait_staged,
            )
        progress.data = batch.position
        self._epochs = batch.epochs
        if earlier := self.guard.handle_spike():
            self.state.rewind(earlier.train_state)
            self.metrics.rewind(earlier.step)
            if self.parts.experts is not None:
                self.parts.experts.take()
            if self.parts.compute.tally is not None:
                self.parts.compute.tally.clear()
            prepare_weights(self.parts, config)
            return
        progress.advance(result.tokens, result.loss, skipped=not result.updated)
        self.parts.schedule.advance()
        self.stopped = result.stop and progress.step < config.training.steps
        for follow in self.after_step:
            follow(result)

    # ---- after a step

    def _average(self, result: StepResult) -> None:
        if self.parts.average is not None and result.updated:
            self.parts.average.update(self.progress.step)

    def _limit_collectives(self, _: StepResult) -> None:
        """After the first step, compilation and lazy set-up are over: lower the time limit of
        collectives.
        """
        if self._warm:
            return
        self._warm = True
        if self.config.compile.enable:
            logger.info(
                f"The first step took {show_duration(time.monotonic() - self._began)}, "
                "most of it compilation"
            )
        limit = self.config.comm.train_timeout_seconds
        set_timeout(limit)
        if self.watch is not None:
            self.watch.limit = limit

    def _confirm_folder(self, _: StepResult) -> None:
        if self.metrics.due(self.progress.step) and not self.folders.confirm():
            write_config(self.config)

    def _report(self, result: StepResult) -> None:
        progress = self.progress
        self.metrics.count(progress.step, result.tokens)
        if not self.metrics.due(progress.step):
            return
        record = self.metrics.log(
            progress.step,
            loss=result.loss,
            max_loss=max_over_ranks(result.local_loss, self.parts.mesh, self.device),
            grad_norm=result.grad_norm,
            lr=result.learning_rate,
            tokens=progress.tokens,
            skipped=progress.skipped,
            experts=None if self.parts.experts is None else self.parts.experts.take(),
            sources=self._sources(),
        )
        self.ledger.heartbeat(progress.step)
        self.stragglers.check(record, self.device)

    def _sources(self) -> Record:
        """What a record says of each data source, over the steps since the last one."""
        config = self.config.training
        tally = self.parts.compute.tally
        if tally is None:
            return {}
        sums = tally.take(self.parts.mesh, self._epochs)
        assert self.progress.data is not None
        positions = self.progress.data.sources
        tokens = [positions[source.name].rows * config.seq_len for source in config.sources]
        return describe_sources([source.name for source in config.sources], sums, tokens)

    def _check_replicas(self, _: StepResult) -> None:
        step = self.progress.step
        freq = self.config.guard.weight_hash_freq
        if freq and step % freq == 0:
            with phase("other", "comparing replicas of the weights"):
                check_replicas(self.parts.mesh, self.device, step, self.checkpointer)

    def _validate(self, _: StepResult) -> None:
        config = self.config.validation
        step = self.progress.step
        due = step % config.freq == 0 or step == self.config.training.steps
        if self.parts.validation is None or self.stopped or not due:
            return
        with phase("validation", "validating"):
            found = [one.record() for one in self.parts.validation.run()]
            if self.config.ema.validation:
                with averaged_weights(self.parts, self.config):
                    averaged = [one.record() for one in self.parts.validation.run()]
                found = [
                    one | {f"{key}_ema": other[key] for key in ("loss", "bits_per_byte")}
                    for one, other in zip(found, averaged, strict=True)
                ]
        self.metrics.log_validation(step, found)

    def _write_samples(self, _: StepResult) -> None:
        config = self.config.sampling
        step = self.progress.step
        due = step % config.freq == 0 or step == self.config.training.steps
        if not config.prompts or self.parts.probe is None or self.stopped or not due:
            return
        with phase("validation", "writing samples"):
            samples = write_samples(self.parts.probe, config, self.setup.tokenizer, self.device)
        self.metrics.log_samples(step, samples)

    def _evaluate(self, _: StepResult) -> None:
        step = self.progress.step
        due = step % self.config.eval.freq == 0 or step == self.config.training.steps
        if self.tasks is None or self.parts.probe is None or self.stopped or not due:
            return
        with phase("validation", "running lm-eval"):
            results = self.tasks.run(self.parts.probe, self.setup.tokenizer)
        self.metrics.log_evals(step, scores(results))

    def _save_if_due(self, _: StepResult) -> None:
        step = self.progress.step
        if self.stopped and not self.checkpointer.saving:
            logger.warning(
                f"Asked to stop: step {step} is lost, as checkpoint.enable = false or "
                "load_only = true"
            )
        elif self.stopped:
            logger.info(f"Asked to stop: saving step {step}")
            with phase("saves", SAVING):
                self._save()
                self.checkpointer.close()
        elif self.checkpointer.due(step, self.config.training.steps):
            with phase("saves", SAVING):
                self._save()

    def _collect_garbage(self, _: StepResult) -> None:
        training = self.config.training
        step = self.progress.step
        if step % training.gc_freq == 0:
            with phase("other", "collecting garbage"):
                found = gc.collect()
            if training.gc_debug:
                logger.info(
                    f"step {step}: garbage collection found {found} objects in reference cycles"
                )

    # ---- checkpoints

    def _save(self) -> None:
        config = self.config.checkpoint
        step = self.progress.step
        last = step == self.config.training.steps
        self.checkpointer.save(
            step, self.state.gather(), model_only=last and config.last_save_model_only
        )
        if last and config.last_save_in_hf:
            folder = self.checkpointer.export_hf(
                step, self.setup.spec, self.setup.args, self.setup.tokenizer
            )
            logger.info(f"Exported Hugging Face weights to {folder}")

    def _wait_staged(self) -> None:
        with phase("staging", "waiting for a copy of the weights"):
            self.checkpointer.wait_staged()

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"step {self.progress.step + 1}: out of memory; {self.checkpointer.last_good()}.\n"
            'Set activation_checkpoint.mode = "full" or training.loss_chunks, lower '
            "training.local_batch_size "
            "(training.global_batch_size keeps the batch, by accumulation), shard over "
            "more ranks, or set "
            f"training.enable_cpu_offload = true; `torchtitan plan` says what each takes.\n{error}"
        )

    # ---- the end

    def close(self, error: BaseException | None = None) -> None:
        """Release what the run holds. After an error, other ranks may be gone: dump collectives,
        don't wait.
        """
        reason = self.ledger.end(self.progress.step, self.config.training.steps, error)
        if (
            self.watch is not None
            and isinstance(error, Exception)
            and not isinstance(error, HangError)
        ):
            self.watch.failed(error)
        if error is not None:
            self.checkpointer.settle(COMMIT_SECONDS)
        self.events.end(self.progress.step, reason, self.progress.last_loss)
        self.metrics.close(reason or ("completed" if error is None else "failed"))
        self.ledger.save_trackers()
        if self.notifier is not None:
            self.notifier.close()
        self.profiler.close()
        self.parts.loader.close()
        if self.parts.validation is not None:
            self.parts.validation.close()
        if error is None and dist.get_rank() == 0:
            logger.info(self.ledger.goodput())
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
