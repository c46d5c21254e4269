"""Which files a path names: itself, those in a folder, or those that a pattern matches."""

import glob
import heapq
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from torchtitan.data.read.opening import COMPRESSED, DataError
from torchtitan.utils.errors import UserError
from torchtitan.utils.formats import read_json_object
from torchtitan.utils.limits import SEARCHED_FILES
from torchtitan.utils.logging import logger
from torchtitan.utils.wording import listed, plural, printable

Format = Literal["lines", "json", "text", "csv", "tsv", "parquet", "arrow"]
FORMATS: dict[str, Format] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".txt": "text",
    ".md": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""Endings of files of documents. `json` may be lines or an array."""
_DESCRIPTION_PREFIXES = (
    "readme",
    "license",
    "licence",
    "copying",
    "notice",
    "changelog",
    "citation",
    "contributing",
    "security",
)
"""Beginnings of the names of files that describe their folder and hold no documents."""
REPORT = "-report.json"
"""Ending of the report that `torchtitan tokenize` writes beside token files."""
_STATE_FILE = "state.json"
"""The file that lists the Arrow files of a data set saved by `save_to_disk` of the library
`datasets`; other Arrow files beside it are caches of `map` and the like.
"""
_SPLITS_FILE = "dataset_dict.json"
"""The file that names the folders of splits that were saved together."""
_SPLIT = "train"
"""The split to read if there are several."""
_LISTED = 20
"""Maximum number of ignored files that a report names."""
_ENDINGS = 8
"""Maximum number of endings by which ignored files are counted."""
_DESCRIPTIONS = {
    "dataset_infos.json",
    "dataset_info.json",
    "croissant.json",
    _STATE_FILE,
    _SPLITS_FILE,
}


def find_files(path: str | Sequence[str], key: str) -> list[Path]:
    """The files that `path` names: a file, folder or glob, or several of them. Sorted within each.

    Raises:
        UserError: there are none.
    """
    if not isinstance(path, str):
        return [file for name in path for file in find_files(name, key)]
    files = _files_named_by(path, key)
    expanded = os.path.expanduser(path)
    if not os.path.isfile(expanded):
        files = _without_leftovers(files, os.path.isdir(expanded), key)
        described = {file.with_suffix(".json") for file in files if file.suffix == ".bin"}
        files = [file for file in files if file not in described]
    if not files:
        raise UserError(
            f"{key}: no file matches {path!r} (looked for {', '.join(FORMATS)} and .bin "
            "token files)"
        )
    return files


def _without_leftovers(files: Sequence[Path], in_folder: bool, key: str) -> list[Path]:
    """`files` without caches beside a saved data set and, in a folder, without splits other than
    `train`.
    """
    left_out: set[Path] = set()
    """Files, and folders of splits."""
    try:
        for folder in sorted(
            {file.parent for file in files if in_folder and file.name == _SPLITS_FILE}
        ):
            if splits := _saved_splits(folder):
                left_out |= {folder / name for name in splits if name != _SPLIT}
                logger.info(
                    f"{key}: of the saved splits, reading {folder / _SPLIT}; name another's folder "
                    "to read that"
                )
        for folder in {file.parent for file in files if file.suffix == ".arrow"}:
            if shards := _saved_shards(folder):
                left_out |= {file for file in folder.glob("*.arrow") if file.name not in shards}
    except DataError as error:
        raise UserError(f"{key}: {error}") from None
    return [file for file in files if left_out.isdisjoint([file, *file.parents])]


def _saved_splits(folder: Path) -> list[str]:
    """The splits that are saved in a folder, `train` among them; none if it holds no splits.

    Raises:
        DataError: `train` is not among them.
    """
    splits = [name for name in _read_list(folder, _SPLITS_FILE, "splits") if isinstance(name, str)]
    if splits and _SPLIT not in splits:
        raise DataError(
            f"{folder} holds the splits {', '.join(splits)} of a saved data set, and none is "
            f"{_SPLIT!r}; name the folder of one, such as {folder / splits[0]}"
        )
    return splits


def _saved_shards(folder: Path) -> list[str]:
    """The names of a saved data set's files; none if the folder holds no saved data set.

    Raises:
        DataError: a file is missing, or the rows are chosen by a table beside them.
    """
    if _read_list(folder, _STATE_FILE, "_indices_files") or _read_list(
        folder, _STATE_FILE, "_indices_data_files"
    ):
        raise DataError(
            f"{folder} is a saved data set whose rows are chosen or ordered by a table of indices "
            "(select, shuffle, filter); call flatten_indices() on it before save_to_disk()"
        )
    entries = _read_list(folder, _STATE_FILE, "_data_files")
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    for name in names:
        if not (folder / name).is_file() or "/" in name:
            raise DataError(
                f"{folder} is a saved data set without its file {name}, which {_STATE_FILE} names; "
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


def find_token_files(path: str, key: str) -> list[Path]:
    """The token files that `path` names: a `.bin` file, a glob of them, or a folder that holds
    some, at any depth.

    A Megatron pair may also be named by its `.idx` file.

    Returns:
        An empty list if `path` names documents or doesn't exist.
    """
    folder = os.path.expanduser(path)
    if not os.path.isdir(folder):
        if path.endswith(".idx"):
            path = path.removesuffix(".idx") + ".bin"
        return find_files(path, key) if path.endswith(".bin") else []
    files = set(_files_named_by(path, key))
    tokens = {file for file in files if file.suffix == ".bin"}
    if Path(folder) not in {file.parent for file in tokens}:  # below it may lie other binary files
        tokens = {
            file for file in tokens if {file.with_suffix(".json"), file.with_suffix(".idx")} & files
        }
    described = {file.with_suffix(".json") for file in tokens}
    beside = [file for file in files - described if format_of(file) and not _is_description(file)]
    if tokens and beside:
        names = listed(sorted(file.name for file in beside), 6)
        logger.warning(
            f"{key}: reading {plural(len(tokens), 'token file')} of {path}, and not what lies "
            f"beside: {names}. To read that, name it by itself, or as another source"
        )
    return sorted(tokens)


def _files_named_by(path: str, key: str) -> list[Path]:
    """The files in a folder, except hidden ones, or those that a pattern matches, each once,
    sorted.
    """
    skipped: list[str] = []
    matches = matching_files(os.path.expanduser(path), SEARCHED_FILES, skipped)
    try:
        files, again = _without_aliases(matches)
    except TooManyFilesError as error:
        raise UserError(f"{key}: {error}; name a folder closer to the files") from None
    if links := sorted({*skipped, *again}):
        logger.info(
            f"{key}: skipping {plural(len(links), 'link')} to what is read under another "
            f"name: {listed(links, 6)}"
        )
    return sorted(map(Path, files))


def find_text_files(
    path: str | Sequence[str], key: str, ignored: list[Path] | None = None
) -> list[Path]:
    """The files that `path` names, without those that a folder or glob holds beside its documents.

    Args:
        ignored: takes the files that are left out, because of their format or as descriptions.

    Raises:
        UserError: there are none, or a file that is named by itself has an unknown format.
    """
    ignored = [] if ignored is None else ignored
    chosen: list[Path] = []
    for name in [path] if isinstance(path, str) else path:
        files = find_files(name, key)
        if os.path.isfile(os.path.expanduser(name)):
            if format_of(files[0]) is None:
                raise UserError(f"{key}: {name} has an unknown format; {_FORMATS_READ}")
            chosen += files
            continue
        texts = [file for file in files if format_of(file) and not _is_description(file)]
        ignored += [file for file in files if not format_of(file) or _is_description(file)]
        chosen += texts
    if not chosen:
        names = listed(file.name for file in ignored[:4])
        where = listed([path] if isinstance(path, str) else path)
        raise UserError(f"{key}: no documents in {where}, only {names}; {_FORMATS_READ}")
    if ignored:
        text = f"{key}: reading {len(chosen):,} of {count_files(chosen, ignored)}"
        unknown = sum(not format_of(file) for file in ignored)
        if unknown > len(chosen):
            logger.warning(f"{text}. {_FORMATS_READ[0].upper()}{_FORMATS_READ[1:]}")
        else:
            logger.info(text)
    return chosen


def count_files(chosen: Sequence[Any], ignored: Sequence[Path]) -> str:
    """`150 files; ignoring 143 without documents (96 .gz, 47 without an ending): a.gz, ...`."""
    text = plural(len(chosen) + len(ignored), "file")
    if not ignored:
        return text
    kinds = ", ".join(f"{number:,} {ending}" for ending, number in _endings(ignored).items())
    names = listed(sorted({printable(file.name) for file in ignored}), 6)
    return f"{text}; ignoring {len(ignored):,} without documents ({kinds}): {names}"


def ignored_files(ignored: Sequence[Path]) -> dict[str, Any]:
    """The files that were left out, for reports: their number, by ending, and the first ones."""
    return {
        "files": len(ignored),
        "endings": dict(_endings(ignored)),
        "first": [printable(str(file)) for file in ignored[:_LISTED]],
    }


def _endings(files: Sequence[Path]) -> dict[str, int]:
    counts = Counter(printable(file.suffix.lower()) or "without an ending" for file in files)
    common = counts.most_common(_ENDINGS)
    if others := counts.total() - sum(number for _, number in common):
        common.append(("others", others))
    return dict(common)


_FORMATS_READ = (
    f"files must be of {', '.join(FORMATS)} (but for Parquet and Arrow also "
    f"{', '.join(COMPRESSED)})"
)


def path_problem(path: str) -> str | None:
    """The problem of a file or folder that its name or descriptions show, else None."""
    named = Path(path).expanduser()
    if not named.is_dir():
        known = format_of(named) or named.suffix in (".bin", ".idx")
        return None if known else f"{path} has an unknown format; {_FORMATS_READ}"
    try:
        _saved_splits(named)
        _saved_shards(named)
    except DataError as error:
        return str(error)
    return None


def _is_description(file: Path) -> bool:
    name = file.name.lower()
    if name in _DESCRIPTIONS or name.endswith(REPORT):
        return True
    return FORMATS.get(file.suffix.lower()) == "text" and name.startswith(_DESCRIPTION_PREFIXES)


def format_of(file: Path) -> Format | None:
    """The format by a file's name, compressed or not."""
    name = file.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return FORMATS.get(Path(name).suffix)


