"""The base of sections, and the types of keys.

Each type bounds one kind of quantity far above any machine, so that nothing computed from it
overflows or is slow, and text so that it can be printed and used as a path.
"""

import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from torchtitan.utils.errors import EMPTY
from torchtitan.utils.limits import FILE_NAME_BYTES
from torchtitan.utils.storage import expand_path
from torchtitan.utils.wording import brief


class Section(BaseModel):
    """A group of keys: strict (unknown keys and wrong types are errors) and immutable."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


# ---- numbers

Steps = Annotated[int, Field(ge=1, le=10**12)]
"""A number of steps or batches, or a period of them."""
StepsOrZero = Annotated[int, Field(ge=0, le=10**12)]
StepsOrDefault = Annotated[int, Field(ge=-1, le=10**12)]
Rows = Annotated[int, Field(ge=1, le=2**20)]
"""Rows of a batch on one rank."""
SeqLen = Annotated[int, Field(ge=1, le=2**27)]
"""Tokens of a row."""
Degree = Annotated[int, Field(ge=1, le=2**20)]
"""Ranks of a mesh axis."""
Layers = Annotated[int, Field(ge=1, le=512)]
LayersOrZero = Annotated[int, Field(ge=0, le=512)]
LayersOrAll = Annotated[int, Field(ge=-1, le=512)]
Few = Annotated[int, Field(ge=1, le=1000)]
"""Workers, batches ahead, failures in a row."""
FewOrZero = Annotated[int, Field(ge=0, le=1000)]
Seconds = Annotated[int, Field(ge=1, le=10**9)]
"""A timeout. In nanoseconds, twice the largest one still fits 64 bits."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a running mean."""
Factor = Annotated[float, Field(ge=0, le=10**18)]
"""A coefficient or threshold."""
LearningRate = Annotated[float, Field(gt=0, le=10**6)]

# Sizes of a model.
VocabSize = Annotated[int, Field(ge=1, le=2**24)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""Width of a layer's input or output."""

Dtype = Literal["bfloat16", "float32"]

# ---- text

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def path_problem(path: str) -> str | None:
    """Why no file system or terminal can hold this path."""
    if _CONTROL.search(path):
        return (
            f"got {brief(path)}, must not contain control characters; in double quotes TOML reads "
            "\\n and \\t as such"
        )
    if any(len(os.fsencode(name)) > FILE_NAME_BYTES for name in path.split("/")):
        return f"got {brief(path)}, whose names must be of at most {FILE_NAME_BYTES} bytes"
    return None


def not_empty(text: str) -> str:
    if not text:
        raise ValueError(EMPTY)
    return text


def _name(text: str) -> str:
    if _CONTROL.search(text):
        raise ValueError(f"got {brief(text)}, must not contain control characters")
    return text


def _text(text: str) -> str:
    _name(re.sub(r"[\t\n\r]", " ", text))
    return text


def _path(path: str) -> str:
    if problem := path_problem(path) or path_problem(expand_path(path)):
        raise ValueError(problem)
    return expand_path(path)


def _relative_path(path: str) -> str:
    full_path = _path(path)
    if full_path.startswith(("/", "~")) or "://" in full_path or ".." in full_path.split("/"):
        raise ValueError(
            f"got {brief(path)}, must be below job.dump_folder: a relative path without .."
        )
    return full_path


def _file_name(name: str) -> str:
    if "/" in name:
        raise ValueError(f"got {brief(name)}, must be the beginning of a file's name, without /")
    return _relative_path(name)


Text = Annotated[str, Field(max_length=4096), AfterValidator(_text)]
"""Text of one or more lines."""
NameOrEmpty = Annotated[str, Field(max_length=1024), AfterValidator(_name)]
Name = Annotated[NameOrEmpty, AfterValidator(not_empty)]
"""A name or pattern."""
LocalPath = Annotated[str, Field(max_length=4096), AfterValidator(_path)]
"""A path or, where a key allows it, a URL. `~` and variables of the environment are expanded."""
LocalPathOrEmpty = Annotated[
    str, Field(max_length=4096), AfterValidator(lambda path: path and _path(path))
]
InDumpFolder = Annotated[str, Field(max_length=1024), AfterValidator(_relative_path)]
"""A path relative to `job.dump_folder` that doesn't leave it."""
FilePrefix = Annotated[str, Field(max_length=100), AfterValidator(_file_name)]
"""The beginning of the name of files."""


def split_names(value: Any) -> Any:
    """A string is a list of names with commas between them."""
    if not isinstance(value, str):
        return value
    return [name.strip() for name in value.split(",") if name.strip()]
