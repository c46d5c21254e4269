"""Which files a path names: itself, those in a folder, or those that a pattern matches."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtitan.data.read.matching import (
    TooManyFilesError,
    fixed_folder,
    matching_files,
    without_aliases,
)
from torchtitan.data.read.opening import COMPRESSED, DataError
from torchtitan.data.read.written_folders import WrittenFolders
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
_VALIDATION = re.compile(r"(.*[_-])?val([_-]\d+)?\.bin")
_LITDATA_OR_MDS = re.compile(r"chunk-\d+-\d+(\..+)?\.bin|.*\.mds(\..+)?")
_FOREIGN = {
    "MosaicML's MDS": re.compile(r".*\.mds(\..+)?"),
    "litdata": re.compile(r"chunk-\d+-\d+(\..+)?\.bin"),
    "WebDataset, or another tar archive": re.compile(r".*\.(tar(\..+)?|tgz)"),
    "TFRecord": re.compile(r".*\.(tfrecords?|array_record)(-.+|\..+)?"),
    "NumPy arrays": re.compile(r".*\.np[yz]"),
    "SQLite, or another database": re.compile(r".*\.(sqlite3?|db|lmdb|mdb)"),
}
"""Names of files of formats that can't be read."""
_NAMED = 6
"""Maximum number of files and folders that a message names."""
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


@dataclass
class Ignored:
    """What lies in a folder, or matches a glob, and isn't read."""

    files: list[Path] = field(default_factory=list)
    """Files of unknown format, and descriptions."""
    written: dict[Path, str] = field(default_factory=dict)
    """Folders of runs, checkpoints and models, or files in them; and which they are."""

    def in_words(self) -> str:
        """`; ignoring 143 files without documents (96 .gz, 47 without an ending): a.gz, ...`;
        nothing if nothing is ignored.
        """
        text = ""
        if self.files:
            kinds = ", ".join(f"{number:,} {ending}" for ending, number in self._endings().items())
            names = listed(sorted({printable(file.name) for file in self.files}), _NAMED)
            count = plural(len(self.files), "file")
            text += f"; ignoring {count} without documents ({kinds}): {names}"
        if self.written:
            text += f"; leaving out {written_in_words(self.written)}"
        return text

    def as_data(self) -> dict[str, Any]:
        """For reports: the number of files, also by ending, and the first ones."""
        return {
            "files": len(self.files),
            "endings": self._endings(),
            "first": [printable(str(file)) for file in self.files[:_LISTED]],
            "written": {printable(str(path)): kind for path, kind in self.written.items()},
        }

    def _endings(self) -> dict[str, int]:
        counts = Counter(
            printable(file.suffix.lower()) or "without an ending" for file in self.files
        )
        common = counts.most_common(_ENDINGS)
        if others := counts.total() - sum(number for _, number in common):
            common.append(("others", others))
        return dict(common)


def written_in_words(written: Mapping[Path, str]) -> str:
    """`outputs (run), exported (model or tokenizer)`."""
    return listed((printable(f"{path} ({kind})") for path, kind in sorted(written.items())), _NAMED)


