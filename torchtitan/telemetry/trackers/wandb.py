"""Weights & Biases. Every start of a run continues the same W&B run, online and offline."""

import os
from collections.abc import Mapping, Sequence

from torchtitan.telemetry.trackers.base import STEP, Record, TrackedRun, scalars
from torchtitan.utils.logging import logger

FINISH_SECONDS = "25"
"""Time limit of uploads at the end; later records stay on disk for `wandb sync`."""


class WandbSink:
    """A W&B run. W&B's environment variables set its project, entity, name and id when it is
    created.

    W&B's step only ever grows, so it would drop the steps that are trained again after a rewind
    or a resume. All metrics are therefore shown against `train/step`, and repeated steps as a
    second line over the same steps.
    """

    def __init__(self, run: TrackedRun):
        import wandb

        env = os.environ
        env.setdefault("WANDB_FINISH_TIMEOUT", FINISH_SECONDS)
        defaults = {
            "id": run.id,
            "project": env.get("WANDB_PROJECT") or "torchtitan",
            "entity": env.get("WANDB_TEAM") or env.get("WANDB_ENTITY"),
            "name": env.get("WANDB_RUN_NAME") or env.get("WANDB_NAME") or run.name,
        }
        identity = defaults | {key: value for key, value in run.state.items() if key in defaults}
        if run.rank is not None:
            identity |= {"id": f"{run.id}-rank_{run.rank}", "group": run.id}
        elif env.get("WANDB_RUN_ID"):
            identity["id"] = env["WANDB_RUN_ID"]
        self.reason = "completed"
        self.run = wandb.init(
            **identity,
            resume="allow",
            notes=run.description,
            dir=str(run.folder),
            config=dict(run.config),
        )
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        state = {key: getattr(self.run, key) for key in (*defaults, "url")}
        run.save_state({key: value for key, value in state.items() if value})
        where = self.run.url or f"offline, in {self.run.dir}"
        logger.info(f"Weights & Biases: run {self.run.id}, {where}")

    def log(self, record: Record) -> None:
        self.run.log({STEP: record["step"], **scalars(record)})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Record texts of the model as a table."""
        import wandb

        rows = [[step, sample["prompt"], sample["text"]] for sample in samples]
        self.run.log(
            {STEP: step, "samples": wandb.Table(columns=["step", "prompt", "text"], data=rows)}
        )

    def ended(self, reason: str) -> None:
        """Keep the reason for `close`. W&B shows a preempted run as such."""
        self.reason = reason
        if reason == "preempted":
            self.run.mark_preempting()

    def close(self) -> None:
        self.run.finish(exit_code=0 if self.reason == "completed" else 1)
