"""Copies of weights in the type of the computation, where FSDP casts none: on one rank.

All weights are cast together, once a step. FSDP would cast and copy each before the forward and
before the backward of every batch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightCopies:
    """Copies that stand in for a model's weights in its modules while it computes."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        """
        Args:
            model: weights of another type than `dtype` are copied, except DTensors, which FSDP
                casts.
        """
        self._dtype = dtype
        self._weights = [
            (module, name, weight)
            for module in model.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.dtype != dtype and not isinstance(weight, DTensor)
        ]
        """With the module of each, and its name there."""
        self._copies: list[nn.Parameter] = []
        """Empty unless they are in place."""

    @torch.no_grad()
    def insert(self) -> None:
        """Copy the weights and put the copies in their place, unless copies are there."""
        if self._copies or not self._weights:
            return
        weights = [weight for *_, weight in self._weights]
        self._copies = [
            nn.Parameter(torch.empty_like(weight, dtype=self._dtype), weight.requires_grad)
            for weight in weights
        ]
        torch._foreach_copy_(self._copies, weights)
        for (module, name, _), copy in zip(self._weights, self._copies, strict=True):
            setattr(module, name, copy)

    @torch.no_grad()
    def take_gradients(self, *, last: bool) -> None:
        """Add the copies' gradients to the weights'.

        Args:
            last: these are the last gradients of the step; remove the copies.
        """
        gradients = [copy.grad for copy in self._copies]
        for copy in self._copies:
            copy.grad = None
        if last:
            self.remove()
        sums: dict[Any, list[tuple[Tensor, Tensor]]] = {
            torch._foreach_copy_: [],
            torch._foreach_add_: [],
        }
        for (*_, weight), gradient in zip(self._weights, gradients, strict=False):
            if gradient is not None:
                add = torch._foreach_add_
                if weight.grad is None:
                    weight.grad = torch.empty_like(weight)
                    add = torch._foreach_copy_
                sums[add].append((weight.grad, gradient))
        for add, pairs in sums.items():
            if pairs:
                add(*zip(*pairs, strict=True))

    def remove(self) -> None:
        """Put the weights back and free the copies."""
        for module, name, weight in self._weights:
            setattr(module, name, weight)
        self._copies = []
