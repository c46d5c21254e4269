"""What compiling a configuration shows, and the tables of tests/cuda/compiled-kernels.md."""

import json
import os
import re
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
# Those with `:---` are written by hand.
_TABLE = re.compile(r"^(\|[-|]+\|\n)((?:\|.*\n)*)", re.MULTILINE)
_SHORT = {
    f"aten._scaled_dot_product_{kernel}_attention{direction}": f"{short} attention"
    for kernel, short in (("cudnn", "cuDNN"), ("efficient", "efficient"), ("flash", "flash"))
    for direction in ("", "_backward")
}


@dataclass(frozen=True)
class Measured:
    """The output of `tests.cuda.trace`."""

    torch: str
    shared_memory: int
    """Bytes that a block of threads may have."""
    graphs_of_a_function: int
    """The most of any function."""
    graph_limit: int
    passes: list[dict[str, Any]]
    """The first step, an equal one, and what follows."""
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


def tables(configuration: Configuration, measured: Measured) -> list[list[str]]:
    """A configuration's rows of each table of the page."""
    name = configuration.name
    first, second, *later = measured.passes
    most = max((kernel["shared"] for kernel in measured.kernels), default=0)
    summary = (name, first["graphs"], len(measured.kernels), most, _waits(second))
    passes = [
        _row((name, each["name"], each["graphs"], each["kernels"], _waits(each))) for each in later
    ]
    regions = dict.fromkeys(_regions(configuration, measured.regions))
    return [[_row(summary)], passes, list(regions)]


def _waits(measured_pass: dict[str, Any]) -> str:
    waits = measured_pass["waits"].items()
    return "<br>".join(f"`{place}`" + f" ({count})" * (count > 1) for place, count in waits)


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


def _tables_of_page() -> list[list[str]]:
    return [table[2].splitlines() for table in _TABLE.finditer(PAGE.read_text())]


def on_page(configuration: Configuration) -> list[list[str]]:
    """A configuration's rows of each table, as they are on the page."""
    start = f"| {configuration.name} |"
    return [[row for row in table if row.startswith(start)] for table in _tables_of_page()]


def write(rows: list[list[str]]) -> None:
    """Replace the rows of each table of the page."""
    tables = iter(rows)
    page = _TABLE.sub(
        lambda table: table[1] + "".join(f"{row}\n" for row in next(tables)), PAGE.read_text()
    )
    PAGE.write_text(page)
