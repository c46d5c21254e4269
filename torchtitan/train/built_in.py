"""The built-in callbacks. `all_callbacks` lists them in the order in which they are called."""

import gc
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.hf.export import export_checkpoint
from torchtitan.config.load.render import to_toml_value
from torchtitan.config.sections.schema import Config
from torchtitan.health.hang_watch import Watch
from torchtitan.health.replicas import check_replicas
from torchtitan.health.stragglers import Stragglers
from torchtitan.inference.tasks import Tasks
from torchtitan.parallel.collectives import all_reduce
from torchtitan.parallel.groups import set_timeout
from torchtitan.telemetry.metrics import MetricsReporter, describe_sources
from torchtitan.telemetry.profiler import Profiler
from torchtitan.telemetry.trackers import Record
from torchtitan.train.advice import unneeded_launches, unneeded_recomputation
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.engine import Engine
from torchtitan.train.evaluations import Evaluation, RunTasks, Validate, WriteSamples
from torchtitan.train.folder_locks import FolderLocks
from torchtitan.train.preflight import Setup
from torchtitan.train.restore import RunState
from torchtitan.train.run_info import describe_model, trained_args, write_config
from torchtitan.train.run_telemetry import Telemetry
from torchtitan.train.state import StepResult
from torchtitan.utils.activity import SAVING, phase
from torchtitan.utils.device import free_memory
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import event, logger
from torchtitan.utils.wording import show_duration


def all_callbacks(
    engine: Engine,
    state: RunState,
    checkpointer: Checkpointer,
    telemetry: Telemetry,
    *,
    folder_locks: FolderLocks,
    watch: Watch | None,
    tasks: Tasks | None,
    users: Sequence[Callback],
) -> tuple[Callback, ...]:
    """The built-in callbacks and the user's, in the order in which they are called.

    Args:
        watch: None if the caller owns the process group.
        tasks: from `load_tasks`.
    """
    metrics = telemetry.metrics
    evaluations = (
        Validate(engine, metrics),
        WriteSamples(engine, metrics),
        RunTasks(engine, metrics, tasks),
    )
    return (
        WaitForCopy(checkpointer),
        AverageWeights(engine),
        LimitCollectives(engine, watch, evaluations),
        AnnounceStages(engine),
        ConfirmFolders(metrics, folder_locks),
        Report(engine, telemetry),
        Advise(engine.setup),
        Profile(telemetry.profiler),
        CheckReplicas(checkpointer),  # before a save would make a fault permanent
        *evaluations,
        *users,
        Save(engine, state, checkpointer),  # after all callbacks with a state in the checkpoint
        CollectGarbage(),
    )


class WaitForCopy(Callback):
    """Delays the update of the weights until an asynchronous save has copied them."""

    def __init__(self, checkpointer: Checkpointer):
        self.checkpointer = checkpointer

    def before_update(self, run: Run) -> None:
        with phase("staging", "waiting for a copy of the weights"):
            self.checkpointer.wait_staged()


class AverageWeights(Callback):
    """Updates the average of the weights: `[ema]`."""

    def __init__(self, engine: Engine):
        self.average = engine.average

    def after_step(self, run: Run, result: StepResult) -> None:
        if self.average is None:
            return
        run.progress.settle()
        if result.updated:
            self.average.update(run.progress.step)


class LimitCollectives(Callback):
    """Lowers the time limit of collectives after the first step, which includes compilation and
    lazy set-up. Raises it again for what may compile later: the first step of a stage of the data,
    whose rows have another shape, and an evaluation's first run of the model.
    """

    def __init__(self, engine: Engine, watch: Watch | None, evaluations: Sequence[Evaluation]):
        self.watch = watch
        self.engine = engine
        self.slow = first_limit(engine.config, engine.setup)
        self.cold = list(evaluations)
        """Evaluations that have not run yet."""
        self.began = time.monotonic()
        self.warm = False
        self.announced = False

    def on_start(self, run: Run) -> None:
        self.began = time.monotonic()

    def after_step(self, run: Run, result: StepResult) -> None:
        compiles = run.config.compile.enable
        due = [evaluation for evaluation in self.cold if evaluation.due(run)]
        self.cold = [evaluation for evaluation in self.cold if evaluation not in due]
        if not self.warm:
            self.warm = True
            if compiles and not self.announced:
                self.announced = True
                seconds = time.monotonic() - self.began
                logger.info(f"The first step took {show_duration(seconds)}, most of it compilation")
            self._set(run.config.comm.train_timeout_seconds)
        if compiles and (due or _next_stage(self.engine) != self.engine.stage):
            self.warm = False
            self._set(self.slow)

    def _set(self, limit: int) -> None:
        set_timeout(limit)
        if self.watch is not None:
            self.watch.limit = limit


