"""The stages of a planned pipeline, by the kinds of blocks that they hold."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from torchtitan.parallel.pipeline.split import PipelinePlan


@dataclass(frozen=True)
class PlannedStage:
    """A pipeline stage; without a pipeline, the whole model."""

    rank: int = field(compare=False)
    """Index along the `pp` axis. Stages are equal if they hold the same."""
    kinds: tuple[int, ...]
    """Number of blocks of each kind, as in `Workload.blocks`."""
    has_embedding: bool
    has_output: bool
    """Holds the final norm and the output projection, and computes the loss."""

    @property
    def layers(self) -> int:
        return sum(self.kinds)


@dataclass(frozen=True)
class StageSplit:
    """A model's stages."""

    stages: tuple[PlannedStage, ...]
    of_rank: tuple[tuple[PlannedStage, ...], ...]
    """The stages of each pipeline rank."""
    unlike_ranks: tuple[int, ...]
    """The first and the last of the pipeline ranks whose stages are equal: ranks in between
    need memory in between.
    """


@lru_cache(maxsize=256)  # a search asks for the same stages thousands of times
def split_stages(
    pipeline: PipelinePlan | None, kind_of_layer: tuple[int, ...], kinds: int
) -> StageSplit:
    """The stages of a pipeline, or the only one.

    Args:
        kind_of_layer: index of each layer's kind.
        kinds: their number.
    """

    def count(layers: Iterable[int]) -> tuple[int, ...]:
        in_stage = [kind_of_layer[layer] for layer in layers]
        return tuple(in_stage.count(kind) for kind in range(kinds))

    if pipeline is None:
        model = (PlannedStage(0, count(range(len(kind_of_layer))), True, True),)
        return StageSplit(model, (model,), (0,))
    stages = tuple(
        PlannedStage(
            rank,
            count(int(name.split(".")[1]) for name in names if name.startswith("layers.")),
            "tok_embeddings" in names,
            "output" in names,
        )
        for rank, names in zip(pipeline.ranks, pipeline.modules, strict=True)
    )
    of_rank = tuple(
        tuple(stage for stage in stages if stage.rank == rank)
        for rank in range(max(pipeline.ranks) + 1)
    )
    last_rank = {equal: rank for rank, equal in enumerate(of_rank)}
    end_ranks = {*last_rank.values(), *map(of_rank.index, last_rank)}
    return StageSplit(stages, of_rank, tuple(sorted(end_ranks)))
