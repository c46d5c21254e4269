"""Stragglers: ranks that are slower than the median rank, in computing or in waiting for data."""

from collections.abc import Sequence
from statistics import median_low
from typing import Any

import torch

from torchtitan.config.sections import schema
from torchtitan.parallel.collectives import gather_values
from torchtitan.utils.device import seconds_of_matmuls
from torchtitan.utils.logging import event, logger


class Stragglers:
    """Reports a rank once it has been slow for `guard.straggler_records` logged steps in a row."""

    def __init__(self, config: schema.Guard):
        self.factor = config.straggler_factor
        self.records = config.straggler_records
        self.slow: dict[int, int] = {}
        """Rank to the number of records in a row for which it has been slow."""

    def check(self, record: dict[str, Any], device: torch.device) -> None:
        """Measure each rank's own speed and warn about slow ones. Called by all ranks.

        Args:
            record: the metrics of the logged step.
        """
        if not self.factor:
            return
        waits = record["data_loading_pct"] / 100 * record["step_time_s"]
        step = record["step"]
        compute, data = zip(*gather_values([seconds_of_matmuls(), waits], device), strict=True)
        slow = self.observe(compute, data, record["step_time_s"])
        for rank, what in slow.items():
            text = f"step {step}: rank {rank} is slow: it {what}"
            logger.warning(text, extra=event("straggler", step, rank=rank))

    def observe(
        self, compute: Sequence[float], data: Sequence[float], step_time: float
    ) -> dict[int, str]:
        """The ranks to report, each with the reason.

        Args:
            compute: seconds each rank needs for the same computation.
            data: seconds per step each rank waits for data.
            step_time: seconds per step, in which all ranks wait for the slowest.
        """
        # The lower median: of two ranks the faster one is the norm.
        usual_compute = median_low(compute)
        usual_data = median_low(data)
        slow_ranks = {}
        for rank, (rank_compute, rank_data) in enumerate(zip(compute, data, strict=True)):
            # The time of a step if this rank waited no longer than the median rank.
            median_step_time = max(step_time - max(rank_data - usual_data, 0.0), 1e-9)
            in_compute = rank_compute / max(usual_compute, 1e-9)
            in_data = step_time / median_step_time
            if max(in_compute, in_data) <= self.factor:
                self.slow[rank] = 0
                continue
            self.slow[rank] = self.slow.get(rank, 0) + 1
            if self.slow[rank] % self.records == 0:
                if in_compute >= in_data:
                    slow_ranks[rank] = f"computes {in_compute:.1f} times as long as the median rank"
                else:
                    slow_ranks[rank] = (
                        f"waits {rank_data:.2f} s per step for data, the median rank "
                        f"{usual_data:.2f} s"
                    )
        return slow_ranks
