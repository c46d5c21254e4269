"""The record of a run that a plan prices."""

from torchtitan.models.costs import FP32
from torchtitan.parallel.record import Record
from torchtitan.tools.planner.hardware import Hardware


class Workload(Record):
    """What this project's software does with a record; `benchmarks/published` plans other's."""

    weights_in_place = False
    """Weights are gathered where they are used, gradients are reduced from where they add up, and
    weights are rounded to 8 bits once per step.
    """
    overlaps_experts = False
    """Rows of one microbatch travel while another computes."""
    launches_alone = False
    """Kernels are launched one by one, fused as they are, like eager operations."""

    gates_in_fp32 = False
    """Routers' gates multiply in fp32 forward too, not only backward."""

    @property
    def attends_by_cudnn(self) -> bool:
        """Whether torch prefers cuDNN's kernel where it is fast: in 16 bits, unless masked."""
        masks = self.heads.window or self.config.training.document_mask
        return self.element != FP32 and not masks

    def fused_exchange(self, hw: Hardware) -> float | None:
        """Seconds in which rows go to their experts and back by one kernel, without a wait for the
        host; None: rows are sorted and exchanged.
        """
        return None

    @property
    def total_params(self) -> float:
        """Parameters of the whole model, on all ranks."""
        return sum(map(self.shard, self.stages)) * self.fsdp * self.tp
