"""The releases of torch that this project is tested with. Imports no torch, because scripts run
this before torch is installed.
"""

from importlib import metadata

TESTED_TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Oldest first. docs/reference/torch-versions.md lists the tests of each."""


def installed_torch() -> str | None:
    """Version of the installed torch; None without torch, on a host that only checks
    configurations.
    """
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def feature_release(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu", "2.13.0a0+git1234" and "2.13.1"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _short(version: str) -> str:
    return ".".join(map(str, feature_release(version)))


def too_old(version: str | None) -> str | None:
    """The reason why this release of torch can't be used, or None."""
    oldest = TESTED_TORCH[0]
    if version is None or feature_release(version) >= feature_release(oldest):
        return None
    return f"torch {version} is too old; upgrade it to {_short(oldest)} or newer"


def too_new(version: str | None) -> str | None:
    """A warning if this release of torch is newer than every tested release, or None."""
    newest = TESTED_TORCH[-1]
    if version is None or feature_release(version) <= feature_release(newest):
        return None
    return (
        f"torch {version} is newer than the tested releases, {_short(TESTED_TORCH[0])} to "
        f"{_short(newest)}"
    )
