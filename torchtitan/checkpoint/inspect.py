"""Description of a checkpoint, and comparison of two. Reads one chunk of a tensor at a time."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import torch

from torchtitan.checkpoint.commit import abandoned_at
from torchtitan.checkpoint.format.manifest import Manifest, read_manifest
from torchtitan.checkpoint.load import Reader
from torchtitan.config.load.keys import FIELDS
from torchtitan.utils.wording import aligned, flat, show_size

_PIECE = 1 << 18
"""Elements compared at a time."""


def settings(manifest: Manifest) -> dict[str, Any]:
    """A run's configuration by dotted key, without the defaults."""
    tables = manifest.settings()
    out = {}
    for key, info in FIELDS.items():
        table: Any = tables
        *sections, name = key.split(".")
        for section in sections:
            table = table.get(section, {}) if isinstance(table, dict) else {}
        if name in table and table[name] != info.get_default(call_default_factory=True):
            out[key] = table[name]
    for name, keys in tables.get("custom", {}).items():
        if isinstance(keys, dict):
            out |= {f"custom.{name}.{key}": value for key, value in keys.items()}
    return out


def as_data(step: Path, manifest: Manifest) -> dict[str, Any]:
    """A description of a checkpoint, for `--json`."""
    same = {"step", "saved", "averaged", "merged", "model", "parameters"}
    same |= {"data", "versions", "git", "ranks"}
    return {
        "path": str(step),
        **manifest.model_dump(include=same),
        "resumable": not manifest.model_only,
        "abandoned": abandoned_at(step) is not None,
        "bytes": manifest.tensor_bytes,
        "files": manifest.file_count(),
        "file_bytes": manifest.file_bytes(),
        "train_state": _state(manifest),
        "config": settings(manifest),
    }


def _state(manifest: Manifest) -> dict[str, Any]:
    """The manifest's `train_state`, without the defaults."""
    if manifest.train_state is None:
        return {}
    return manifest.train_state.model_dump(exclude_defaults=True)


def overview(checkpoints: Sequence[tuple[Path, Manifest]]) -> str:
    """A table of several checkpoints, or a full description of a single one."""
    if len(checkpoints) == 1:
        return "\n".join(_page(*checkpoints[0]))
    rows = [("step", "saved", "parameters", "size", "weights", "tokens", "resumable")]
    for step, manifest in checkpoints:
        state = manifest.train_state
        rows.append(
            (
                str(manifest.step),
                manifest.saved,
                f"{manifest.parameters:,}",
                show_size(manifest.file_bytes()),
                ", ".join(manifest.tensor_bytes.get("model", {})),
                "" if state is None else f"{state.progress.tokens:,}",
                _resumable(step, manifest),
            )
        )
    return aligned(rows)


def _page(step: Path, manifest: Manifest) -> Iterator[str]:
    yield str(step)
    resumable = _resumable(step, manifest)
    limits = f" ({resumable}: can't be resumed)" if manifest.model_only else ""
    if not manifest.model_only and resumable != "yes":
        limits = f" ({resumable})"
    rows = [
        ("step", f"{manifest.step}{limits}"),
        ("saved", manifest.saved),
        ("model", f"{manifest.model.get('name')}, {manifest.parameters:,} parameters"),
    ]
    for section, sizes in manifest.tensor_bytes.items():
        kinds = [f"{name} {show_size(size)}" for name, size in sizes.items()]
        rows.append((section, ", ".join(kinds)))
    rows.append(("files", f"{manifest.file_count()}, {show_size(manifest.file_bytes())}"))
    yield indent(aligned(rows), "  ")
    if manifest.merged:
        yield "  merged from"
        for source in manifest.merged:
            ending = " (ema)" if source.averaged else ""
            yield f"    {source.weight:.3g} x {source.checkpoint}{ending}"
    written_by: dict[str, Any] = dict(manifest.versions)
    if manifest.git:
        written_by["git"] = manifest.git
    if manifest.ranks:
        written_by["ranks"] = manifest.ranks
    state = _state(manifest)
    position = state.get("data", {})
    position.pop("fingerprint", None)  # shown as "data"
    for source in position.get("sources", {}).values():
        if "lanes" in source:
            source["lanes"] = "see --json"
    tables = {
        "written by": written_by,
        "model": manifest.model,
        "state": state,
        "data": manifest.data,
        "configuration, without the defaults": settings(manifest),
    }
    for title, table in tables.items():
        if table:
            yield f"  {title}"
        for key, value in flat(table).items():
            yield f"    {key} = {value}"


def _resumable(step: Path, manifest: Manifest) -> str:
    """Whether a start resumes it, in words."""
    if manifest.model_only:
        return _kind(manifest)
    back_to = abandoned_at(step)
    return "yes" if back_to is None else f"abandoned: the run went back to step {back_to}"


def _kind(manifest: Manifest) -> str:
    """The kind of weights in a checkpoint that can't be resumed."""
    if manifest.averaged:
        return "the average of the weights"
    return "merged weights" if manifest.merged else "weights only"


def compare(a: Path, b: Path, tolerance: float) -> Iterator[tuple[str, str]]:
    """The differences of two checkpoints, as (`config`, `train_state` or `tensors`; description).

    Args:
        tolerance: tensors whose largest |a - b| is not above it are equal.
    """
    first = read_manifest(a)
    second = read_manifest(b)
    for category, absent, x, y in (
        ("config", "default", settings(first), settings(second)),
        ("train_state", "absent", flat(_state(first)), flat(_state(second))),
    ):
        for key in sorted(x.keys() | y.keys()):
            if x.get(key) != y.get(key):
                yield category, f"{key}: {x.get(key, absent)} in a, {y.get(key, absent)} in b"
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

    They are read in the chunks of the first.
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
