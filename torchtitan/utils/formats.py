"""Reading of untrusted files: JSON objects, pickles as data, and models of file formats."""

import io
import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from torchtitan.utils.files import read_regular, text_of
from torchtitan.utils.limits import JSON_BYTES

if TYPE_CHECKING:
    from torch import Tensor

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Strict(BaseModel):
    """A model that converts nothing, accepts no other fields, and never changes."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: it can't be read, is too large, or is not a regular file.
        ValueError: it is nested too deeply, or not a JSON object; the message names the file.
    """
    try:
        content = json.loads(text_of(read_regular(path, JSON_BYTES, links=True)))
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {f'{module}.{name}'[:80]!r}, which reading it would run")


def safe_loads(content: bytes) -> Any:
    """Unpickle containers, numbers and text. Refuse a pickle that names a class or function.

    Raises:
        ValueError: the content names one, or is not a pickle.
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # of any class, according to pickle's manual
        reason = error if type(error) is ValueError else f"not a pickle: {type(error).__name__}"
        raise ValueError(str(reason)) from None


def load_tensor(file: Any) -> "Tensor":
    """Read a tensor that `torch.save` wrote, on the CPU. torch refuses pickles of anything else."""
    import torch  # the launcher reads pickles, too, and must not wait for torch

    return torch.load(file, map_location="cpu", weights_only=True)
