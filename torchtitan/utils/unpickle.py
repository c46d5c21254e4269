"""Reading pickles as data. The only place that unpickles."""

import io
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {f'{module}.{name}'[:80]!r}, which reading it would run")


def safe_loads(content: bytes) -> Any:
    """Unpickle containers, numbers and text; a pickle that names a class or function is refused.

    Raises:
        ValueError: the pickle names anything, or is none.
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # of any kind, says pickle's manual
        reason = error if type(error) is ValueError else f"not a pickle: {type(error).__name__}"
        raise ValueError(str(reason)) from None


def load_tensor(file: Any) -> "Tensor":
    """Read a tensor that `torch.save` wrote, on the CPU. torch refuses a pickle that names anything
    else.
    """
    import torch  # the launcher reads pickles, too, and must not wait for torch

    return torch.load(file, map_location="cpu", weights_only=True)
