"""Folders written by `save_to_disk` of the library `datasets`.

state.json          names the Arrow files of a data set; others are caches of `map` and the like
dataset_dict.json   names the folders of several splits
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.data.text.retry import DataError
from torchtitan.utils.formats import read_json_object

_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_DEFAULT_SPLIT = "train"


def without_caches(files: Sequence[Path]) -> list[Path]:
    """`files` without the Arrow files beside those of saved data sets.

    Raises:
        DataError: see `saved_files`.
    """
    caches = set()
    for folder in sorted({file.parent for file in files if file.suffix == ".arrow"}):
        saved = saved_files(folder)
        if saved is not None:
            caches |= {path for path in folder.glob("*.arrow") if path.name not in saved}
    return [file for file in files if file not in caches]


def in_one_split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """`files` without those of splits that aren't read.

    Returns:
        The files, and the folders of the splits that were chosen.

    Raises:
        DataError: see `saved_splits`.
    """
    chosen = []
    others: set[Path] = set()
    for folder in sorted({file.parent for file in files if file.name == _SPLITS}):
        splits = saved_splits(folder)
        if splits:
            chosen.append(folder / _DEFAULT_SPLIT)
            others |= {folder / name for name in splits if name != _DEFAULT_SPLIT}
    return [file for file in files if others.isdisjoint(file.parents)], chosen


def saved_files(folder: Path) -> set[str] | None:
    """The names of a saved data set's files; None if the folder holds none.

    Raises:
        DataError: a file is missing, or the rows are chosen by a table beside them.
    """
    state = _read(folder / _STATE)
    if state is None or "_data_files" not in state:
        return None
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"{folder} is a saved data set whose rows are chosen or ordered by a table of indices "
            "(select, shuffle, filter); call flatten_indices() on it before save_to_disk()"
        )
    names = _names(state["_data_files"], folder)
    for name in names:
        if not (folder / name).is_file():
            raise DataError(
                f"{folder} is a saved data set without its file {name}, which {_STATE} "
                "names; save it again"
            )
    return set(names)


def _names(files: Any, folder: Path) -> list[str]:
    names: list[str] = []
    for entry in files if isinstance(files, list) else [None]:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name != Path(name).name:
            raise DataError(
                f"{folder / _STATE}: _data_files must be a list of files beside it; save "
                "the data set again"
            )
        names.append(name)
    return names


def saved_splits(folder: Path) -> list[str]:
    """The splits that are saved in a folder, `train` among them; none if it holds no splits.

    Raises:
        DataError: `train` is not among them.
    """
    about = _read(folder / _SPLITS)
    if about is None or "splits" not in about:
        return []
    splits = (
        [name for name in about["splits"] if isinstance(name, str)]
        if isinstance(about["splits"], list)
        else []
    )
    if _DEFAULT_SPLIT in splits:
        return splits
    example = f", such as {folder / splits[0]}" if splits else ""
    raise DataError(
        f"{folder} holds the splits {', '.join(splits) or '(none)'} of a saved data set, and none "
        f"is {_DEFAULT_SPLIT!r}; name the folder of one{example}"
    )


def _read(file: Path) -> dict[str, Any] | None:
    """A description; None if it is missing, or damaged in a folder without Arrow files."""
    try:
        return read_json_object(file) if file.exists() else None
    except (OSError, ValueError) as error:
        if file.name == _STATE and not any(file.parent.glob("*.arrow")):
            return None
        raise DataError(f"{error}; save the data set again") from None
