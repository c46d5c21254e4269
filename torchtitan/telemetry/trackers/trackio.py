"""Trackio: a local store, a Trackio server, or a Hugging Face Space. Every start continues the same
Trackio run.
"""

import os

from torchtitan.telemetry.trackers.base import Record, TrackedRun, scalars
from torchtitan.utils.logging import logger


class TrackioSink:
    """A run of Trackio, in `TRACKIO_PROJECT`; `TRACKIO_DIR`, `TRACKIO_SERVER_URL` and
    `TRACKIO_SPACE_ID` set its location.

    Trackio identifies a run by its name, so the name ends with the run's id. It keeps all values of
    a step.
    """

    def __init__(self, run: TrackedRun):
        import trackio

        name = run.state.get("name") or f"{run.name}-{run.id}"
        project = run.state.get("project") or os.environ.get("TRACKIO_PROJECT") or "torchtitan"
        self.run = trackio.init(
            project=project,
            name=name,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        run.save_state({"name": name, "project": project})
        logger.info(f"Trackio: run {name} of project {project}")

    def log(self, record: Record) -> None:
        self.run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self.run.finish()