def find_files(path: str | Sequence[str], key: str, ignored: Ignored | None = None) -> list[Path]:
    """The files that `path` names: a file, folder or glob, or several of them. Sorted within each.

    Args:
        ignored: takes what runs wrote, which is left out.

    Raises:
        UserError: there are none.
    """
    ignored = Ignored() if ignored is None else ignored
    if not isinstance(path, str):
        return [file for name in path for file in find_files(name, key, ignored)]
    listing = _list(path, key)
    files = listing.files
    expanded = os.path.expanduser(path)
    if not os.path.isfile(expanded):
        files = _without_leftovers(files, os.path.isdir(expanded), key)
        described = {file.with_suffix(".json") for file in files if file.suffix == ".bin"}
        files = [file for file in files if file not in described]
    listing.log(key)
    ignored.written |= listing.written
    if not files:
        only = f"; {written_in_words(listing.written)} is no data" if listing.written else ""
        raise UserError(
            f"{key}: no file matches {path!r} (looked for {', '.join(FORMATS)} and .bin "
            f"token files){only}"
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
    listing = _list(path, key)
    files = set(listing.files)
    tokens = {file for file in files if file.suffix == ".bin"}
    if Path(folder) not in {file.parent for file in tokens}:  # below it may lie other binary files
        tokens = {
            file for file in tokens if {file.with_suffix(".json"), file.with_suffix(".idx")} & files
        }
    tokens -= _held_out(tokens, key)
    described = {file.with_suffix(".json") for file in tokens}
    beside = [file for file in files - described if format_of(file) and not _is_description(file)]
    if tokens:
        listing.log(key)
    if tokens and beside:
        names = listed(sorted(file.name for file in beside), 6)
        logger.warning(
            f"{key}: reading {plural(len(tokens), 'token file')} of {path}, and not what lies "
            f"beside: {names}. To read that, name it by itself, or as another source"
        )
    return sorted(tokens)


def is_undescribed(file: Path) -> bool:
    """Whether neither a JSON description nor Megatron's index lies beside a token file."""
    return not (file.with_suffix(".json").exists() or file.with_suffix(".idx").exists())


def _held_out(tokens: Set[Path], key: str) -> set[Path]:
    """The files that llm.c and nanoGPT name as those for validation, if others are for training."""
    undescribed = {file for file in tokens if is_undescribed(file)}
    held_out = {file for file in undescribed if _VALIDATION.fullmatch(file.name)}
    if not held_out or held_out == undescribed:
        return set()
    names = listed(sorted(file.name for file in held_out), _NAMED)
    logger.info(
        f"{key}: leaving out {names}, by name for validation; name it as validation.dataset_path"
    )
    return held_out


@dataclass
class _Listing:
    """The files that a path names, each once, sorted."""

    files: list[Path]
    """Without what runs wrote."""
    links: list[str]
    """Links to what has another name."""
    written: Mapping[Path, str]

    def log(self, key: str) -> None:
        if self.links:
            logger.info(
                f"{key}: skipping {plural(len(self.links), 'link')} to what is read under another "
                f"name: {listed(self.links, _NAMED)}"
            )
        if self.written:
            logger.info(f"{key}: leaving out {written_in_words(self.written)}: never data")


def _list(path: str, key: str) -> _Listing:
    """List the files in a folder, except hidden ones, or those that a pattern matches."""
    skipped: list[str] = []
    expanded = os.path.expanduser(path)
    matches = matching_files(expanded, SEARCHED_FILES, skipped)
    try:
        names, again = without_aliases(matches)
    except TooManyFilesError as error:
        raise UserError(f"{key}: {error}; name a folder closer to the files") from None
    files = sorted(map(Path, names))
    links = sorted({*skipped, *again})
    if os.path.isfile(expanded):
        return _Listing(files, links, {})
    folders = WrittenFolders(Path(fixed_folder(expanded)))
    return _Listing(folders.without(files), links, folders.left_out)


def find_text_files(
    path: str | Sequence[str], key: str, ignored: Ignored | None = None
) -> list[Path]:
    """The files that `path` names, without those that a folder or glob holds beside its documents.

    Args:
        ignored: takes what is left out.

    Raises:
        UserError: there are none, or a file that is named by itself has an unknown format.
    """
    ignored = Ignored() if ignored is None else ignored
    chosen: list[Path] = []
    for name in [path] if isinstance(path, str) else path:
        files = find_files(name, key, ignored)
        if os.path.isfile(os.path.expanduser(name)):
            if format_of(files[0]) is None:
                raise UserError(f"{key}: {_unknown(name)}")
            chosen += files
            continue
        chosen += [file for file in files if format_of(file) and not _is_description(file)]
        ignored.files += [file for file in files if not format_of(file) or _is_description(file)]
    if not chosen:
        where = listed([path] if isinstance(path, str) else path)
        foreign = _foreign(file.name for file in ignored.files)
        raise UserError(
            f"{key}: no documents in {where}{ignored.in_words()}{foreign}; {_FORMATS_READ}"
        )
    if ignored.files:
        text = f"{key}: reading {plural(len(chosen), 'file')}{Ignored(ignored.files).in_words()}"
        unknown = sum(not format_of(file) for file in ignored.files)
        if unknown > len(chosen):
            logger.warning(f"{text}. {_FORMATS_READ[0].upper()}{_FORMATS_READ[1:]}")
        else:
            logger.info(text)
    return chosen


_FORMATS_READ = (
    f"files must be of {', '.join(FORMATS)} (but for Parquet and Arrow also "
    f"{', '.join(COMPRESSED)})"
)


def path_problem(path: str) -> str | None:
    """The problem of a file or folder that its name or descriptions show, else None."""
    named = Path(path).expanduser()
    if not named.is_dir():
        known = format_of(named) or named.suffix in (".bin", ".idx")
        return None if known else _unknown(path)
    try:
        names = os.listdir(named)
        if foreign := _foreign(names):
            files = [named / name for name in names]
            if not any(
                file.is_dir()
                or (file.suffix == ".bin" and not _foreign([file.name]))
                or (format_of(file) and not _is_description(file))
                for file in files
            ):
                return f"no documents in {path}{foreign}; {_FORMATS_READ}"
        _saved_splits(named)
        _saved_shards(named)
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None


def _unknown(path: str) -> str:
    return f"{path} has an unknown format{_foreign([os.path.basename(path)])}; {_FORMATS_READ}"


def _foreign(names: Iterable[str]) -> str:
    """`: a.tfrecord is TFRecord, which can't be read`; nothing if all formats are unknown."""
    for name in sorted(names):
        for words, pattern in _FOREIGN.items():
            if pattern.fullmatch(name.lower()):
                return f": {printable(name)} is {words}, which can't be read"
    return ""


def _is_description(file: Path) -> bool:
    name = file.name.lower()
    if name in _DESCRIPTIONS or name.endswith(REPORT):
        return True
    if name == "index.json" and any(map(_LITDATA_OR_MDS.fullmatch, os.listdir(file.parent))):
        return True
    return FORMATS.get(file.suffix.lower()) == "text" and name.startswith(_DESCRIPTION_PREFIXES)


def format_of(file: Path) -> Format | None:
    """The format by a file's name, compressed or not."""
    name = file.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return FORMATS.get(Path(name).suffix)
