"""The load of all experts in a step, and the routing biases that follow from it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.models.moe.router import Router
from torchtitan.parallel.collectives import all_reduce


class ExpertBalance:
    """Sums the routers' counts over a global batch, and adjusts their biases, once per step.

    The counts are integers, so the biases are the same under every layout.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        n_layers: int,
        n_experts: int,
        rate: float,
        device: torch.device,
    ):
        """
        Args:
            models: this rank's pipeline stages.
            n_layers: blocks of the whole model.
            n_experts: experts of each block.
            rate: `moe.balance_bias_rate`.
        """
        self.rate = rate
        self.routers: dict[int, Router] = {}
        for model in models:
            for name, module in model.named_modules():
                if isinstance(module, Router):
                    self.routers[int(name.split(".")[1])] = module
        self._table = torch.zeros(n_layers, n_experts + 1, dtype=torch.float64, device=device)
        self._loads_since_take = torch.zeros_like(self.loads)

    @property
    def loads(self) -> Tensor:
        """`[layers, experts]` float64, rows of each expert in the last step; 0 in dense layers."""
        return self._table[:, :-1]

    @property
    def losses(self) -> Tensor:
        """`[layers]` float64, the auxiliary losses of the last step, with their coefficients."""
        return self._table[:, -1]

    def take(self) -> Tensor:
        """Rows of each expert since the last call, and `losses`: `[layers, experts + 1]`, on the
        host, which waits for the device.
        """
        table = torch.cat([self._loads_since_take, self.losses[:, None]], dim=1).cpu()
        self._loads_since_take.zero_()
        return table

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """End a step. Called by all ranks.

        Args:
            skip: if true, the biases and loads of the routers don't change; a boolean scalar on the
                device.
        """
        self._table.zero_()
        for layer, router in self.routers.items():
            self._table[layer, :-1] = router.step_load
            self._table[layer, -1] = router.step_loss
            router.step_load.zero_()
            router.step_loss.zero_()
        # Ranks count different tokens or layers: one sum over the world is exact.
        all_reduce(self._table, dist.group.WORLD)
        self._loads_since_take += self.loads
        for layer, router in self.routers.items():
            counts = self._table[layer, :-1]
            load = counts.long()
            direction = (counts.mean() - counts).sign()
            change = self.rate * direction.to(router.expert_bias.dtype)
            if skip is not None:
                change = change.masked_fill(skip, 0.0)
                load = torch.where(skip, router.load, load)
            router.load.copy_(load)
            if self.rate:
                router.expert_bias.add_(change)
