"""Containers of jobs: the files that they need, and the launcher's command."""

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, get_args

from pydantic import BaseModel

from torchtitan.config import Config
from torchtitan.config.load.render import to_toml
from torchtitan.config.types import LocalPath
from torchtitan.tools.launch.container_options import Volume
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.storage import is_url

PORT = 29500
"""The port of the rendezvous. A pod or machine has its own address, so jobs don't compete."""
_CONFIG_BYTES = 1_000_000
"""A ConfigMap holds at most 1 MiB."""
_LAUNCHER_SECONDS = 10
"""The launcher stops this long before its container is killed, to report why."""
_NO_INPUTS = {"job.config_file", "job.dump_folder", "checkpoint.folder"}
_PATH = get_args(LocalPath)[-1]
"""Annotation that marks a key as a path."""


@dataclass(frozen=True)
class ClusterRun:
    """One run, as a scheduler of containers starts it."""

    name: str
    """Name of the run's job."""
    title: str | None
    """Name of the run in its grid; None for one job."""
    flags: Sequence[str]
    """Flags that override the shared configuration."""
    nodes: tuple[int, int]
    """Minimum and maximum number of nodes."""
    ranks: int
    """Ranks per node."""
    restarts: int
    """Number of restarts after failures."""
    own_code: bool = False
    """Whether the run imports a module of the user, perhaps from its working folder."""

    @property
    def elastic(self) -> bool:
        return self.nodes[0] < self.nodes[1]


# ---- files


def config_text(config: Config, name: str) -> str:
    """The container's TOML file: values that differ from the defaults, without `extends`.

    Args:
        name: name of the source file.

    Raises:
        ConfigError: the file is too large.
    """
    text = f"# Written by `torchtitan submit` from {name}\n\n{to_toml(config, only_changed=True)}"
    if len(text.encode()) > _CONFIG_BYTES:
        raise ConfigError([f"{name}: its settings take more than {_CONFIG_BYTES:,} bytes"])
    return text.rstrip() + "\n"


def needed_files(
    config: Config, volumes: list[Volume], workdir: str | None, relative: str
) -> list[str]:
    """The inputs that the container must have, as `key = path (volume NAME)`.

    Args:
        workdir: folder of relative paths; None if it is on no volume.
        relative: description of the folder of relative paths without `workdir`.
    """
    inputs = []
    for key, path in _local_paths(config):
        if key in _NO_INPUTS or is_url(path) or not path:
            continue
        location = "image" if workdir or path.startswith("/") else relative
        if name := _volume_of(path, volumes, workdir):
            location = f"volume {name}"
        inputs.append(f"{key} = {path} ({location})")
    if config.experimental.custom_import:
        inputs.append(
            f"experimental.custom_import = {config.experimental.custom_import} (a module)"
        )
    return inputs


def check_outputs(config: Config, volumes: list[Volume], workdir: str | None) -> None:
    """
    Raises:
        ConfigError: checkpoints would be lost with the container.
    """
    settings = config.checkpoint
    if not settings.enable:
        return
    folder = str(PurePosixPath(config.job.dump_folder, settings.folder.removeprefix("file://")))
    if not (is_url(settings.folder) or _volume_of(folder, volumes, workdir)):
        raise ConfigError(
            [
                f"checkpoint.folder: {folder} is in the container and lost with it; mount a "
                "--volume NAME:PATH with job.dump_folder below PATH, or set checkpoint.folder to "
                "a URL (s3://, gs://)"
            ]
        )


def _volume_of(path: str, volumes: list[Volume], workdir: str | None) -> str | None:
    """The name of the volume that holds a path."""
    if not path or (workdir is None and not path.startswith("/")):
        return None
    absolute = PurePosixPath(posixpath.normpath(PurePosixPath(workdir or "/", path)))
    candidates = [volume for volume in volumes if absolute.is_relative_to(volume.path)]
    return max(candidates, key=lambda volume: len(volume.path)).name if candidates else None


def _local_paths(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, value) of all paths in a section, except defaults, which every installation has."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, BaseModel):
                yield from _local_paths(entry, f"{prefix}{name}.")
        if isinstance(value, str) and value != info.default and _is_path(info):
            yield prefix + name, value


def _is_path(info: Any) -> bool:
    """Whether a field is a path, or may be one."""
    marks = [*info.metadata]
    for kind in get_args(info.annotation):
        marks += getattr(kind, "__metadata__", ())
    return _PATH in marks


# ---- commands


def train_words(
    run: ClusterRun, file: str, endpoint: str, grace: int, flags: Sequence[str] = ()
) -> list[str]:
    """Arguments of the launcher on each node, up to the flags of the configuration.

    Args:
        endpoint: endpoint of the rendezvous; unused on one node.
        grace: seconds from the signal to stop until the container is killed.
        flags: more options of the launcher.
    """
    fewest, most = run.nodes
    words = ["train", file, f"--nproc-per-node={run.ranks}"]
    if most > 1:
        number = f"{fewest}:{most}" if run.elastic else str(most)
        words += [f"--nnodes={number}", f"--rdzv-endpoint={endpoint}"]
    return [*words, f"--grace={grace - _LAUNCHER_SECONDS}", *flags]
