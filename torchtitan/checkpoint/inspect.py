"""Description of a checkpoint by its manifest."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from torchtitan.checkpoint.commit import abandoned_at
from torchtitan.checkpoint.format.manifest import Manifest
from torchtitan.config.load.keys import without_defaults
from torchtitan.utils.wording import aligned, flat, show_size


def settings(manifest: Manifest) -> dict[str, Any]:
    """A run's configuration by dotted key, without the defaults."""
    return without_defaults(flat(manifest.settings()))


def as_data(step: Path, manifest: Manifest) -> dict[str, Any]:
    """A description of a checkpoint, for `--json`."""
    fields = {"step", "saved", "averaged", "model", "parameters"}
    fields |= {"data", "versions", "git", "ranks"}
    return {
        "path": str(step),
        **manifest.model_dump(include=fields),
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
    origin: dict[str, Any] = dict(manifest.versions)
    if manifest.git:
        origin["git"] = manifest.git
    if manifest.ranks:
        origin["ranks"] = manifest.ranks
    state = _state(manifest)
    position = state.get("data", {})
    position.pop("fingerprint", None)  # shown as "data"
    for source in position.get("sources", {}).values():
        if "lanes" in source:
            source["lanes"] = "see --json"
    tables = {
        "written by": origin,
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
    """Whether a start resumes the checkpoint, as text."""
    if manifest.model_only:
        return "the average of the weights" if manifest.averaged else "weights only"
    back_to = abandoned_at(step)
    return "yes" if back_to is None else f"abandoned: the run went back to step {back_to}"
