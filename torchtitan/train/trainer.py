"""The training loop: read, compute, update, record, save."""

import gc
import hashlib
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.checkpoint import Checkpointer, Resumed
from torchtitan.checkpoint.commit import versions
from torchtitan.checkpoint.hf import load_hf
from torchtitan.config.derive import axis_degrees
from torchtitan.config.render import to_toml
from torchtitan.config.schema import Config
from torchtitan.config.support import FLOAT8, uses
from torchtitan.data.loader import StepBatch
from torchtitan.data.rows import merge_states
from torchtitan.observe.flight_recorder import configure_flight_recorder
from torchtitan.observe.guard import Spike
from torchtitan.observe.ledger import Ledger, changed_settings, git_revision
from torchtitan.observe.metrics import Metrics
from torchtitan.observe.profiler import Profiler
from torchtitan.observe.watch import Watch
from torchtitan.parallel.collectives import AnyRank
from torchtitan.parallel.groups import init_distributed, limit_groups, set_timeout
from torchtitan.parallel.quantize import check_hardware, refresh_scales
from torchtitan.train.build import build, set_determinism
from torchtitan.train.evaluate import evaluate
from torchtitan.train.guarding import RunGuard
from torchtitan.train.preflight import Setup
from torchtitan.train.state import Progress
from torchtitan.train.step import StepResult, forward_backward, max_over_ranks
from torchtitan.utils.assets import find_asset
from torchtitan.utils.device import current_device, device_name, device_syncs, is_out_of_memory, tune_cpu
from torchtitan.utils.errors import HangError, NonFiniteError, UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.hardware import peak_flops
from torchtitan.utils.logging import logger
from torchtitan.utils.phase import DATA, SAVING, begin, note
from torchtitan.utils.signals import StopRequest
from torchtitan.utils.storage import storage_path


