"""An exponential moving average of the weights (Polyak and Juditsky, "Acceleration of Stochastic
Approximation by Averaging", 1992).

Each rank averages its own shards, so updates need no communication, and the host never waits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchtitan.config.sections.optim import EMA
from torchtitan.parallel.collectives import local, sharded_like, storage_of


class WeightAverage:
    """The average of a model's parameters (not buffers), in fp32 and sharded like them."""

    def __init__(self, models: Sequence[nn.Module], config: EMA):
        """
        Args:
            models: this rank's pipeline stages, with their shards allocated.
        """
        self.config = config
        self._weights: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        """The average by parameter name. Valid from the first update on."""
        for model in models:
            for name, param in model.named_parameters():
                shard = torch.empty_like(storage_of(param), dtype=torch.float32)
                self._weights[name] = param
                self.tensors[name] = sharded_like(shard, param)
        self.num_updates = 0
        """Updates of the weights since `ema.start_step`. At 0, the average equals the weights."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average the weights after their update in `step`."""
        if step < self.config.start_step:
            return
        number, remainder = divmod(self.num_updates, self.config.every)
        self.num_updates += 1
        if remainder:
            return
        averages, weights = self._shards()
        if number == 0:
            torch._foreach_copy_(averages, weights)
            return
        share = 1 - self._decay_at(number)
        if all(weight.dtype == torch.float32 for weight in weights):
            torch._foreach_lerp_(averages, weights, share)
        else:  # one by one, since each needs a copy
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight.float(), share)

    def _decay_at(self, number: int) -> float:
        """The share of the average that update `number` keeps; the first after the copy is 1."""
        if not self.config.warmup:
            return self.config.decay
        return min(self.config.decay, (1 + number) / (10 + number))

    @torch.no_grad()
    def current(self) -> dict[str, Tensor]:
        """The average by parameter name, not copied."""
        if self.num_updates == 0:
            torch._foreach_copy_(*self._shards())
        return self.tensors

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """A context in which the weights are the average; it keeps a copy of this rank's shards."""
        _, weights = self._shards()
        with torch.no_grad():
            trained_weights = [weight.clone() for weight in weights]
            averages = [local(tensor) for tensor in self.current().values()]
            torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, trained_weights)

    def _shards(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's averages, and its weights, whose storage FSDP replaces before a forward."""
        averages = [local(tensor) for tensor in self.tensors.values()]
        weights = [storage_of(param) for param in self._weights.values()]
        return averages, weights

    def state_dict(self) -> dict[str, int]:
        """The state that a checkpoint holds besides the tensors."""
        return {"counted": self.num_updates}

    def load_state_dict(self, state: dict[str, int] | None) -> None:
        """Continue from a saved state; without one, start from the weights."""
        self.num_updates = state["counted"] if state else 0
