"""Model families. A family is a folder that registers a `ModelSpec`; nothing outside the folder names it."""

from torchtitan.models.spec import HFMap, ModelSpec, get_spec, import_custom, register

__all__ = ["HFMap", "ModelSpec", "get_spec", "import_custom", "register"]
