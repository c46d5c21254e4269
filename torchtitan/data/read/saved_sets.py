"""Data files in the folders that `save_to_disk` of the library `datasets` writes.

`state.json` lists the Arrow files of a data set; others beside it are caches of `map` and the like.
`dataset_dict.json` names the folders of splits that were saved together.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.data.read.opening import DataError
from torchtitan.utils.formats import read_json_object
from torchtitan.utils.logging import logger

STATE_FILE = "state.json"
SPLITS_FILE = "dataset_dict.json"
_SPLIT = "train"
"""The split to read if there are several."""


def without_leftovers(files: Sequence[Path], in_folder: bool, key: str) -> list[Path]:
    """`files` without caches beside a saved data set and, in a folder, without splits other than
    `train`.

    Raises:
        DataError: there is no such split, or a data set isn't complete.
    """
    leftovers: set[Path] = set()
    """Files, and folders of splits."""
    dictionaries = {file.parent for file in files if in_folder and file.name == SPLITS_FILE}
    for folder in sorted(dictionaries):
        if splits := saved_splits(folder):
            leftovers |= {folder / name for name in splits if name != _SPLIT}
            logger.info(
                f"{key}: of the saved splits, reading {folder / _SPLIT}; name another's folder "
                "to read that"
            )
    for folder in {file.parent for file in files if file.suffix == ".arrow"}:
        if shards := saved_shards(folder):
            leftovers |= {file for file in folder.glob("*.arrow") if file.name not in shards}
    return [file for file in files if leftovers.isdisjoint([file, *file.parents])]


def saved_splits(folder: Path) -> list[str]:
    """The splits that are saved in a folder, `train` among them; empty if it holds no splits.

    Raises:
        DataError: `train` is not among them.
    """
    splits = [name for name in _read_list(folder, SPLITS_FILE, "splits") if isinstance(name, str)]
    if splits and _SPLIT not in splits:
        raise DataError(
            f"{folder} holds the splits {', '.join(splits)} of a saved data set, and none is "
            f"{_SPLIT!r}; name the folder of one, such as {folder / splits[0]}"
        )
    return splits


def saved_shards(folder: Path) -> list[str]:
    """The names of a saved data set's files; empty if the folder holds no saved data set.

    Raises:
        DataError: a file is missing, or the rows are chosen by a table beside them.
    """
    if _read_list(folder, STATE_FILE, "_indices_files") or _read_list(
        folder, STATE_FILE, "_indices_data_files"
    ):
        raise DataError(
            f"{folder} is a saved data set whose rows are chosen or ordered by a table of indices "
            "(select, shuffle, filter); call flatten_indices() on it before save_to_disk()"
        )
    entries = _read_list(folder, STATE_FILE, "_data_files")
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    for name in names:
        if not (folder / name).is_file() or "/" in name:
            raise DataError(
                f"{folder} is a saved data set without its file {name}, which {STATE_FILE} names; "
                "save it again"
            )
    return names


def _read_list(folder: Path, name: str, key: str) -> list[Any]:
    """A list in the description of a saved data set; empty without one."""
    try:
        values = read_json_object(folder / name).get(key) if (folder / name).exists() else None
    except (OSError, ValueError) as error:
        if not any(folder.glob("*.arrow")):  # another's file of that name
            return []
        raise DataError(f"{error}; save the data set again") from None
    if not isinstance(values, list | None):
        raise DataError(f"{folder / name}: {key} must be a list; save the data set again")
    return values or []