class Trainer:
    """A run, from start or resume to the last step. All ranks make the same calls.

    `config` must be derived and validated, `setup` from `preflight`; `stop` tells whether this rank was asked to stop.
    """

    def __init__(self, config: Config, setup: Setup, stop: StopRequest | None = None):
        began = time.time()
        self.config, self.setup = config, setup
        self.device = current_device()
        tune_cpu()
        set_determinism(config.debug)
        self.owns_process_group = not dist.is_initialized()
        check_hardware(config, self.device)
        if self.owns_process_group:
            configure_flight_recorder(config.comm, config.job.dump_folder)
            init_distributed(config.comm, self.device)
        self.watch = None
        if self.owns_process_group and config.comm.trace_buf_size:
            self.watch = Watch(config.comm, config.job.dump_folder, axis_degrees(config.parallelism))
        self.stop = stop or StopRequest()
        self.stop.defer()  # from here on a rank that left alone would make the others fail
        self.stopped = False
        note("building the model")
        self.parts = build(config, setup, self.device)
        if self.owns_process_group:
            limit_groups(config.comm.init_timeout_seconds)
        self.progress = Progress()
        self.checkpointer = Checkpointer(
            config.checkpoint, config.job.dump_folder, self.parts.models, self.parts.optimizer, self._about()
        )
        self.guard = RunGuard(config, self.parts, self.progress, self.checkpointer)
        note("loading a checkpoint")
        self._restore()
        self._write_config()
        self.profiler = Profiler(config.profiling, config.job.dump_folder)
        self.metrics = Metrics(
            config.metrics,
            config.job,
            config.model_dump(),
            start_step=self.progress.step,
            total_steps=config.training.steps,
            flops_per_token=setup.spec.flops_per_token(setup.args, config.training.seq_len),
            peak_flops=peak_flops(device_name(), config.training.mixed_precision_param),
        )
        self.ledger = Ledger(
            Path(config.job.dump_folder),
            self._account(),
            step=self.progress.step,
            resumable=self.checkpointer.saving,
            writes=dist.get_rank() == 0,
            began=torchtitan.IMPORTED if self.owns_process_group else began,
        )

    def _account(self) -> dict[str, Any]:
        """What `run.json` says of this start."""
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, (socket.gethostname(), device_name()))
        hosts, devices = (dict(Counter(names)) for names in zip(*places, strict=True))
        about = self.checkpointer.about
        return {
            "ranks": len(places),
            "layout": {axis: degree for axis, degree in axis_degrees(self.config.parallelism).items() if degree > 1},
            "hosts": hosts,
            "devices": devices,
            "config": {"path": "config.toml", "sha256": hashlib.sha256(about["config"].encode()).hexdigest()},
            **{key: about[key] for key in ("git", "versions", "data")},
        }

    def _about(self) -> dict[str, Any]:
        """What every checkpoint's manifest says of the run."""
        return {
            "versions": versions(),
            "model": {"name": self.setup.spec.name, **self.setup.args.model_dump()},
            "git": git_revision() if dist.get_rank() == 0 else None,
            "ranks": dist.get_world_size(),
            "data": self.parts.loader.fingerprint,
            "config": to_toml(self.config),
        }

    def _write_config(self) -> None:
        folder = Path(self.config.job.dump_folder)
        text = to_toml(self.config)
        if dist.get_rank() == 0:
            for name in ("config.toml", self.config.job.save_config_file):
                if name:
                    write_whole(folder / name, text.encode())
        if self.config.job.print_config:
            logger.info(f"Configuration:\n{text}")

    # ---- checkpoints

    def _restore(self) -> None:
        config = self.config.checkpoint
        if resumed := self.checkpointer.resume():
            self._apply(resumed, set(config.exclude_from_loading))
            if changed := changed_settings(resumed.manifest, self.checkpointer.about):
                logger.info(f"Changed since step {resumed.step}: {', '.join(changed)}")
            return
        if config.enable and config.initial_load_in_hf:
            folder = Path(config.initial_load_path or find_asset(self.config.model.hf_assets_path))
            load_hf(self.parts.models, folder, self.setup.spec.hf.names(self.setup.args))
            logger.info(f"Starting from the Hugging Face weights in {folder}")
        elif config.enable and config.initial_load_path:
            if initial := self.checkpointer.load_initial(storage_path(config.initial_load_path)):
                self._apply(initial, set())
            logger.info(f"Starting from {config.initial_load_path}")
        else:
            logger.info(f"Starting from scratch, seed {self.config.debug.seed}")

    def _apply(self, resumed: Resumed, exclude: set[str]) -> None:
        state = resumed.train_state
        if "train_state" not in exclude:
            self.progress.load_state_dict(state["progress"])
            self.guard.load(state)
        if "lr_scheduler" not in exclude:
            self.parts.schedule.load_state_dict(state["lr_scheduler"])
        if "dataloader" not in exclude:
            self.parts.loader.load_state_dict(state["data"])

    def _save(self) -> None:
        note(SAVING)
        config, step = self.config.checkpoint, self.progress.step
        last = step == self.config.training.steps
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.progress.data)
        train_state = {
            "progress": self.progress.state_dict(),
            "lr_scheduler": self.parts.schedule.state_dict(),
            "data": merge_states(states),
            "guard": self.guard.spikes.state_dict(),
        }
        self.checkpointer.save(step, train_state, model_only=last and config.last_save_model_only)
        if last and config.last_save_in_hf:
            folder = self.checkpointer.export_hf(step, self.setup.spec, self.setup.args, self.setup.tokenizer)
            logger.info(f"Exported Hugging Face weights to {folder}")

    # ---- the loop

    def train(self) -> Progress:
        """Train to the last step, or until some rank is asked to stop: then all save, after the same step.

        Raises:
            NonFiniteError: NaN or infinity, and `training.on_nonfinite = "stop"`.
            CheckpointError: a save failed.
            GuardError: spike after spike, or copies of the weights that differ.
            UserError: memory is used up, or the data can't be read.
        """
        steps = self.config.training.steps
        self._seed_step()
        try:
            with self._frozen_gc(), self.profiler.capture_oom():
                batches = iter(self.parts.loader) if self.progress.step < steps else iter(())
                self.stopped = bool(AnyRank(self.stop.requested, self.device).answer() > 0)
                while self.progress.step < steps and not self.stopped:
                    with self.ledger.step(self.progress.step + 1):
                        self._train_one(batches)
                note(SAVING)
                with self.ledger.spend("saves"):
                    self.checkpointer.close()
        except (RuntimeError, MemoryError) as error:
            if self.watch is not None and (hang := self.watch.explain(error)):
                raise HangError(hang) from error
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"step {self.progress.step + 1}: out of memory; {self.checkpointer.last_good()}.\n"
                "Lower training.local_batch_size (training.global_batch_size keeps the batch, by accumulation) or "
                f"training.seq_len, shard over more ranks, or set training.enable_cpu_offload = true.\n{error}"
            ) from error
        return self.progress

    def _train_one(self, batches: Iterator[StepBatch]) -> None:
        config, parts, progress, metrics = self.config, self.parts, self.progress, self.metrics
        waiting_since = time.perf_counter()
        begin("data", f"{DATA} from {parts.loader.name}", progress.step + 1)
        with self.ledger.spend("data"):
            batch = next(batches)
        data_time = time.perf_counter() - waiting_since
        note("running forward and backward")
        rate = parts.schedule.apply()
        if config.optimizer.early_step_in_backward:
            with self.ledger.spend("saves"):
                self.checkpointer.wait_staged()
        first = progress.first_loss is None
        with device_syncs(report=config.debug.report_device_syncs and not first):
            result = forward_backward(
                parts,
                batch,
                config.training.local_batch_size,
                config.training.max_norm,
                stop=self.stop.requested,
                agree=self.guard.spikes.acts,
            )
            with self.ledger.spend("saves"):
                self.checkpointer.wait_staged()
            note("updating the weights")
            spike = self.guard.spikes.judge(progress.step + 1, result.loss, result.grad_norm)
            if self._healthy(result, spike):
                parts.optimizer.step()
                self._refresh_scales()
            parts.optimizer.zero_grad(set_to_none=True)
        if spike is not None and (earlier := self.guard.act(spike)):
            self._go_back(earlier)
            progress.data = batch.state
            return
        parts.schedule.advance()
        progress.step += 1
        self.stopped = result.stop and progress.step < config.training.steps
        progress.tokens += result.tokens
        progress.data = batch.state
        progress.last_loss = result.loss
        if first:
            progress.first_loss = result.loss
            if config.compile.enable:
                seconds = time.perf_counter() - waiting_since
                logger.info(f"The first step took {seconds:.1f} s, most of it compilation")
            set_timeout(config.comm.train_timeout_seconds)
            if self.watch is not None:
                self.watch.limit = config.comm.train_timeout_seconds
        metrics.count(progress.step, result.tokens, data_time)
        if metrics.due(progress.step):
            record = metrics.log(
                progress.step,
                loss=result.loss,
                max_loss=max_over_ranks(result.local_loss, parts.mesh, parts.device),
                grad_norm=result.grad_norm,
                lr=rate,
                tokens=progress.tokens,
                skipped=progress.skipped,
            )
            self.ledger.heartbeat(progress.step)
            self.guard.name_stragglers(record)
        self.profiler.step(progress.step)
        self._after_step()

    def _after_step(self) -> None:
        """What interrupts training: validation, saving, garbage collection. None of it counts in the rates."""
        config, step = self.config, self.progress.step
        paused = self.metrics.pause()
        self.guard.compare_copies()  # before a save, which would make a fault permanent
        validation, last = config.validation, step == config.training.steps
        if self.stopped:
            with self.ledger.spend("saves"):
                self._save_and_stop()
            return
        if self.parts.validation is not None and (step % validation.freq == 0 or last):
            loader, compute = self.parts.validation
            with self.ledger.spend("validation"):
                loss, tokens = evaluate(compute, loader, self.parts.mesh, self.device, validation.steps)
            self.metrics.log_validation(step, loss, tokens)
        if self.checkpointer.due(step, config.training.steps):
            with self.ledger.spend("saves"):
                self._save()
        if step % config.training.gc_freq == 0:
            found = gc.collect()
            if config.training.gc_debug:
                logger.info(f"step {step}: garbage collection found {found} objects in reference cycles")
        self._seed_step()
        self.metrics.resume(paused)

    def _save_and_stop(self) -> None:
        """There may be little time left, so the save comes first, and nothing else."""
        step = self.progress.step
        if self.checkpointer.saving:
            logger.info(f"Asked to stop: saving step {step}")
            self._save()
            self.checkpointer.close()
        else:
            logger.warning(f"Asked to stop: step {step} is lost, as checkpoint.enable = false or load_only = true")

    def _healthy(self, result: StepResult, spike: Spike | None) -> bool:
        """Whether to update the weights."""
        if spike is not None and spike.action != "warn":
            return False
        if not result.finite:
            self._nonfinite(result)
        return result.finite

    def _go_back(self, resumed: Resumed) -> None:
        """Be at an earlier step again, but for the data: its reader goes on where it is."""
        self.ledger.furthest = max(self.ledger.furthest, self.progress.step)
        self.progress.load_state_dict(resumed.train_state["progress"])
        self.parts.schedule.load_state_dict(resumed.train_state["lr_scheduler"])
        self._refresh_scales()
        self._seed_step()
        self.metrics.rewind(resumed.step)

    def _refresh_scales(self) -> None:
        float8 = self.config.quantize.linear.float8
        if uses(self.config, FLOAT8) and float8.precompute_float8_dynamic_scale_for_fsdp:
            refresh_scales(self.parts.models)

    def _nonfinite(self, result: StepResult) -> None:
        """Leave this step's update out, or stop the run."""
        step = self.progress.step + 1
        what = f"loss {result.loss}, gradient norm {result.grad_norm}"
        if self.config.training.on_nonfinite == "stop":
            self.checkpointer.wait()
            updated = "already" if self.config.optimizer.early_step_in_backward else "not"
            raise NonFiniteError(
                f"step {step}: {what}. The weights were {updated} updated; {self.checkpointer.last_good()}.\n"
                'Lower optimizer.lr or training.max_norm, or set training.on_nonfinite = "skip" to go on without.'
            )
        self.guard.left_out()
        logger.warning(f"step {step}: {what}; update skipped ({self.progress.skipped} so far)")

    def _seed_step(self) -> None:
        """Make all randomness of the next step a function of (seed, step, rank), so that there is none to save."""
        key = f"{self.config.debug.seed}:{self.progress.step}:{self.parts.mesh.dp_rank}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1)

    @contextmanager
    def _frozen_gc(self) -> Iterator[None]:
        """Collect garbage only at `gc_freq`: on all ranks at once, so that none makes the others wait."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            gc.unfreeze()

    # ---- the end

    def close(self, error: BaseException | None = None) -> None:
        """Release what the run holds. After an error the other ranks may be gone: record collectives, don't wait."""
        failed = error is not None
        self.ledger.end(self.progress.step, self.config.training.steps, error)
        if self.watch is not None and isinstance(error, Exception) and not isinstance(error, HangError):
            self.watch.failed(error)
        self.metrics.close()
        self.profiler.close()
        self.parts.loader.close()
        if self.parts.validation is not None:
            self.parts.validation[0].close()
        if not failed:
            logger.info(self.ledger.goodput())
        ends_together = self.owns_process_group and dist.is_initialized() and not failed
        if ends_together:
            note("ending")
            dist.barrier()
        if self.watch is not None:
            self.watch.close()
        if ends_together:
            dist.destroy_process_group()
