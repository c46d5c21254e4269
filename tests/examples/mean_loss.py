"""The mean loss of all steps of a run, whatever its starts and rewinds.

torchtitan train CONFIG.toml --experimental.custom_import mean_loss --training.callbacks mean_loss
"""

from typing import Any

from torchtitan.config.registry import callbacks
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.state import StepResult


@callbacks.register("mean_loss")
class MeanLoss(Callback):
    def __init__(self) -> None:
        self.steps = 0
        self.sum = 0.0

    def after_step(self, run: Run, result: StepResult) -> None:
        if result.loss is None:  # no token of the batch was predicted
            return
        self.steps += 1
        self.sum += result.loss
        run.log("mean_loss", self.sum / self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.sum = state["sum"]
