"""Checkpoints: complete, atomic, verified, independent of the layout that wrote them."""

from torchtitan.checkpoint.manager import Checkpointer
from torchtitan.checkpoint.resume import Resumed
from torchtitan.checkpoint.state import TrainedModel

__all__ = ["Checkpointer", "Resumed", "TrainedModel"]
