"""The record of a run that a plan prices, and what other software does differently."""

from dataclasses import dataclass, replace
from typing import Any, Self

from torchtitan.config.sections.schema import Config
from torchtitan.models.costs import FP32, Cost
from torchtitan.parallel.pipeline.split import PipelinePlan
from torchtitan.parallel.record import EXCHANGE_COPIES, Record, Stage


@dataclass(frozen=True)
class Software:
    """Differences of a published run's software from this project's; none in our own plans."""

    kv_repeated: bool = False
    """Copies keys and values for every query head before attention, as TorchTitan once did."""
    ends_in_one_unit: bool = False
    """FSDP gathers the embeddings and the output together, as TorchTitan once did."""
    fast_attention: bool | None = None
    """Attention by cuDNN or FlashAttention 3, or else by version 2; None: as torch chooses."""
    weights_in_place: bool = False
    """Gathers weights where they are used, and reduces gradients from where they add up; rounds
    weights to 8 bits once per step.
    """
    fused_dispatch: bool = False
    """Sends a token once to each rank with experts for it, over the network once to each node, in 8
    bits if experts compute in them, and the host doesn't wait (DeepEP, HybridEP).
    """
    overlaps_experts: bool = False
    """Exchanges the rows of one microbatch while another computes."""
    launches_alone: bool = False
    """Launches kernels one by one, fused as they are, like eager operations."""


OURS = Software()


class Workload(Record):
    """A record with its software."""

    def __init__(
        self,
        config: Config,
        args: Any,
        stages: PipelinePlan | None,
        software: Software = OURS,
        *,
        like: Self | None = None,
    ):
        self.software = software
        super().__init__(config, args, stages, like=like)

    def adapted(self, cost: Cost) -> Cost:
        heads = cost.heads
        if heads is None or not (self.software.kv_repeated and heads.kv_heads):
            return cost
        copies = 2 * heads.queries - heads.keys - heads.values
        heads = replace(heads, keys=heads.queries, values=heads.queries)
        return replace(cost, saved=cost.saved + copies, heads=heads)

    @property
    def moved_bytes(self) -> float:
        if not self.software.fused_dispatch:
            return super().moved_bytes
        # of an expert's rows only the sum: the other copies belong to the exchange
        sorting = 2 * self.dim * self.expert_rows * self.element
        exchange = EXCHANGE_COPIES * self.dim * self.expert_rows * self.element * (self.ep > 1)
        return super().moved_bytes - sorting - exchange

    @property
    def attends_by_cudnn(self) -> bool:
        """Whether torch prefers cuDNN's kernel where it is fast: in 16 bits, unless masked."""
        fast = self.software.fast_attention
        if fast is None:
            fast = not (self.heads.window or self.config.training.document_mask)
        return fast and self.element != FP32

    @property
    def total_params(self) -> float:
        """Parameters of the whole model, on all ranks."""
        return sum(map(self.shard, self.stages)) * self.fsdp * self.tp

    def ends(self, stage: Stage) -> list[int]:
        ends = super().ends(stage)
        return [sum(ends)] if self.software.ends_in_one_unit and len(ends) > 1 else ends
