"""Files that ship with the package: the configurations, the demo tokenizer, the Slurm script."""

import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
CHECKOUT = None if (PACKAGE / "assets").is_dir() else PACKAGE.parent
"""Folder of the checkout that this code runs from; None in an installed package."""
ASSETS = CHECKOUT or PACKAGE / "assets"
"""Holds the shipped files, in a checkout and in an installed package under the same paths."""


def find_asset(path: str | Path) -> Path:
    """`path` if it exists, else the shipped file of that path, else `path` unchanged."""
    asked = Path(os.path.expanduser(path))
    shipped = ASSETS / asked
    return shipped if not os.path.exists(asked) and os.path.exists(shipped) else asked


def find_config(name: str | Path, folder: Path = Path()) -> Path:
    """The TOML file `name` in `folder`, else the shipped one of that path or bare name.

    Returns:
        A path that may not exist; reading it then fails with a clear error.
    """
    asked = Path(os.path.expanduser(name))
    candidates = (folder / asked, ASSETS / asked, ASSETS / "train_configs" / f"{asked}.toml")
    return next(
        (candidate for candidate in candidates if os.path.isfile(candidate)), folder / asked
    )


def shipped_configs() -> list[str]:
    """Bare names of the shipped configurations."""
    return sorted(path.stem for path in (ASSETS / "train_configs").glob("*.toml"))
