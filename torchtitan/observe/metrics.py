"""What a run reports, and where: console, `metrics.jsonl`, TensorBoard, W&B."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from torchtitan.config import schema
from torchtitan.utils.device import peak_memory
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.logging import logger

Record = dict[str, Any]


class Sink(Protocol):
    """A place that records go to."""

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line. After a resume the file continues as if the run had never stopped."""

    def __init__(self, path: Path, start_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        if path.exists():
            self._drop_after(path, start_step)
        self.file = path.open("a", buffering=1)

    def rewind(self, step: int) -> None:
        """Drop what was recorded after `step`."""
        self.file.close()
        self._drop_after(self.path, step)
        self.file = self.path.open("a", buffering=1)

    @staticmethod
    def _drop_after(path: Path, start_step: int) -> None:
        """Drop the steps that will be trained again; another run's file is set aside, not overwritten."""
        if start_step == 0:
            path.rename(path.with_name(f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}{path.suffix}"))
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= start_step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue  # a line cut off by a crash
        write_whole(path, "".join(kept).encode())

    def log(self, record: Record) -> None:
        self.file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorBoardSink:
    """TensorBoard event files, without TensorFlow or `torch.utils.tensorboard`'s slow import."""

    def __init__(self, folder: Path):
        _require("tensorboard", "metrics.enable_tensorboard")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary = Event, Summary
        self.writer = EventFileWriter(str(folder))

    def log(self, record: Record) -> None:
        values = [
            self.summary.Value(tag=key, simple_value=value)
            for key, value in record.items()
            if key not in ("step", "time") and isinstance(value, int | float)
        ]
        self.writer.add_event(
            self.event(wall_time=record["time"], step=record["step"], summary=self.summary(value=values))
        )

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """Weights & Biases; project, entity and run from its usual environment variables."""

    def __init__(self, folder: Path, job: schema.Job, config: dict[str, Any]):
        _require("wandb", "metrics.enable_wandb")
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "torchtitan"),
            entity=os.environ.get("WANDB_TEAM"),
            name=os.environ.get("WANDB_RUN_NAME"),
            notes=job.description,
            dir=str(folder),
            config=config,
        )

    def log(self, record: Record) -> None:
        self.run.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def close(self) -> None:
        self.run.finish()


class ConsoleSink:
    """A readable line per record, and on a terminal a live progress line below."""

    def __init__(self, total_steps: int, start_step: int, plain: bool):
        self.total = total_steps
        self.progress = None
        if not plain and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.progress = Progress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=True
            )
            self.task = self.progress.add_task("training", total=total_steps, completed=start_step)
            self.progress.start()

    def advance(self, step: int) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=step)

    def log(self, record: Record) -> None:
        logger.info(self.line(record))

    def line(self, record: Record) -> str:
        """The record in words."""
        step = f"step {record['step']:>{len(str(self.total))}}/{self.total}"
        if "validation_loss" in record:
            return (
                f"{step}  validation loss {record['validation_loss']:.4f} over {record['validation_tokens']:,} tokens"
            )
        parts = [
            step,
            f"loss {record['loss']:.4f}",
            f"grad norm {record['grad_norm']:.3f}",
            f"lr {record['lr']:.2e}",
            f"{record['tokens_per_second']:,.0f} tok/s",
            f"{record['tflops']:.2f} TFLOP/s",
        ]
        if record["mfu"] is not None:
            parts.append(f"MFU {record['mfu']:.1f}%")
        parts.append(f"{record['memory_gib']:.2f} GiB ({record['memory_pct']:.0f}%)")
        return "  ".join(parts)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()


class Metrics:
    """Turns steps into records, at `log_freq`, and sends them to every sink.

    Rates are per device and over the steps since the last record.
    """

    def __init__(
        self,
        config: schema.Metrics,
        job: schema.Job,
        about: dict[str, Any],
        *,
        start_step: int,
        total_steps: int,
        flops_per_token: float,
        peak_flops: float | None,
    ):
        self.freq, self.start, self.total = config.log_freq, start_step, total_steps
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        rank = dist.get_rank()
        folder = Path(job.dump_folder)
        self.console = ConsoleSink(total_steps, start_step, config.disable_color_printing or rank != 0)
        self.sinks: list[Sink] = [self.console]
        if rank == 0:
            self.sinks.append(JsonlSink(folder / "metrics.jsonl", start_step))
        if rank == 0 or config.save_for_all_ranks:
            own = f"rank_{rank}" if config.save_for_all_ranks else ""
            if config.enable_tensorboard:
                self.sinks.append(TensorBoardSink(folder / config.save_tb_folder / own))
            if config.enable_wandb:
                self.sinks.append(WandbSink(folder, job, about))
        self._reset()

    def _reset(self) -> None:
        self.since, self.new_tokens, self.steps, self.data_time = time.perf_counter(), 0, 0, 0.0

    def due(self, step: int) -> bool:
        return step % self.freq == 0 or step in (self.start + 1, self.total)

    def count(self, step: int, tokens: int, data_time: float) -> None:
        """Take note of a finished step: its tokens on all ranks, and the seconds this rank waited for data."""
        self.new_tokens += tokens
        self.steps += 1
        self.data_time += data_time
        self.console.advance(step)

    def log(
        self, step: int, *, loss: float, max_loss: float, grad_norm: float, lr: float, tokens: int, skipped: int
    ) -> Record:
        """Record `step`; `tokens` and `skipped` (steps) count from the beginning of the run."""
        elapsed = time.perf_counter() - self.since
        rate = self.new_tokens / elapsed / dist.get_world_size()
        flops = rate * self.flops_per_token
        memory_gib, memory_pct = peak_memory()
        record = {
            "step": step,
            "loss": loss,
            "max_loss": max_loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "skipped_steps": skipped,
            "tokens_per_second": rate,
            "tflops": flops / 1e12,
            "mfu": 100 * flops / self.peak_flops if self.peak_flops else None,
            "memory_gib": memory_gib,
            "memory_pct": memory_pct,
            "data_loading_pct": 100 * self.data_time / elapsed,
            "step_time_s": elapsed / max(self.steps, 1),
            "time": time.time(),
        }
        self._send(record)
        self._reset()
        return record

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, which are trained again. TensorBoard and W&B keep both versions."""
        for sink in self.sinks:
            if isinstance(sink, JsonlSink):
                sink.rewind(step)
        self._reset()

    def log_validation(self, step: int, loss: float, tokens: int) -> None:
        """Record a validation."""
        self._send({"step": step, "validation_loss": loss, "validation_tokens": tokens, "time": time.time()})

    def pause(self) -> float:
        """Time at which something other than training begins; hand it back to `resume`."""
        return time.perf_counter()

    def resume(self, paused_at: float) -> None:
        self.since += time.perf_counter() - paused_at

    def _send(self, record: Record) -> None:
        for sink in self.sinks:
            sink.log(record)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def _require(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{key} needs the package {package}: pip install {package}, or set {key} = false")
