"""TensorBoard event files."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.observe.sinks.base import Record
from torchtitan.observe.sinks.names import scalars


class TensorBoardSink:
    """Writes them without TensorFlow or `torch.utils.tensorboard`'s slow import."""

    def __init__(self, folder: Path, start_step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary, self.histogram, self.session = Event, Summary, HistogramProto, SessionLog
        self.folder = folder
        self.open: Callable[[], Any] = lambda: EventFileWriter(str(folder))
        self.writer = self.open()
        self.rewind(start_step)

    def rewind(self, step: int) -> None:
        """Make TensorBoard hide what it has of later steps."""
        start = self.session(status=self.session.START)
        self.writer.add_event(self.event(wall_time=time.time(), step=step + 1, session_log=start))

    def log(self, record: Record) -> None:
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()]
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
