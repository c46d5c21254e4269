"""Generated sums: data without a file.

torchtitan train CONFIG.toml --experimental.custom_import arithmetic --training.dataset arithmetic
"""

import random
from typing import Annotated

from pydantic import Field

from torchtitan.config.registry import Section, data_sources


class Keys(Section):
    documents: Annotated[int, Field(ge=1, le=10**12)] = 1_000_000
    """Documents of an epoch."""
    largest: Annotated[int, Field(ge=1, le=10**9)] = 999
    """The largest summand."""


@data_sources.register("arithmetic", Keys)
class Arithmetic:
    def __init__(self, dataset_path: str | None, keys: Keys):
        self.keys = keys
        self.fingerprint = f"arithmetic {keys.documents} {keys.largest}"

    def __len__(self) -> int:
        return self.keys.documents

    def __getitem__(self, index: int) -> str:
        draw = random.Random(index)
        pairs = [
            (draw.randint(0, self.keys.largest), draw.randint(0, self.keys.largest))
            for _ in range(8)
        ]
        return "\n".join(f"{a} + {b} = {a + b}" for a, b in pairs)
