"""What compiling a configuration shows, and the tables of tests/cuda/compiled-kernels.md."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cuda.configurations import Configuration
from torchtitan.utils.torch_versions import TESTED_TORCH

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("compiled-kernels.md")
NEWEST = TESTED_TORCH[-1]
"""The tables are of this release: others have other kernels."""
_SHORT = {
    "aten._scaled_dot_product_cudnn_attention": "cuDNN attention",
    "aten._scaled_dot_product_cudnn_attention_backward": "cuDNN attention",
    "aten._scaled_dot_product_efficient_attention": "efficient attention",
    "aten._scaled_dot_product_efficient_attention_backward": "efficient attention",
}


@dataclass(frozen=True)
class Measured:
    """The output of `tests.cuda.trace`."""

    torch: str
    steps: list[dict[str, Any]]
    """The first step, and the second."""
    after: dict[str, list[dict[str, Any]]]
    """By what was done afterwards, twice."""
    regions: list[dict[str, Any]]
    kernels: list[dict[str, Any]]


def measure(configuration: Configuration) -> Measured:
    """Compile a configuration in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "tests.cuda.trace", *configuration.arguments]
    settings = {"PYTHONPATH": str(ROOT), "TORCHTITAN_TEST_SM": str(configuration.sm)}
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | settings
    )
    if result.returncode:
        raise RuntimeError(f"{configuration.name}\n{result.stderr[-8000:]}")
    return Measured(**json.loads(result.stdout.splitlines()[-1]))


def rows(configuration: Configuration, measured: Measured) -> list[str]:
    """A configuration's row of the first table, and its rows of the second."""
    waits = [
        f"`{place}`" + (f" ({count})" if count > 1 else "")
        for place, count in measured.steps[1]["waits"].items()
    ]
    summary = (
        configuration.name,
        sum(step["graphs"] for step in measured.steps),
        len(measured.kernels),
        max((kernel["shared"] for kernel in measured.kernels), default=0),
        "<br>".join(waits),
    )
    return [_row(summary), *_regions(configuration, measured.regions)]


def _regions(configuration: Configuration, regions: list[dict[str, Any]]) -> Iterator[str]:
    by_id: dict[str, dict[str, dict[str, Any]]] = {}
    for region in regions:
        by_id.setdefault(region["id"], {})[region["kind"]] = region
    for kinds in by_id.values():
        forward = kinds.get("forward") or kinds.get("inference")
        backward = kinds.get("backward")
        name = next(iter(kinds.values()))["name"]
        yield _row((configuration.name, f"`{name}`", _cell(forward), _cell(backward)))


def _cell(region: dict[str, Any] | None) -> str:
    """`5 + 7 mm + cuDNN attention`: Triton's kernels, and others."""
    if region is None:
        return ""
    calls = [
        f"{count if count > 1 else ''} {_SHORT.get(name, name)}".strip()
        for name, count in region["extern"].items()
    ]
    return " + ".join([str(region["kernels"]), *calls])


def _row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def rows_of_page(configuration: Configuration) -> list[str]:
    lines = PAGE.read_text().splitlines()
    return [line for line in lines if line.startswith(f"| {configuration.name} |")]
