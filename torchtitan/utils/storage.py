"""Folders by path or by URL (`s3://bucket/run`, `gs://...`), both with pathlib's interface. Imports no torch."""

import importlib
import importlib.util
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torchtitan.utils.logging import logger

Result = TypeVar("Result")

_OBJECT_STORES = ("s3://", "s3a://", "gs://", "gcs://", "az://", "abfs://", "abfss://", "r2://", "oss://")
_DELAYS = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts. The clients retry single requests too; this is for what outlasts them."""
_LASTING = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
)
"""Errors that another attempt won't mend."""


def is_url(name: str) -> bool:
    """Whether `name` is a URL of storage that is no local folder."""
    return "://" in name and not name.startswith("file://")


def storage_path(name: str, base: str | Path = "") -> Path:
    """The folder or file that a path (relative to `base`) or a URL names.

    A URL gives a `upath.UPath`, which does what a `Path` does; but its `rename` copies, and there is no fsync.
    """
    if not is_url(name):
        return Path(base, name.removeprefix("file://"))
    from upath import UPath

    # A cached listing would miss what other ranks and runs write.
    return UPath(name, **({"use_listings_cache": False} if name.startswith(_OBJECT_STORES) else {}))


def make_folder(path: Path) -> None:
    """Make a folder and those above it. An object store has none; and a bucket is not to be made by a typing error."""
    if not str(path).startswith(_OBJECT_STORES):
        path.mkdir(parents=True, exist_ok=True)


def is_remote(path: Path) -> bool:
    """Whether a path from `storage_path` is a URL's."""
    return not isinstance(path, Path)


def storage_problem(name: str) -> str | None:
    """Why a URL can't be used on this machine: its scheme is unknown, or a package is missing. Opens no connection."""
    if not is_url(name):
        return None
    from fsspec.registry import known_implementations

    scheme = name.split("://")[0]
    if scheme not in known_implementations:
        return f"no storage is known by {scheme}:// ({name!r}); s3://, gs:// and abfs:// are, or give a path"
    package = known_implementations[scheme]["class"].split(".")[0]
    missing = [p for p in ("upath", package) if importlib.util.find_spec(p) is None]
    if missing:
        names = " ".join("universal_pathlib" if p == "upath" else p for p in missing)
        return f"{name!r} needs a package that is not installed: pip install {names}"
    return None


def patiently(path: Path, action: Callable[[], Result]) -> Result:
    """Run an action on `path`; on remote storage, try again after errors that may pass.

    Raises:
        OSError: it failed. The storage clients' own kinds of errors become this one.
    """
    delays = iter(_DELAYS)
    while True:
        try:
            return action()
        except Exception as error:
            if not is_remote(path) or isinstance(error, _LASTING):
                raise
            delay = None if "Credentials" in type(error).__name__ else next(delays, None)
            if delay is None and isinstance(error, OSError):
                raise
            if delay is None:
                raise OSError(f"{type(error).__name__}: {error}") from error
            logger.warning(f"{path}: {type(error).__name__}: {error}; trying again in about {delay:g} s")
            time.sleep(delay * random.uniform(0.5, 1.5))


def delete_tree(path: Path) -> None:
    """Delete a folder and all in it, as far as possible."""
    if is_remote(path):
        try:
            path.fs.rm(path.path, recursive=True)  # type: ignore[attr-defined]
        except FileNotFoundError:
            return
    else:
        shutil.rmtree(path, ignore_errors=True)
