"""`Model`, the interface of the model that a family builds. Imports no torch.

Shapes: b batch, s sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


class Model(Protocol):
    """A built model, or the part of it on a pipeline stage: an `nn.Module` with these attributes.

    Without `tok_embeddings` the input, and without `output` the result, is hidden states
    `[b, s, dim]`. A forward calls `tok_embeddings`, each block and `norm` as modules, which makes
    FSDP gather their weights; the output's weight is gathered with the norm's.
    """

    tok_embeddings: nn.Module | None
    layers: nn.ModuleDict
    """The blocks by index, which is the same on every pipeline stage."""
    norm: nn.Module | None
    output: nn.Module | None
    copies: Any
    """The weights' `WeightCopies`, once the model is distributed."""

    def init_buffers(self) -> None:
        """Compute all buffers. Called again when a model on the meta device gets memory."""

    def change_positions(self, args: Any) -> None:
        """Continue with hyper-parameters that differ in rotary positions. Only for models that have
        them.
        """

    @property
    def output_weight(self) -> Tensor:
        """Weight of the output projection: `[vocab, dim]`."""

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits `[b, s, vocab]` of final hidden states `[b, s, dim]`."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        *,
        project: bool = True,
        **token_weights: Tensor,
    ) -> Tensor:
        """`[b, s] -> [b, s, vocab]`. Models with experts also need `token_weights`, `[b, s]`.

        Args:
            mask: a `Mask` of `attention/interface.py`.
        """

    def __getattr__(self, name: str) -> Any:
        """All other attributes of `nn.Module`."""