def first_limit(config: Config, setup: Setup) -> int:
    """The time limit of collectives, in seconds, while the model may compile.

    Pipeline stages compile one after another: each waits for the previous stage's activations.
    """
    stages = len(setup.stages.ranks) if config.compile.enable and setup.stages else 1
    return config.comm.init_timeout_seconds * stages


class AnnounceStages(Callback):
    """Logs each stage of the data before its first step: `[[training.stages]]`."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def after_step(self, run: Run, result: StepResult) -> None:
        training = run.config.training
        step = run.progress.step + 1
        index = _next_stage(self.engine)
        if index == self.engine.stage or step > training.steps:
            return
        changes = training.stages[index - 1].model_dump(
            exclude_defaults=True, exclude={"from_step"}
        )
        settings = [f"{key} = {to_toml_value(value)}" for key, value in changes.items()]
        logger.info(
            f"A stage of the data begins with step {step}: {', '.join(settings)}",
            extra=event("stage", step, **changes),
        )


def _next_stage(engine: Engine) -> int:
    """The stage of the data of the next step."""
    assert engine.progress.data is not None
    return engine.loader.stage_after(engine.progress.data)


class ConfirmFolders(Callback):
    """Checks at logged steps that no other run has locked this run's folders."""

    def __init__(self, metrics: MetricsReporter, folder_locks: FolderLocks):
        self.metrics = metrics
        self.folder_locks = folder_locks

    def after_step(self, run: Run, result: StepResult) -> None:
        if self.metrics.due(run.progress.step) and not self.folder_locks.confirm():
            write_config(run.config)


class Report(Callback):
    """Records logged steps: `[metrics]`. Names slow ranks: `guard.straggler_factor`."""

    def __init__(self, engine: Engine, telemetry: Telemetry):
        self.metrics = telemetry.metrics
        self.run_record = telemetry.run_record
        self.engine = engine
        self.stragglers = Stragglers(engine.config.guard)

    def after_step(self, run: Run, result: StepResult) -> None:
        progress = run.progress
        experts = self.engine.experts
        self.metrics.count(progress.step, result.read, self.engine.stage)
        if not self.metrics.due(progress.step):
            return
        progress.settle()
        local_loss = torch.full((), result.local_loss, device=run.device)
        max_loss = all_reduce(local_loss, run.mesh.loss_group, dist.ReduceOp.MAX).item()
        empty = result.loss is None
        values: Record = {
            "loss": result.loss,
            "max_loss": None if empty else max_loss,
            "grad_norm": None if empty else result.grad_norm,
            "lr": result.learning_rate,
            "tokens": progress.tokens,
            "skipped_steps": progress.skipped,
            **self._sources(run),
        }
        if losses := result.mtp_losses:
            values["mtp_loss"] = sum(losses) / len(losses)
        if self.engine.qk_clip is not None:
            values["max_attention_logit"], values["clipped_heads"] = self.engine.qk_clip.take()
        record = self.metrics.log(
            progress.step,
            values,
            experts=None if experts is None else experts.take(),
            logged=self.engine.logged.take(),
        )
        self.run_record.heartbeat(progress.step)
        self.stragglers.check(record, run.device)

    def _sources(self, run: Run) -> Record:
        """The metrics of each data source since the last record."""
        names = list(self.engine.loader.sources)
        ranks = run.mesh.loss_group
        epochs = torch.tensor(run.progress.epochs, dtype=torch.float64, device=run.device)
        means = all_reduce(epochs / ranks.size(), ranks).tolist()
        record: Record = {f"epochs/{name}": mean for name, mean in zip(names, means, strict=True)}
        if (tally := self.engine.compute.tally) is not None:
            assert run.progress.data is not None
            positions = run.progress.data.sources
            tokens = [positions[name].tokens or 0 for name in names]
            record |= describe_sources(names, tally.take(run.mesh), tokens)
        return record

    def on_rewind(self, run: Run, step: int) -> None:
        self.metrics.rewind(step)
        self.engine.logged.clear()
        for component in (self.engine.experts, self.engine.qk_clip):
            if component is not None:
                component.take()
        if self.engine.compute.tally is not None:
            self.engine.compute.tally.clear()


