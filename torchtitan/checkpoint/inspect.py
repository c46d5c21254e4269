"""What a checkpoint holds, and how two of them differ. Reads one part of a tensor at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import torch

from torchtitan.checkpoint.load import Reader
from torchtitan.checkpoint.manifest import Manifest, read_manifest
from torchtitan.config.load.keys import FIELDS
from torchtitan.utils.text import aligned, flat, show_size

_PIECE = 1 << 18
"""Elements compared at a time."""


def settings(manifest: Manifest) -> dict[str, Any]:
    """A run's configuration by dotted key, without the defaults."""
    given = manifest.settings()
    out = {}
    for key, info in FIELDS.items():
        table: Any = given
        *sections, name = key.split(".")
        for section in sections:
            table = table.get(section, {}) if isinstance(table, dict) else {}
        if name in table and table[name] != info.get_default(call_default_factory=True):
            out[key] = table[name]
    for name, keys in given.get("custom", {}).items():
        if isinstance(keys, dict):
            out |= {f"custom.{name}.{key}": value for key, value in keys.items()}
    return out


@dataclass(frozen=True)
class Summary:
    """A checkpoint in figures."""

    path: str
    step: int
    saved: str
    """Time of the save, ISO 8601."""
    resumable: bool
    """False if it holds only weights."""
    averaged: bool
    """Its weights are the average that the run kept."""
    merged: list[dict[str, Any]] | None
    """The checkpoints that it is the average of."""
    model: dict[str, Any]
    parameters: int
    bytes: dict[str, dict[str, int]]
    """Size of the tensors by part (`model`, `optimizer`) and dtype."""
    files: int
    file_bytes: int
    train_state: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    git: str | None
    ranks: int | None
    config: dict[str, Any]
    """By dotted key, without the defaults."""


def summarize(step: Path) -> Summary:
    """Summarize a checkpoint from its manifest.

    Raises:
        DamageError: there is none, or it is damaged.
    """
    manifest = read_manifest(step)
    return Summary(
        path=str(step),
        step=manifest.step,
        saved=manifest.saved,
        resumable=not manifest.model_only,
        averaged=manifest.averaged,
        merged=manifest.model_dump()["merged"],
        model=manifest.model,
        parameters=manifest.parameters,
        bytes=manifest.tensor_bytes,
        files=len(manifest.files),
        file_bytes=sum(file.bytes for file in manifest.files.values()),
        train_state=_state(manifest),
        data=manifest.data,
        versions=manifest.versions,
        git=manifest.git,
        ranks=manifest.ranks,
        config=settings(manifest),
    )


def _state(manifest: Manifest) -> dict[str, Any]:
    """`train_state`, as the manifest has it."""
    if manifest.train_state is None:
        return {}
    return manifest.train_state.model_dump(exclude_defaults=True)


def overview(found: Sequence[Summary]) -> str:
    """A table of several checkpoints, or all about a single one."""
    if len(found) == 1:
        return "\n".join(_page(found[0]))
    rows = [("step", "saved", "parameters", "size", "weights", "tokens", "resumable")]
    for s in found:
        tokens = s.train_state.get("progress", {}).get("tokens")
        rows.append(
            (
                str(s.step),
                s.saved,
                f"{s.parameters:,}",
                show_size(s.file_bytes),
                ", ".join(s.bytes.get("model", {})),
                "" if tokens is None else f"{tokens:,}",
                "yes" if s.resumable else _kind(s),
            )
        )
    return aligned(rows)


