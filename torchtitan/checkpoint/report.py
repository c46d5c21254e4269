"""What is in a checkpoint, and how two differ. Reads one tensor at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchtitan.checkpoint.commit import MANIFEST, committed_steps, read_manifest, step_folder
from torchtitan.checkpoint.dcp_storage import Reader, alone
from torchtitan.config.keys import FIELDS
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.storage import patiently
from torchtitan.utils.text import aligned

_PIECE = 1 << 24
"""Elements compared at a time."""


def steps_in(path: Path) -> list[Path]:
    """The checkpoint at `path`, or those of the folder `path`, oldest first.

    Raises:
        CheckpointError: it is neither.
    """
    if patiently(path, lambda: (path / MANIFEST).is_file()):
        return [path]
    if steps := committed_steps(path):
        return [step_folder(path, step) for step in steps]
    kind = "holds no complete checkpoint" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path} {kind}; give a step-N folder, or a folder of them")


def one_step(path: Path) -> Path:
    """The checkpoint at `path`, or the newest of the folder `path`."""
    return steps_in(path)[-1]


def settings(toml: str) -> dict[str, Any]:
    """A run's configuration by dotted key, where it differs from the defaults."""
    given: Any = tomli.loads(toml)
    out = {}
    for key, info in FIELDS.items():
        table = given
        *sections, name = key.split(".")
        for section in sections:
            table = table.get(section, {})
        if name in table and table[name] != info.get_default(call_default_factory=True):
            out[key] = table[name]
    return out


def summary(step: Path) -> dict[str, Any]:
    """A checkpoint in figures, from its manifest and its metadata; reads no tensor."""
    manifest = read_manifest(step)
    parts: dict[str, dict[str, int]] = {}
    count = 0
    for key, about in Reader(step).read_metadata().state_dict_metadata.items():
        part = key.split(".")[0]
        sizes = parts.setdefault(part, {})
        name = str(about.properties.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + about.size.numel() * about.properties.dtype.itemsize
        count += about.size.numel() if part == "model" else 0
    return {
        "path": str(step),
        "step": manifest["step"],
        "saved": manifest.get("saved"),
        "resumable": not manifest["model_only"],
        "model": manifest["model"],
        "parameters": count,
        "bytes": parts,
        "files": len(manifest["files"]),
        "file_bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "train_state": manifest["train_state"],
        "data": manifest["data"],
        "versions": manifest["versions"],
        "git": manifest.get("git"),
        "ranks": manifest.get("ranks"),
        "config": settings(manifest["config"]),
    }


def overview(found: list[dict[str, Any]]) -> str:
    """Summaries for people: a table of several, all of a single one."""
    if len(found) == 1:
        return "\n".join(_page(found[0]))
    rows = [("step", "saved", "parameters", "size", "weights", "tokens", "resumable")]
    for s in found:
        tokens = s["train_state"].get("progress", {}).get("tokens")
        rows.append(
            (
                str(s["step"]),
                s["saved"] or "unknown",
                f"{s['parameters']:,}",
                _size(s["file_bytes"]),
                ", ".join(s["bytes"].get("model", {})),
                "" if tokens is None else f"{tokens:,}",
                "yes" if s["resumable"] else "weights only",
            )
        )
    return aligned(rows)


def _page(s: dict[str, Any]) -> Iterator[str]:
    yield s["path"]
    yield f"  step         {s['step']}" + ("" if s["resumable"] else " (weights only: can't be resumed)")
    yield f"  saved        {s['saved'] or 'unknown'}"
    yield f"  model        {s['model']['name']}, {s['parameters']:,} parameters"
    for part, sizes in s["bytes"].items():
        yield f"  {part:12} " + ", ".join(f"{name} {_size(size)}" for name, size in sizes.items())
    yield f"  files        {s['files']}, {_size(s['file_bytes'])}"
    position = dict(s["train_state"].get("data", {}))
    position.pop("fingerprint", None)  # is the data, below
    position |= {k: f"{len(v)} positions (--json lists them)" for k, v in position.items() if isinstance(v, dict)}
    for title, table in (
        ("written by", s["versions"] | {key: s[key] for key in ("git", "ranks") if s[key]}),
        ("model", s["model"]),
        ("state", s["train_state"] | {"data": position}),
        ("data", s["data"]),
        ("configuration, where it differs from the defaults", s["config"]),
    ):
        if table:
            yield f"  {title}"
        yield from (f"    {key} = {value}" for key, value in flat(table).items())


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def flat(table: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted key."""
    if not isinstance(table, dict) or not table:
        return {prefix[:-1]: table} if prefix else {}
    return {k: v for key, value in table.items() for k, v in flat(value, f"{prefix}{key}.").items()}


def compare(a: Path, b: Path, tolerance: float) -> Iterator[tuple[str, str]]:
    """(part, difference in words) of two checkpoints; parts are `config`, `train_state` and `tensors`.

    Args:
        tolerance: tensors with no larger |a - b| are equal.
    """
    first, second = read_manifest(a), read_manifest(b)
    for part, x, y in (
        ("config", settings(first["config"]), settings(second["config"])),
        ("train_state", flat(first["train_state"]), flat(second["train_state"])),
    ):
        for key in sorted(x.keys() | y.keys()):
            absent = "default" if part == "config" else "absent"
            if x.get(key) != y.get(key):
                yield part, f"{key}: {x.get(key, absent)} in a, {y.get(key, absent)} in b"
    readers = Reader(a), Reader(b)
    known, others = (reader.read_metadata().state_dict_metadata for reader in readers)
    for key in sorted(known.keys() | others.keys()):
        if key not in known or key not in others:
            yield "tensors", f"{key}: only in {'b' if key in others else 'a'}"
        elif known[key].size != others[key].size:
            yield "tensors", f"{key}: {list(known[key].size)} in a, {list(others[key].size)} in b"
        elif text := _distance(read_tensor(readers[0], key), read_tensor(readers[1], key), tolerance):
            yield "tensors", f"{key}: {text}"


def read_tensor(reader: Reader, key: str) -> Tensor:
    """One whole tensor of a checkpoint, in the type that it is stored in."""
    about = reader.read_metadata().state_dict_metadata[key]
    out = torch.empty(about.size, dtype=about.properties.dtype)
    with alone():
        dcp.load({key: out}, storage_reader=reader, no_dist=True)
    return out


def _distance(a: Tensor, b: Tensor, tolerance: float) -> str | None:
    """How far two tensors of one shape are apart, a piece at a time; None: not farther than `tolerance`."""
    largest = squares = norm = 0.0
    for x, y in zip(a.flatten().split(_PIECE), b.flatten().split(_PIECE), strict=True):
        x, y = x.double(), y.double()
        gap = torch.where(x == y, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf)  # NaN equals nothing
        gap[x.isnan() & y.isnan()] = 0.0
        largest = max(largest, gap.max().item()) if gap.numel() else largest
        squares += gap.square().sum().item()
        norm += x.square().nan_to_num().sum().item()
    types = "" if a.dtype == b.dtype else f"{a.dtype} in a, {b.dtype} in b; "
    if largest <= tolerance:
        return None
    return f"{types}max |a - b| {largest:.3g}, |a - b| / |a| {(squares / norm) ** 0.5 if norm else float('inf'):.3g}"
