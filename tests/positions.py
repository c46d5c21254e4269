"""Data positions as checkpoints keep them."""

from tests.checkpoints import ABOUT, train_state
from torchtitan.checkpoint.format.manifest import FORMAT, Manifest, parse, render, validate
from torchtitan.data.loader import StepLoader
from torchtitan.data.read.positions import DataPosition, DataState, complete_state

MINIMAL = {
    "format": FORMAT,
    "saved": "",
    "model_only": False,
    "parameters": 0,
    "tensor_bytes": {},
    "files": {"x": {"bytes": 0, "crc32": 0}},
    "save": "0" * 16,
    "written": {"ranks": 1, "files": 1, "bytes": 1},
}
"""What a manifest needs beside what is known of the run."""


def manifest_bytes(state: DataState) -> bytes:
    """A manifest with this data position."""
    whole = train_state(state.step) | {"data": state}
    content = {**ABOUT, **MINIMAL, "step": state.step, "train_state": whole}
    return render(validate(Manifest, content))


def saved(loader: StepLoader, *parts: DataPosition) -> DataState:
    """The position that the parts of all ranks make up, written to a manifest and read again."""
    return parse(manifest_bytes(complete_state(loader.local_state(parts[0]), parts))).state()[
        "data"
    ]
