"""The kinds of a model's blocks, and their numbers on each pipeline stage, without weights."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from torchtitan.models import get_spec
from torchtitan.models.costs import Cost, cost_of
from torchtitan.models.spec import ShardingStyle as Style
from torchtitan.models.spec import matrices
from torchtitan.parallel.pipeline.split import PipelinePlan
from torchtitan.utils.errors import UserError


@dataclass(frozen=True)
class BlockKind:
    """The blocks of a model with the same costs and weights."""

    cost: Cost
    weights: tuple[tuple[Style, int], ...]
    """Style and number of elements of each weight. The bias of `ROWS` is whole, like a norm."""
    styles: tuple[Style, ...]
    """Style of each product."""


@lru_cache(maxsize=64)
def kinds_of(name: str, args: Any, seq_len: int) -> tuple[tuple[BlockKind, ...], tuple[int, ...]]:
    """The kinds of blocks of a model, and the kind of each block.

    Raises:
        UserError: a part declares no cost, or a block's leave out heads or matrices.
    """
    spec = get_spec(name)
    with torch.device("meta"):
        model = spec.build(args, None)
    cost_of(model, seq_len)  # refuses a forward of the family's own

    def style(layer: str, module: str) -> Style:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", f"layers.{layer}.{module}")
        return spec.tensor_parallel_styles.get(pattern, Style.NORM)

    kinds: dict[BlockKind, None] = {}
    blocks = []
    for layer, block in model.layers.items():
        weights = []
        for weight, value in block.named_parameters():
            module, _, leaf = weight.rpartition(".")
            owner = style(layer, module)
            is_whole = owner is Style.ROWS and leaf == "bias"
            weights.append((Style.NORM if is_whole else owner, value.numel()))
        cost = cost_of(block, seq_len)
        multiplied = sum(x.inputs * x.outputs * max(1, x.experts) for x in cost.products)
        in_matrices = sum(value.numel() for value in matrices(block).values())
        if cost.heads is None or multiplied != in_matrices:
            problem = (
                f"products of {multiplied:,} weights, and the block has {in_matrices:,} in matrices"
            )
            raise UserError(
                f"layers.{layer} can't be planned: its parts declare "
                f"{problem if cost.heads else 'no heads that mix tokens'}; complete their cost "
                "methods (torchtitan/models/costs.py)"
            )
        owners = (x.name.rpartition(".")[0] if x.experts else x.name for x in cost.products)
        blocks.append(BlockKind(cost, tuple(weights), tuple(style(layer, x) for x in owners)))
        kinds[blocks[-1]] = None
    order = list(kinds)
    return tuple(order), tuple(map(order.index, blocks))


@dataclass(frozen=True)
class Stage:
    """A pipeline stage; without a pipeline, the whole model."""

    rank: int = field(compare=False)
    """Index along the `pp` axis. Stages are equal if they hold the same."""
    kinds: tuple[int, ...]
    """Number of blocks of each kind, as in `Record.blocks`."""
    has_embedding: bool
    has_output: bool
    """Holds the final norm and the output projection, and computes the loss."""

    @property
    def layers(self) -> int:
        return sum(self.kinds)


@lru_cache(maxsize=256)  # a search asks for the same stages thousands of times
def stages_of(
    pipeline: PipelinePlan | None, kind_of_block: tuple[int, ...], kinds: int
) -> tuple[Stage, ...]:
    """The stages in the order of the model."""

    def count(blocks: Iterable[int]) -> tuple[int, ...]:
        in_stage = [kind_of_block[block] for block in blocks]
        return tuple(in_stage.count(kind) for kind in range(kinds))

    if pipeline is None:
        return (Stage(0, count(range(len(kind_of_block))), True, True),)
    return tuple(
        Stage(
            rank,
            count(int(name.split(".")[1]) for name in names if name.startswith("layers.")),
            "tok_embeddings" in names,
            "output" in names,
        )
        for rank, names in zip(pipeline.ranks, pipeline.modules, strict=True)
    )
