"""The metrics that a run reports at its logged steps."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.registry import Custom
from torchtitan.config.sections import schema
from torchtitan.config.sections.metrics import Metrics
from torchtitan.parallel.agree import from_rank_0
from torchtitan.telemetry.console import ConsoleSink, StageCost
from torchtitan.telemetry.experts import DeadExperts, ExpertLoads, Overload, read_loads
from torchtitan.telemetry.history import History
from torchtitan.telemetry.run_record import RunRecord
from torchtitan.telemetry.tracker_set import Trackers
from torchtitan.telemetry.trackers import Record
from torchtitan.telemetry.trackers.jsonl import JsonlSink
from torchtitan.utils.activity import Stopwatch
from torchtitan.utils.device import gpu_sensors, peak_memory
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger

TRAINING = ("first_step", "steps", "repeated", "data", "staging")
"""Kinds of time that rates include."""
_PEAKS = Path(__file__).with_name("peak_flops.toml")


class MetricsReporter:
    """Turns steps into records every `log_freq` steps, and sends them to all sinks.

    Rates are per device, over the steps since the last record. Validation and saves are excluded.
    """

    def __init__(
        self,
        config: Metrics,
        job: schema.Job,
        settings: Mapping[str, Any],
        run_record: RunRecord,
        history: History,
        *,
        start_step: int,
        total_steps: int,
        stages: Sequence[StageCost],
        peak_flops: float | None,
        experts: bool = False,
        custom: Custom | None = None,
        samples: bool = False,
    ):
        """
        Args:
            stages: cost of a step in each stage of the data.
            settings: the whole configuration, for trackers.
            history: of the checkpoint that this start resumes from.
            custom: keys of registered sinks.
            experts: the model is a mixture of experts.
            samples: the run generates texts.
        """
        self.freq = config.log_freq
        self.start = start_step
        self.total = total_steps
        self.stages = stages
        self.peak_flops = peak_flops
        rank = dist.get_rank()
        folder = Path(job.dump_folder)
        self.console = ConsoleSink(
            total_steps, start_step, config.disable_color_printing or rank != 0, stages
        )
        self.history = history
        enabled = {"metrics": True, "evals": True, "expert_load": experts, "samples": samples}
        self.files = {
            name: JsonlSink(folder / f"{name}.jsonl", history, new_run=start_step == 0)
            for name in enabled
            if enabled[name] and rank == 0
        }
        self.trackers = Trackers(
            config, job, settings, run_record, start_step=start_step, custom=custom or Custom()
        )
        self._begin()
        self._dead = DeadExperts()
        self._overload = Overload()
        self._stopwatch = Stopwatch()

    def due(self, step: int) -> bool:
        return step % self.freq == 0 or step in (self.start + 1, self.total)

    def _begin(self) -> None:
        """Begin the next record."""
        self.new_tokens = self.steps = 0
        self.new_flops = 0.0

    def count(self, step: int, tokens: int, stage: int = 0) -> None:
        """Record a finished step.

        Args:
            tokens: tokens that all ranks read, predicted or not.
            stage: index of the stage of the data.
        """
        self.new_tokens += tokens
        self.new_flops += tokens * self.stages[stage].flops_per_token
        self.steps += 1
        self.console.advance(step)

    def log(
        self,
        step: int,
        values: Record,
        *,
        experts: Tensor | None = None,
        logged: Mapping[str, float] | None = None,
    ) -> Record:
        """Record `step`.

        Args:
            values: loss, max_loss and grad_norm, None if the step predicted nothing; lr; tokens and
                skipped_steps of the whole run; and what only some runs have.
            experts: the result of `ExpertBalance.take`.
            logged: values that the user's callbacks log.

        Raises:
            UserError: a callback logs under the name of a built-in metric.
        """
        seconds = self._stopwatch.lap()
        elapsed = sum(seconds[kind] for kind in TRAINING)
        rate = self.new_tokens / elapsed / dist.get_world_size()
        flops = self.new_flops / elapsed / dist.get_world_size()
        memory_gib, memory_pct = peak_memory()
        record = {
            "step": step,
            **values,
            "tokens_per_second": rate,
            "tflops": flops / 1e12,
            "mfu": 100 * flops / self.peak_flops if self.peak_flops else None,
            "memory_gib": memory_gib,
            "memory_pct": memory_pct,
            "data_loading_pct": 100 * seconds["data"] / elapsed,
            "step_time_s": elapsed / max(self.steps, 1),
            "time": time.time(),
            **gpu_sensors(),
        }
        loads = read_loads(experts) if experts is not None else None
        if loads is not None:
            record |= self._log_experts(step, loads)
        for name, value in (logged or {}).items():
            if name in record or name.startswith(("validation_", "eval/")):
                raise UserError(f"run.log({name!r}): a built-in metric has this name")
            record[name] = value
        self._send(record)
        self._begin()
        return record

    def _log_experts(self, step: int, loads: ExpertLoads) -> Record:
        """Record the load of each expert since the last record, and warn of dead and overloaded
        experts.

        Returns:
            Entries for the record of the step.
        """
        dead, warning = self._dead.observe(loads)
        for text in (warning, self._overload.observe(loads, self.steps)):
            if text is not None:
                logger.warning(f"step {step}: {text}")
        self._write("expert_load", {"step": step, "steps": self.steps, "rows": loads.rows})
        return loads.summary() | {"dead_experts": dead}

    def continue_after(self, step: int) -> None:
        """Begin a branch of the history after `step`, the same on all ranks, and let the records
        follow it. Most trackers keep the abandoned values beside the new ones.
        """
        self.history.begin(step)
        restored = {name: file.follow(step) for name, file in self.files.items()}
        branches = self.history.branches
        self.history.branches, records = from_rank_0((branches, restored.get("metrics", [])))
        self.trackers.call("rewind", min([step, *(record["step"] - 1 for record in records)]))
        for record in records:
            self.trackers.call("log", record)

    def rewind(self, step: int) -> None:
        """Go back to `step` within this start."""
        self.continue_after(step)
        self._stopwatch.lap()
        self._begin()

    def log_validation(self, step: int, sets: Sequence[Mapping[str, Any]]) -> None:
        """Record a validation.

        Args:
            sets: name (empty for a single set), loss, bits_per_byte (or None) and tokens of each
                set. With the average of the weights, also loss_ema and bits_per_byte_ema.
        """
        record: Record = {"step": step}
        for values in sets:
            suffix = f"/{values['name']}" if values["name"] else ""
            for key, value in values.items():
                if key != "name":
                    record[f"validation_{key}{suffix}"] = value
        self._send(record | {"time": time.time()})

    def log_evals(self, step: int, scores: Mapping[str, float]) -> None:
        """Record benchmarks.

        Args:
            scores: results by task and metric.
        """
        results = {f"eval/{name}": value for name, value in scores.items()}
        self._send({"step": step, **results, "time": time.time()})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Record texts of the model.

        Args:
            samples: for each, the prompt, the text after it, and the reason why it ended.
        """
        for sample in samples:
            text = json.dumps(f"{sample['prompt']} | {sample['text']}", ensure_ascii=False)
            logger.info(f"step {step}: {text}")
            self._write("samples", {"step": step, **sample})
        self.trackers.call("log_samples", step, samples)

    def event(self, event: Mapping[str, Any]) -> None:
        """Pass an event of the run to the trackers."""
        self.trackers.call("event", event)

    def _send(self, record: Record) -> None:
        self.console.log(record)
        self._write("metrics", record)
        self.trackers.call("log", record)

    def _write(self, name: str, record: Record) -> None:
        """Append to a file if this rank writes it."""
        if name in self.files:
            self.files[name].log(record)

    def close(self, reason: str = "completed") -> None:
        """
        Args:
            reason: the end of this start, as in `run.json`.
        """
        self._stopwatch.close()
        self.console.close()
        self.trackers.close(reason)


def describe_sources(
    names: Sequence[str], sums: Sequence[Sequence[float]], tokens: Sequence[int]
) -> dict[str, float | None]:
    """Entries `loss/<name>`, `tokens/<name>` and `bytes_per_token/<name>`.

    Args:
        sums: the result of `SourceTally.take`. A source without rows since the last record has no
            loss.
        tokens: tokens that the whole run has read from each source.
    """
    record: dict[str, float | None] = {}
    for name, (loss, count, size), total in zip(names, sums, tokens, strict=True):
        record[f"loss/{name}"] = loss / count if count else None
        record[f"tokens/{name}"] = total
        record[f"bytes_per_token/{name}"] = size / count if count else None
    return record


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device for compute in `dtype`, from `peak_flops.toml`; None if unknown.

    Args:
        device_name: torch's name of the device, for example `NVIDIA H100 80GB HBM3`.
    """
    if dtype != "bfloat16":
        return None
    peaks: dict[str, float] = tomli.loads(_PEAKS.read_text(encoding="utf-8"))
    if "GeForce" in device_name:
        return peaks.get(device_name)
    matches = [name for name in peaks if re.search(rf"\b{re.escape(name)}\b", device_name)]
    return peaks[max(matches, key=len)] if matches else None
