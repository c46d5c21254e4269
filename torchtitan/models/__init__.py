"""Model families. A family is a file of `families/` that registers a `ModelSpec`; nothing outside
the file names it.
"""

from torchtitan.models.hf.mapping import (
    block_matrices,
    export_problems,
    exported_buffers,
    hf_map,
    parameter_names,
)
from torchtitan.models.hf_names import HFNames
from torchtitan.models.spec import HFMap, ModelSpec, all_families, get_spec, register, spec_of_hf

__all__ = [
    "HFMap",
    "HFNames",
    "ModelSpec",
    "all_families",
    "block_matrices",
    "export_problems",
    "exported_buffers",
    "get_spec",
    "hf_map",
    "parameter_names",
    "register",
    "spec_of_hf",
]
