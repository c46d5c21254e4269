"""TensorBoard event files."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.telemetry.trackers.base import Record, scalars


class TensorBoardSink:
    """Writes event files without TensorFlow or `torch.utils.tensorboard`'s slow import."""

    def __init__(self, folder: Path):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._summary = Summary
        self._session = SessionLog
        self._folder = folder
        self._open: Callable[[], Any] = lambda: EventFileWriter(str(folder))
        self._writer = self._open()

    def rewind(self, step: int) -> None:
        """Make TensorBoard hide the records of later steps."""
        start = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step + 1, session_log=start))

    def log(self, record: Record) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in scalars(record).items()
        ]
        self._add(record["step"], record["time"], values)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Show texts of the model in the tab of texts."""
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(display_name=None, description=None)
        values = []
        for i, sample in enumerate(samples, 1):
            lines = f"{sample['prompt']}{sample['text']}".splitlines()
            # indented as code: TensorBoard renders Markdown
            text = "\n".join(f"    {line}" for line in lines)
            values.append(
                self._summary.Value(
                    tag=f"samples/{i}", metadata=metadata, tensor=make_tensor_proto([text.encode()])
                )
            )
        self._add(step, time.time(), values)

    def _add(self, step: int, at: float, values: list[Any]) -> None:
        if not self._folder.exists():  # deleted
            self._writer = self._open()
        self._writer.add_event(
            self._event(wall_time=at, step=step, summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()
