"""Data: one global order of packed rows, read by any number of ranks."""

from torchtitan.components.data.loader import StepBatch, StepLoader, build_loader

__all__ = ["StepBatch", "StepLoader", "build_loader"]
