"""Folders by path or URL (`s3://bucket/run`), both with pathlib's interface. Imports no torch."""

import importlib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torchtitan.utils.errors import EMPTY, ConfigError
from torchtitan.utils.logging import logger
from torchtitan.utils.retry import retry
from torchtitan.utils.wording import brief

Result = TypeVar("Result")

_OBJECT_STORES = (
    "s3://",
    "s3a://",
    "gs://",
    "gcs://",
    "az://",
    "abfs://",
    "abfss://",
    "r2://",
    "oss://",
)
_ATTEMPTS = 5
_PAUSE = 1.0
"""Mean seconds before the second attempt. The clients retry too, but give up sooner."""
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
"""Errors that another attempt can't fix."""


_VARIABLE = re.compile(r"\$(\{[^}]*\}|\([^)]*\)|[A-Za-z_]\w*)")


def expand_path(path: str) -> str:
    """A path as it was typed, with `~`, `$NAME` and `${NAME}` replaced. An absolute path with a `$`
    stays as it is if it exists.

    Raises:
        ValueError: the path is empty, or there is no such user or variable.
    """
    if not path:
        raise ValueError(EMPTY)

    def value(match: re.Match[str]) -> str:
        name = match[1].strip("{}")
        folder = path[: match.end()] + path[match.end() :].partition("/")[0]
        if not os.environ.get(name) and not (os.path.isabs(folder) and os.path.exists(folder)):
            raise ValueError(f"got {brief(path)}, but no environment variable {name!r} is set")
        return os.environ.get(name) or match[0]

    full_path = os.path.expanduser(_VARIABLE.sub(value, path))
    if full_path.startswith("~") and "/" in full_path:
        raise ValueError(
            f"got {brief(path)}, but there is no user {path.partition('/')[0][1:]!r}; "
            "write ./~ for a ~"
        )
    return full_path


def is_url(name: str) -> bool:
    """Whether `name` is a URL of remote storage."""
    return "://" in name and not name.startswith("file://")


def storage_path(name: str, base: str | Path = "") -> Path:
    """The folder or file at a path (relative to `base`) or a URL.

    A URL becomes a `upath.UPath`, which has the interface of a `Path`, but its `rename` copies.
    """
    if not is_url(name):
        return Path(base, name.removeprefix("file://"))
    from upath import UPath

    # A cached listing would miss files of other ranks and runs.
    return UPath(name, **({"use_listings_cache": False} if name.startswith(_OBJECT_STORES) else {}))


def path_argument(name: str, option: str = "") -> Path:
    """`storage_path` of a command-line argument.

    Args:
        option: the option's name, for the error.

    Raises:
        ConfigError: a URL that can't be used on this machine, or as `expand_path`.
    """
    try:
        name = expand_path(name)
        problem = storage_problem(name)
    except ValueError as error:
        problem = str(error)
    if problem:
        raise ConfigError([f"{option}: {problem}" if option else problem])
    return storage_path(name)


def make_folder(path: Path) -> None:
    """Create a folder and its parents. A no-op on object stores: a mistyped bucket must fail."""
    if not str(path).startswith(_OBJECT_STORES):
        path.mkdir(parents=True, exist_ok=True)


def is_remote(path: Path) -> bool:
    """Whether a path from `storage_path` was given as a URL."""
    return not isinstance(path, Path)


def storage_problem(name: str) -> str | None:
    """The reason why a URL can't be used here (unknown scheme, missing package), or None. Opens no
    connection.
    """
    if not is_url(name):
        return None
    from fsspec.registry import known_implementations

    scheme = name.split("://")[0]
    if scheme not in known_implementations:
        return f"unknown storage {scheme}:// in {name!r}; use s3://, gs://, abfs:// or a path"
    package = known_implementations[scheme]["class"].split(".")[0]
    modules = [p for p in ("upath", package) if importlib.util.find_spec(p) is None]
    if modules:
        names = " ".join("universal_pathlib" if p == "upath" else p for p in modules)
        return f"{name!r} needs a package that is not installed: pip install {names}"
    return None


def patiently(path: Path, action: Callable[[], Result]) -> Result:
    """Return `action()`, which works on `path`; on remote storage, retry after transient errors.

    Raises:
        OSError: the last attempt failed. The storage clients' own exceptions are converted to it.
    """
    if not is_remote(path):
        return action()

    def warn(error: Exception, attempt: int, pause: float) -> None:
        logger.warning(f"{path}: {type(error).__name__}: {error}; trying again in {pause:.1f} s")

    try:
        return retry(action, attempts=_ATTEMPTS, pause=_PAUSE, may_pass=_may_pass, failed=warn)
    except (OSError, *_LASTING):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _may_pass(error: Exception) -> bool:
    return not (isinstance(error, _LASTING) or "Credentials" in type(error).__name__)


def delete_tree(path: Path) -> None:
    """Delete a folder and its contents, as far as possible."""
    if is_remote(path):
        try:
            path.fs.rm(path.path, recursive=True)  # type: ignore[attr-defined]
        except FileNotFoundError:
            return
    else:
        shutil.rmtree(path, ignore_errors=True)
