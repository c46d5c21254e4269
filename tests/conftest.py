"""Fixtures that all tests share."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from torchtitan.tools.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(world, function, *args)` runs `function` on `world` gloo ranks and returns their results."""
    pools: dict[int, RankPool] = {}

    def run(world: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return pools.setdefault(world, RankPool(world)).run(function, *args, **kwargs)

    yield run
    for pool in pools.values():
        pool.close()
