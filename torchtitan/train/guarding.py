"""What a trainer does about what the guard sees."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.checkpoint import Checkpointer, Resumed
from torchtitan.checkpoint.state import model_state, optimizer_state
from torchtitan.config.schema import Config
from torchtitan.observe.guard import Guard, Spike, Stragglers, append_event
from torchtitan.observe.replicas import disagreements
from torchtitan.parallel.collectives import gather
from torchtitan.train.state import Parts, Progress
from torchtitan.utils.device import seconds_of_matmuls
from torchtitan.utils.errors import GuardError
from torchtitan.utils.logging import logger


class RunGuard:
    """Carries out a guard's decisions. All ranks make the same calls."""

    def __init__(self, config: Config, parts: Parts, progress: Progress, checkpointer: Checkpointer):
        self.config, self.parts, self.progress, self.checkpointer = config.guard, parts, progress, checkpointer
        self.spikes = Guard(config.guard, config.training.global_batch_size)
        self.stragglers = Stragglers(config.guard)
        self.updates_in_backward = config.optimizer.early_step_in_backward
        self.journal = Path(config.job.dump_folder, "guard.jsonl")

    # ---- spikes

    def act(self, spike: Spike) -> Resumed | None:
        """Do what is to be done about a spike, and write it down; the checkpoint that was gone back to, if any.

        Raises:
            GuardError: it is one too many.
        """
        if spike.action == "stop":
            self.checkpointer.wait()
            raise GuardError(
                f"step {spike.step}: {spike.reason}; {self.config.limit} attempts to go on brought no calm "
                f"(guard.limit); {self.checkpointer.last_good()}.\nLower optimizer.lr or training.max_norm, go back "
                "further (checkpoint.load_step), or raise guard.limit or the thresholds."
            )
        event: dict[str, Any] = {"step": spike.step, "policy": spike.action, "reason": spike.reason}
        resumed = self.checkpointer.rewind(spike.step) if spike.action == "rewind" else None
        if spike.action == "rewind" and resumed is None and self.updates_in_backward:
            raise GuardError(
                f"step {spike.step}: {spike.reason}. There is no checkpoint yet to go back to, and the weights are "
                "changed already (optimizer.early_step_in_backward). Lower checkpoint.interval or optimizer.lr."
            )
        if spike.action == "warn":
            done = "the update is made all the same (guard.policy)"
        elif resumed is None:
            done = "the update is left out" + ("; there is no checkpoint yet" if spike.action == "rewind" else "")
            event["rows"] = self.left_out()
        else:
            done = f"back to step {resumed.step}, and on with the data after this step"
            rows = self.spikes.leave_out(self._state_in(resumed.train_state)["rows"])
            event |= {"back_to": resumed.step, "rows": rows}
        logger.warning(f"step {spike.step}: {spike.reason}; {done}")
        if dist.get_rank() == 0:
            append_event(self.journal, event | {"time": time.time()})
        return resumed

    def left_out(self) -> list[int]:
        """Count the step under way as skipped; the rows that the weights have not seen."""
        self.progress.skipped += 1
        return self.spikes.leave_out(self.spikes.rows - self.spikes.rows_per_step)

    def load(self, train_state: dict[str, Any]) -> None:
        """Continue as a checkpoint's guard would have."""
        self.spikes.load_state_dict(self._state_in(train_state))

    def _state_in(self, train_state: dict[str, Any]) -> dict[str, Any]:
        # Checkpoints of earlier versions have none.
        return train_state.get("guard", {"rows": train_state["progress"]["step"] * self.spikes.rows_per_step})

    # ---- ranks

    def compare_copies(self) -> None:
        """Where it is time to, compare what several ranks hold: weights, buffers, optimizer state.

        Raises:
            GuardError: copies differ.
        """
        step, models = self.progress.step, self.parts.models
        if not self.config.weight_hash_freq or step % self.config.weight_hash_freq:
            return
        buffers = {f"buffer {name}": value for model in models for name, value in model.named_buffers()}
        optimizer = {f"optimizer {name}": x for name, x in optimizer_state(models, self.parts.optimizer).items()}
        if found := disagreements(model_state(models) | buffers | optimizer, self.parts.mesh, self.parts.device):
            self.checkpointer.wait()
            more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
            raise GuardError(
                f"after step {step}: ranks hold different copies: {'; '.join(found[:3])}{more}.\n"
                "A device or its memory is faulty, or the layout has a mistake. Run the same command again "
                f"({self.checkpointer.last_good()}); if the same rank stands alone again, without its machine."
            )

    def name_stragglers(self, record: dict[str, Any]) -> None:
        """At a logged step, measure each rank's own speed and warn of slow ones."""
        if not self.config.straggler_factor:
            return
        waits = record["data_loading_pct"] / 100 * record["step_time_s"]
        compute, data = zip(*gather([seconds_of_matmuls(), waits], self.parts.device), strict=True)
        for rank, what in self.stragglers.observe(compute, data, record["step_time_s"]).items():
            logger.warning(f"step {record['step']}: rank {rank} is slow: it {what}")
