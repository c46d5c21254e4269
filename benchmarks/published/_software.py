"""How the software of published runs differs from this project's."""

from dataclasses import dataclass, replace
from typing import Any

from torchtitan.models.costs import FP32, Cost
from torchtitan.parallel.kinds import Stage
from torchtitan.parallel.record import EXCHANGE_COPIES, FP8
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.workload import Workload

FUSED_LINK = 0.46
"""Rate of fused dispatch on the link relative to a collective's: DeepEP states 153 GB/s on H100."""


@dataclass(frozen=True)
class Software:
    """Differences of a published run's software from this project's."""

    kv_repeated: bool = False
    """Copies keys and values for every query head before attention, as TorchTitan once did."""
    ends_in_one_unit: bool = False
    """FSDP gathers the embeddings and the output together, as TorchTitan once did."""
    fast_attention: bool | None = None
    """Attention by cuDNN or FlashAttention 3, or else by version 2; None: as torch chooses."""
    weights_in_place: bool = False
    """`Workload.weights_in_place`."""
    fused_dispatch: bool = False
    """Sends a token once to each rank with experts for it, over the network once to each node, in 8
    bits if experts compute in them, and the host doesn't wait (DeepEP, HybridEP).
    """
    overlaps_experts: bool = False
    """`Workload.overlaps_experts`."""
    launches_alone: bool = False
    """`Workload.launches_alone`."""


class OtherWorkload(Workload):
    """The record of a run of other software."""

    gates_in_fp32 = True  # no source says; the constants were fitted so

    def __init__(self, *args: Any, software: Software):
        self.software = software
        self.weights_in_place = software.weights_in_place
        self.overlaps_experts = software.overlaps_experts
        self.launches_alone = software.launches_alone
        super().__init__(*args)

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
        fast = self.software.fast_attention
        return super().attends_by_cudnn if fast is None else fast and self.element != FP32

    def ends(self, stage: Stage) -> list[int]:
        ends = super().ends(stage)
        return [sum(ends)] if self.software.ends_in_one_unit and len(ends) > 1 else ends

    def fused_exchange(self, hw: Hardware) -> float | None:
        if not self.software.fused_dispatch:
            return None
        eight_bit = any(x.experts and x.eight_bit for x in self.linears)
        to_experts = FP8 if eight_bit else self.element
        return self._one_way(hw, to_experts) + self._one_way(hw, self.element)

    def _one_way(self, hw: Hardware, element: int) -> float:
        """Seconds to send tokens of `element` bytes per feature to the ranks of their experts, or
        to get them back: a token once to each rank, and over the network once to each node.

        Experts are drawn from all groups alike, or from as many groups as a token may choose.
        """
        inside = min(self.ep, hw.gpus_per_node)
        nodes = self.ep // inside
        size = self.tokens / self.tp * self.dim * element
        experts = round(self.expert_rows * self.tp)
        target_nodes = _expected_distinct(nodes, experts)
        if self.args.n_expert_groups > 1:
            target_nodes = min(target_nodes, self.args.expert_groups_per_token)
        ranks = _expected_distinct(self.ep, experts) * (inside - 1) / inside
        link = size * ranks / (hw.link * hw.link_efficiency * FUSED_LINK)
        network = size * target_nodes * (nodes - 1) / nodes / (hw.network * hw.network_efficiency)
        return max(link, network) + hw.collective


def _expected_distinct(count: int, draws: int) -> float:
    """Expected number of distinct values in `draws` draws of one of `count`."""
    return count * (1 - (1 - 1 / count) ** draws)