class TooManyFilesError(Exception):
    """Too many files and folders would have to be searched."""


def matching_files(path: str, most: int, skipped: list[str]) -> Iterator[str]:
    """The files below the folder `path`, or those that match it as a pattern, in no order.

    The rules are as in `glob.glob(path, recursive=True)`, except that `**` finds each folder once,
    whatever links lead to it. Links that lead nowhere, pipes and devices are among the files:
    opening them says what is wrong.

    Args:
        most: number of files and folders to look at.
        skipped: takes the links to folders that were searched already.

    Raises:
        TooManyFilesError: there are more.
    """
    left = most

    def look_at(count: int) -> None:
        nonlocal left
        left -= count
        if left < 0:
            raise TooManyFilesError(f"{path!r} searches more than {most:,} files and folders")

    def matching(folder: str, patterns: Sequence[str]) -> Iterator[str]:
        pattern, *below_it = patterns
        if pattern == "**":
            for below, files in _folders_below(folder, skipped):
                look_at(len(files) + 1)
                if below_it == ["*"]:
                    yield from (os.path.join(below, name) for name in files if name[0] != ".")
                else:
                    yield from matching(below, below_it)
            return
        for name in glob.iglob(pattern, root_dir=folder or None):
            look_at(1)
            inner = os.path.join(folder, name)
            is_folder = os.path.isdir(inner)
            if below_it and is_folder:
                yield from matching(inner, below_it)
            elif not below_it and not is_folder:
                yield inner

    if os.path.isdir(path):
        return matching(path, ["**", "*"])
    patterns = [pattern for pattern in path.split("/") if pattern]
    if not patterns:
        return iter(())
    if patterns[-1] == "**":
        patterns.append("*")
    return matching("/" if path.startswith("/") else "", patterns)


def _folders_below(folder: str, skipped: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A folder and those below it, without hidden ones, each once and with the names of its files.

    Links come last, so that a folder is found under its own name.
    """
    links = [folder]
    seen = set()
    while links:
        for path, folders, files in os.walk(heapq.heappop(links) or "."):
            status = os.stat(path)
            key = (status.st_dev, status.st_ino)
            if key in seen and status.st_ino:  # 0: the file system doesn't number its files
                skipped.append(path)
                folders.clear()
                continue
            seen.add(key)
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in folders:
                inner = os.path.join(path, name)
                if os.path.islink(inner):
                    heapq.heappush(links, inner)
            yield path, files


def _without_aliases(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Each file under one name, and the names left out, both sorted.

    A file's own name precedes the names of links; hard links are files.
    """
    folders: dict[str, str] = {}
    names: dict[str, str] = {}
    again = []
    for file in sorted(set(files)):
        folder, name = os.path.split(file)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        resolved = os.path.join(folders[folder], name)
        target = os.path.realpath(resolved) if os.path.islink(resolved) else resolved
        if target not in names:
            names[target] = file
        elif target == os.path.abspath(file):
            again.append(names[target])
            names[target] = file
        else:
            again.append(file)
    return sorted(names.values()), sorted(again)
