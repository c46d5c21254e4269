"""MLflow. Every start of a run continues the same MLflow run."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan.telemetry.trackers.base import Record, TrackedRun, scalars
from torchtitan.utils.logging import logger
from torchtitan.utils.wording import flat

TAG = "torchtitan.run_id"
_LONGEST_VALUE = 500
_PARAMS = 100
"""Number of parameters in one request."""
_STATUS = {"completed": "FINISHED", "preempted": "KILLED", "interrupted": "KILLED"}


class MlflowSink:
    """A run of MLflow, in `MLFLOW_EXPERIMENT_NAME`: at `MLFLOW_TRACKING_URI`, else in the dump
    folder.

    MLflow keeps all values of a step, so steps that are trained again appear twice.
    """

    def __init__(self, run: TrackedRun):
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # logged below
        self.metric = Metric
        self.status = "FINISHED"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or run.state.get("uri")
        self.uri = uri or f"sqlite:///{run.folder.resolve()}/mlflow.db"
        self.client = MlflowClient(tracking_uri=self.uri)
        self.id = self._find(run) or self._create(run)
        self.client.update_run(self.id, status="RUNNING")
        experiment = self.client.get_run(self.id).info.experiment_id
        run.save_state({"id": self.id, "experiment_id": experiment, "uri": self.uri})
        logger.info(f"MLflow: run {self.id} at {self.uri}")

    def _find(self, run: TrackedRun) -> str | None:
        """The id of the run; None at its first start.

        The record lacks it if the previous process was killed early.
        """
        if "id" in run.state and run.state.get("uri") == self.uri:
            return str(run.state["id"])
        experiment = self.client.get_experiment_by_name(_experiment())
        if experiment is None:
            return None
        runs = self.client.search_runs(
            [experiment.experiment_id], f"tags.`{TAG}` = '{run.id}'", max_results=1
        )
        return str(runs[0].info.run_id) if runs else None

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        name = _experiment()
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(
                name, artifact_location=artifact_location(self.uri)
            )
        tags = {TAG: run.id, "mlflow.note.content": run.description}
        run_id = str(
            self.client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id
        )
        params = [
            Param(key, str(value)[:_LONGEST_VALUE]) for key, value in flat(run.config).items()
        ]
        for i in range(0, len(params), _PARAMS):
            self.client.log_batch(run_id, params=params[i : i + _PARAMS])
        return run_id

    def log(self, record: Record) -> None:
        at = int(1000 * record.get("time", time.time()))
        values = [
            self.metric(name, float(value), at, record["step"])
            for name, value in scalars(record).items()
        ]
        self.client.log_batch(self.id, metrics=values)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Store texts of the model as an artifact."""
        text = "\n\n".join(f"{sample['prompt']}{sample['text']}" for sample in samples)
        self.client.log_text(self.id, text, f"samples/step-{step}.txt")

    def ended(self, reason: str) -> None:
        self.status = _STATUS.get(reason, "FAILED")

    def close(self) -> None:
        self.client.set_terminated(self.id, self.status)


def artifact_location(uri: str) -> str | None:
    """The folder for files beside an SQLite store at `uri`; None for other stores, which choose it.

    For SQLite, MLflow would put files into the working directory.
    """
    scheme, separator, path = uri.partition(":///")
    if not separator or scheme.partition("+")[0] != "sqlite":
        return None
    return (Path(path.partition("?")[0]).resolve().parent / "mlruns").as_uri()


def _experiment() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "torchtitan"
