"""The size of a checkpoint, and the cost of writing it."""

from dataclasses import dataclass

from torchtitan.tools.planner.memory import state_bytes
from torchtitan.tools.planner.predict import Plan


@dataclass(frozen=True)
class Saves:
    """One checkpoint."""

    size: float
    """Bytes of parameters and optimizer state."""
    blocked: float
    """Seconds that training waits for it."""
    background: float
    """Seconds from then until it is complete."""


def saves_of(plan: Plan, storage: float) -> Saves:
    """The checkpoint of a plan: written while training waits, or first copied to host memory.

    A copy to pinned memory runs beside the next step's forward and backward, and blocks for the
    time beyond it.
    """
    w = plan.workload
    config = plan.config
    state_sizes = [state_bytes(w, w.stages_of(rank)) for rank in range(w.pp)]
    saved_sizes = [state["parameters"] + state["optimizer"] for state in state_sizes]
    size = sum(saved_sizes) * w.fsdp * w.tp  # replicas hold copies
    write = size / storage
    copy = max(saved_sizes) / plan.hardware.host_link
    mode = config.checkpoint.async_mode
    if mode == "disabled":
        return Saves(size, write, 0.0)
    blocked = copy if mode == "async" else max(0.0, copy - plan.time.seconds)
    return Saves(size, blocked, copy - blocked + write)
