"""Where metrics go: `metrics.jsonl`, TensorBoard, Weights & Biases."""

import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from torchtitan.config import schema
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole

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


def _require(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{key} needs the package {package}: pip install {package}, or set {key} = false")
