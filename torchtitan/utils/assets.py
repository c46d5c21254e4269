"""Files that ship with the package: the configurations, the demo tokenizer, the Slurm script."""

import os
from pathlib import Path

from torchtitan.utils.storage import expand_path

PACKAGE = Path(__file__).parents[1]
CHECKOUT = None if (PACKAGE / "assets").is_dir() else PACKAGE.parent
"""Folder of the checkout that this code runs from; None in an installed package."""
ASSETS = CHECKOUT or PACKAGE / "assets"
"""Folder of the shipped files, whose paths below it are the same in a checkout and a package."""


def find_asset(path: str | Path) -> Path:
    """`path` if it exists, else the shipped file with that path, else `path` unchanged."""
    local = Path(path)
    shipped = ASSETS / local
    return shipped if not os.path.exists(local) and os.path.exists(shipped) else local


def find_config(name: str, folder: Path = Path()) -> Path:
    """The TOML file `name` in `folder`, else the shipped file with that path or bare name.

    Returns:
        A path that may not exist; reading it then fails with a clear error.

    Raises:
        ValueError: as `expand_path`.
    """
    local = Path(expand_path(name))
    candidates = (folder / local, ASSETS / local, ASSETS / "train_configs" / f"{local}.toml")
    return next(filter(os.path.isfile, candidates), folder / local)


def shipped_configs() -> list[str]:
    """Bare names of the shipped configurations."""
    return sorted(path.stem for path in (ASSETS / "train_configs").glob("*.toml"))
