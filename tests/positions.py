"""Data positions as checkpoints keep them."""

from tests.checkpoints import ABOUT, train_state
from torchtitan.checkpoint.manifest import parse, render
from torchtitan.data.loader import StepLoader
from torchtitan.data.positions import DataPosition, DataState


def manifest_bytes(state: DataState) -> bytes:
    """A manifest with this data position."""
    content = {
        **ABOUT,
        "saved": "",
        "step": state.step,
        "model_only": False,
        "train_state": train_state(state.step) | {"data": state},
        "parameters": 0,
        "tensor_bytes": {},
        "files": {"x": {"bytes": 0, "crc32": 0}},
    }
    return render(content)


def saved(loader: StepLoader, *parts: DataPosition) -> DataState:
    """The position that the parts of all ranks make up, written to a manifest and read again."""
    return parse(manifest_bytes(loader.state(parts))).state()["data"]
