"""The base of all sections of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of keys: strict (unknown keys and wrong types are errors) and immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
