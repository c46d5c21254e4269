"""Data: one global order of packed rows, read by any number of ranks."""

from torchtitan.components.data.loader import StepBatch, StepLoader, build_loader
from torchtitan.components.data.rows import merge_states

__all__ = ["StepBatch", "StepLoader", "build_loader", "merge_states"]
