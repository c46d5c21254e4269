"""Model families. A family is one folder that registers a `ModelSpec`; nothing else has to know of it."""

from torchtitan.models.spec import ModelSpec, get_spec, import_custom, register

__all__ = ["ModelSpec", "get_spec", "import_custom", "register"]