def _page(s: Summary) -> Iterator[str]:
    yield s.path
    limits = "" if s.resumable else f" ({_kind(s)}: can't be resumed)"
    rows = [
        ("step", f"{s.step}{limits}"),
        ("saved", s.saved),
        ("model", f"{s.model.get('name')}, {s.parameters:,} parameters"),
    ]
    for part, sizes in s.bytes.items():
        kinds = [f"{name} {show_size(size)}" for name, size in sizes.items()]
        rows.append((part, ", ".join(kinds)))
    rows.append(("files", f"{s.files}, {show_size(s.file_bytes)}"))
    yield indent(aligned(rows), "  ")
    if s.merged:
        yield "  merged from"
    for source in s.merged or ():
        ending = " (ema)" if source["averaged"] else ""
        yield f"    {source['weight']:.3g} x {source['checkpoint']}{ending}"
    written_by: dict[str, Any] = dict(s.versions)
    if s.git:
        written_by["git"] = s.git
    if s.ranks:
        written_by["ranks"] = s.ranks
    position = dict(s.train_state.get("data", {}))
    position.pop("fingerprint", None)  # shown as "data"
    position["sources"] = {}
    for name, source in s.train_state.get("data", {}).get("sources", {}).items():
        lanes = {"lanes": "see --json"} if "lanes" in source else {}
        position["sources"][name] = source | lanes
    tables = {
        "written by": written_by,
        "model": s.model,
        "state": s.train_state | {"data": position},
        "data": s.data,
        "configuration, without the defaults": s.config,
    }
    for title, table in tables.items():
        if table:
            yield f"  {title}"
        for key, value in flat(table).items():
            yield f"    {key} = {value}"


def _kind(s: Summary) -> str:
    """What a checkpoint that can't be resumed holds."""
    if s.averaged:
        return "the average of the weights"
    return "merged weights" if s.merged else "weights only"


def compare(a: Path, b: Path, tolerance: float) -> Iterator[tuple[str, str]]:
    """The differences of two checkpoints, as (`config`, `train_state` or `tensors`; description).

    Args:
        tolerance: tensors whose largest |a - b| is not above it are equal.
    """
    first = read_manifest(a)
    second = read_manifest(b)
    for part, absent, x, y in (
        ("config", "default", settings(first), settings(second)),
        ("train_state", "absent", flat(_state(first)), flat(_state(second))),
    ):
        for key in sorted(x.keys() | y.keys()):
            if x.get(key) != y.get(key):
                yield part, f"{key}: {x.get(key, absent)} in a, {y.get(key, absent)} in b"
    readers = Reader(a), Reader(b)
    known, others = (reader.read_metadata().state_dict_metadata for reader in readers)
    for key in sorted(known.keys() | others.keys()):
        if key not in known or key not in others:
            yield "tensors", f"{key}: only in {'b' if key in others else 'a'}"
        elif known[key].size != others[key].size:
            yield "tensors", f"{key}: {list(known[key].size)} in a, {list(others[key].size)} in b"
        elif text := _distance(readers, key, tolerance):
            yield "tensors", f"{key}: {text}"


def _distance(readers: Sequence[Reader], key: str, tolerance: float) -> str | None:
    """The distance of two tensors of the same shape, in words; None if within `tolerance`.

    They are read in the parts in which the first was written.
    """
    largest = squares = norm = 0.0
    for box in readers[0].boxes(key):
        a, b = (reader.read_box(key, box).flatten() for reader in readers)
        for x, y in zip(a.split(_PIECE), b.split(_PIECE), strict=True):
            x = x.double()
            y = y.double()
            norm += x.square().nan_to_num().sum().item()
            if torch.equal(x, y):
                continue
            # NaN equals nothing
            gap = torch.where(x == y, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf)
            gap[x.isnan() & y.isnan()] = 0.0
            largest = max(largest, gap.max().item())
            squares += gap.square().sum().item()
    if largest <= tolerance:
        return None
    dtypes = [
        reader.read_metadata().state_dict_metadata[key].properties.dtype for reader in readers
    ]
    types = "" if dtypes[0] == dtypes[1] else f"{dtypes[0]} in a, {dtypes[1]} in b; "
    relative = (squares / norm) ** 0.5 if norm else math.inf
    return f"{types}max |a - b| {largest:.3g}, |a - b| / |a| {relative:.3g}"
