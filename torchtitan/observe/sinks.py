"""Where metrics go: console, `metrics.jsonl`, TensorBoard, Weights & Biases."""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from torchtitan.config import schema
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.logging import logger

Record = dict[str, Any]


class Sink(Protocol):
    """Where records go.

    One that a module of the user registers is made by `make(dump_folder, start_step[, keys])`, on rank 0, or on all
    with `metrics.save_for_all_ranks`; `start_step` is 0 or the step of the checkpoint. Its method `rewind(step)`, if it
    has one, is called when the steps after `step` will be trained again.
    """

    def log(self, record: Record) -> None:
        """Take a record: names to numbers, with `step` and `time`. Those of a validation have other names."""

    def close(self) -> None:
        """The run ends."""


class JsonlSink:
    """One JSON object per line. After a resume the file continues as if the run had never stopped."""

    def __init__(self, path: Path, start_step: int):
        self.path = path
        self._drop_after(start_step)
        self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a", buffering=1)

    def rewind(self, step: int) -> None:
        """Drop what was recorded after `step`."""
        self.file.close()
        self._drop_after(step)
        self._open()

    def _drop_after(self, start_step: int) -> None:
        """Drop the steps that will be trained again; set aside, don't overwrite, another run's file."""
        path = self.path
        if not path.exists():
            return
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
        if not self.path.exists():  # deleted: its open file would take the records with it
            self.file.close()
            self._open()
        self.file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorBoardSink:
    """TensorBoard event files, without TensorFlow or `torch.utils.tensorboard`'s slow import."""

    def __init__(self, folder: Path):
        _require("tensorboard", "metrics.enable_tensorboard")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary, self.histogram, self.folder = Event, Summary, HistogramProto, folder
        self.open: Callable[[], Any] = lambda: EventFileWriter(str(folder))
        self.writer = self.open()

    def log(self, record: Record) -> None:
        values = [
            self.summary.Value(tag=key, simple_value=value)
            for key, value in record.items()
            if key not in ("step", "time") and isinstance(value, int | float)
        ]
        self._add(record["step"], record["time"], values)

    def log_histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Record the distribution of the values of each tag."""
        self._add(
            step,
            time.time(),
            [self.summary.Value(tag=tag, histo=self._histogram(np.array(of_tag))) for tag, of_tag in values.items()],
        )

    def log_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Show texts of the model in the tab of texts."""
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(display_name=None, description=None)
        values = []
        for i, sample in enumerate(samples, 1):
            lines = f"{sample['prompt']}{sample['text']}".splitlines()
            text = "\n".join(f"    {line}" for line in lines)  # as it is: TensorBoard renders Markdown
            values.append(
                self.summary.Value(tag=f"samples/{i}", metadata=metadata, tensor=make_tensor_proto([text.encode()]))
            )
        self._add(step, time.time(), values)

    def _histogram(self, values: Any) -> Any:
        counts, edges = np.histogram(values, bins=30)
        return self.histogram(
            min=values.min(),
            max=values.max(),
            num=len(values),
            sum=values.sum(),
            sum_squares=(values**2).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )

    def _add(self, step: int, at: float, values: list[Any]) -> None:
        if not self.folder.exists():  # deleted
            self.writer = self.open()
        self.writer.add_event(self.event(wall_time=at, step=step, summary=self.summary(value=values)))

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """Weights & Biases; its usual environment variables name project, entity and run."""

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

    def log_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Record texts of the model as a table."""
        import wandb

        rows = [[step, sample["prompt"], sample["text"]] for sample in samples]
        self.run.log({"samples": wandb.Table(columns=["step", "prompt", "text"], data=rows)}, step=step)

    def close(self) -> None:
        self.run.finish()


class ConsoleSink:
    """One readable line per record, and on a terminal a live progress bar below."""

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
        for line in self.line(record).splitlines():
            logger.info(line)

    def line(self, record: Record) -> str:
        """The record in words."""
        step = f"step {record['step']:>{len(str(self.total))}}/{self.total}"
        losses = (key.removeprefix("validation_loss") for key in record if key.startswith("validation_loss"))
        if sets := [suffix for suffix in losses if not suffix.startswith("_")]:
            return "\n".join(f"{step}  {_validation(record, name)}" for name in sets)
        if found := {key.removeprefix("eval/"): value for key, value in record.items() if key.startswith("eval/")}:
            shown = (f"{name} {value:.4f}" for name, value in found.items() if "_stderr" not in name)
            return f"{step}  eval  {'  '.join(shown)}"
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


def _validation(record: Record, suffix: str) -> str:
    """
    Args:
        suffix: of the keys of one validation set.
    """
    loss, bits, tokens = (record[f"validation_{key}{suffix}"] for key in ("loss", "bits_per_byte", "tokens"))
    per_byte = f", {bits:.4f} bits per byte," if bits is not None else ""
    name = f" of {suffix[1:]}" if suffix else ""
    average = record.get(f"validation_loss_ema{suffix}")
    averaged = f" ({average:.4f} averaged)" if average is not None else ""
    return f"validation loss{name} {loss:.4f}{averaged}{per_byte} over {tokens:,} tokens"


def _require(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{key} needs the package {package}: pip install {package}, or set {key} = false")
