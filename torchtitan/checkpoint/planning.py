"""Plans of saves that the ranks send to rank 0, and it back to them, only when they change."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import count
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan, SavePlanner

_NUMBERS = count()


class UnsentMetadata(Metadata):
    """DCP broadcasts the metadata after each save. It grows with ranks times tensors, and no rank
    needs it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, ({},)

    @classmethod
    def of(cls, metadata: Metadata) -> "UnsentMetadata":
        return cls(**_contents(metadata))

    def plain(self) -> Metadata:
        """The same, as it is written to disk."""
        return Metadata(**_contents(self))


def _contents(metadata: Metadata) -> dict[str, Any]:
    return {field.name: getattr(metadata, field.name) for field in fields(metadata)}


class Plans:
    """The plans of one run's saves.

    DCP keeps them in class attributes by a key, and compares names, shapes and places of the
    tensors, but not their types. So each run has keys of its own, one for each kind of checkpoint.
    All ranks must use and forget plans
    together: of one that hasn't sent its plan, rank 0 uses the one that it knows.
    """

    def __init__(self) -> None:
        self._number = next(_NUMBERS)
        self._keys: set[str] = set()

    def planner(self, kind: str) -> "CachingPlanner":
        """For one save of this kind."""
        key = f"run {self._number}, {kind}"
        self._keys.add(key)
        return CachingPlanner(key)

    def forget(self) -> None:
        """Let the next save send all plans, as after one that failed, of which ranks may know
        different parts.
        """
        for name, cache in vars(SavePlanner).items():
            if name.startswith("_cached_") and isinstance(cache, dict):
                for key in self._keys:
                    cache.pop(key, None)


class CachingPlanner(DefaultSavePlanner):
    """Plans a save from the plans of the one before, as far as they still hold."""

    def __init__(self, key: str):
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key

    def create_global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(list(all_plans))
        return plans, UnsentMetadata.of(metadata)