class Advise(Callback):
    """Logs once, after the first steps, which settings slow the run for nothing."""

    after = 3
    """Steps after which it checks: by then a step's memory is allocated."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.steps = 0
        self.began = 0.0
        """When the step before the check ended."""

    def after_step(self, run: Run, result: StepResult) -> None:
        self.steps += 1
        now = time.monotonic()
        if self.steps == self.after and dist.get_rank() == 0:
            steps = run.config.training.steps - run.progress.step
            hints = [unneeded_recomputation(run.config, self.setup, free_memory(run.device))]
            if run.device.type != "cpu":
                hints.append(unneeded_launches(run.config, steps * (now - self.began)))
            for hint in filter(None, hints):
                logger.info(hint)
        self.began = now


class Profile(Callback):
    """Writes traces and memory snapshots: `[profiling]`."""

    def __init__(self, profiler: Profiler):
        self.profiler = profiler

    def after_step(self, run: Run, result: StepResult) -> None:
        self.profiler.step(run.progress.step)

    def on_end(self, run: Run, reason: str) -> None:
        self.profiler.close()


class CheckReplicas(Callback):
    """Compares copies of the weights: `guard.weight_hash_freq`."""

    def __init__(self, checkpointer: Checkpointer):
        self.checkpointer = checkpointer

    def after_step(self, run: Run, result: StepResult) -> None:
        step = run.progress.step
        freq = run.config.guard.weight_hash_freq
        if freq and step % freq == 0:
            run.progress.settle()
            with phase("other", "comparing replicas of the weights"):
                check_replicas(run.mesh, run.device, step, self.checkpointer)


class Save(Callback):
    """Saves checkpoints: `[checkpoint]`, and when the run is asked to stop."""

    def __init__(self, engine: Engine, state: RunState, checkpointer: Checkpointer):
        self.engine = engine
        self.state = state
        self.checkpointer = checkpointer
        self.logged_copies = False

    def on_start(self, run: Run) -> None:
        if self.checkpointer.saving:
            self.state.callbacks.state_dict()  # raises now rather than at the first save

    def after_step(self, run: Run, result: StepResult) -> None:
        if not self.logged_copies:
            self.logged_copies = True
            self.checkpointer.log_copies()
        step = run.progress.step
        stops = run.stops_early
        if stops and not self.checkpointer.saving:
            logger.warning(
                f"Asked to stop: step {step} is lost, as checkpoint.enable = false or "
                "load_only = true"
            )
            return
        if stops:
            logger.info(f"Asked to stop: saving step {step}")
        elif not self.checkpointer.due(step, run.config.training.steps):
            return
        run.progress.settle()
        with phase("saves", SAVING):
            self._save(run)
            if stops:
                self.checkpointer.close()
        self.engine.notify("on_save", step)

    def _save(self, run: Run) -> None:
        config = run.config.checkpoint
        setup = self.engine.setup
        stage = self.engine.stage
        step = run.progress.step
        last = step == run.config.training.steps
        model_only = last and config.last_save_model_only
        self.checkpointer.run_info["model"] = describe_model(run.config, setup, stage)
        try:
            state = self.state.local_state()
        except UserError as error:
            raise UserError(f"{error}; {self.checkpointer.last_good()}") from error
        self.checkpointer.save(step, state, model_only=model_only)
        if last and config.last_save_in_hf:
            args = trained_args(run.config, setup, stage)
            folder = export_checkpoint(
                self.checkpointer, step, setup.spec, args, tokenizer=setup.tokenizer
            )
            logger.info(f"Exported Hugging Face weights to {folder}")


class CollectGarbage(Callback):
    """Collects garbage on all ranks after the same step: `training.gc_freq`.

    Python's automatic collection is off during training: it would pause ranks at different times,
    and each pause makes all ranks wait. Objects that exist at the start are never scanned.
    """

    freezes = True
    """False where a server that forks ranks has frozen its objects, which must stay frozen."""

    def on_start(self, run: Run) -> None:
        gc.collect()
        if self.freezes:
            gc.freeze()
        gc.disable()

    def after_step(self, run: Run, result: StepResult) -> None:
        training = run.config.training
        step = run.progress.step
        if step % training.gc_freq:
            return
        with phase("other", "collecting garbage"):
            count = gc.collect()
        if training.gc_debug:
            logger.info(
                f"step {step}: garbage collection found {count} objects in reference cycles"
            )

    def on_end(self, run: Run, reason: str) -> None:
        gc.enable()
        if self.freezes:
            gc.unfreeze()
