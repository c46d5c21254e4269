"""The norm of one layer's gradient, every few steps.

torchtitan train CONFIG.toml --experimental.custom_import gradient_norm --training.callbacks
'["gradient_norm"]'
"""

from torchtitan.config.registry import Section, callbacks
from torchtitan.train.callbacks import Callback, Run


class Keys(Section):
    parameter: str = "layers.0.attention.wq.weight"
    """Its name in the model."""
    every: int = 10
    """Steps between two measurements."""


@callbacks.register("gradient_norm", Keys)
class GradientNorm(Callback):
    def __init__(self, keys: Keys):
        self.keys = keys

    def before_update(self, run: Run) -> None:
        if (run.progress.step + 1) % self.keys.every:
            return
        for model in run.models:  # in a pipeline, one rank has the layer
            for name, weight in model.named_parameters():
                if name == self.keys.parameter and weight.grad is not None:
                    run.log(f"grad_norm/{name}", weight.grad.norm())
