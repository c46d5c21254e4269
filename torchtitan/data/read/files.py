"""The files that a path names, and what each of them is: `scan`, and filters of it."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchtitan.data.read.matching import (
    TooManyFilesError,
    fixed_folder,
    matching_files,
    without_aliases,
)
from torchtitan.data.read.opening import COMPRESSED, DataError
from torchtitan.data.read.saved_sets import (
    SPLITS_FILE,
    STATE_FILE,
    saved_shards,
    saved_splits,
    without_leftovers,
)
from torchtitan.data.read.written_folders import WrittenFolders
from torchtitan.utils.errors import UserError
from torchtitan.utils.limits import SEARCHED_FILES
from torchtitan.utils.logging import logger
from torchtitan.utils.wording import listed, plural, printable

Role = Literal["documents", "tokens", "description", "written", "foreign"]
"""What a file is by its name and its neighbors: a description holds no documents, and neither does
what runs and tools wrote.
"""
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
    STATE_FILE,
    SPLITS_FILE,
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


class Entry(NamedTuple):
    """A file of a scan."""

    file: Path
    role: Role


@dataclass
class Scan:
    """The files that a path names, each once, sorted."""

    path: str
    entries: list[Entry]
    links: list[str]
    """Links to what has another name."""
    written: Mapping[Path, str]
    """Folders or files that runs wrote, and which they are."""

    def files(self, *roles: Role) -> list[Path]:
        """The files that have one of these roles."""
        return [file for file, role in self.entries if role in roles]

    def log(self, key: str) -> None:
        if self.links:
            logger.info(
                f"{key}: skipping {plural(len(self.links), 'link')} to what is read under another "
                f"name: {listed(self.links, _NAMED)}"
            )
        if self.written:
            logger.info(f"{key}: leaving out {written_in_words(self.written)}: never data")

    def no_data_error(self, key: str) -> UserError:
        """The error about a path that names no data."""
        only = f"; {written_in_words(self.written)} is no data" if self.written else ""
        return UserError(
            f"{key}: no file matches {self.path!r} (looked for {', '.join(FORMATS)} and .bin "
            f"token files){only}"
        )


def scan(path: str, key: str) -> Scan:
    """The file that `path` names; or the files in a folder, except hidden ones; or those that a
    pattern matches.

    Raises:
        UserError: too many files would have to be searched.
    """
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
        return Scan(path, _with_roles(files, files), links, {})
    folders = WrittenFolders(Path(fixed_folder(expanded)))
    return Scan(path, _with_roles(files, folders.without(files)), links, folders.left_out)


def _with_roles(files: Sequence[Path], unwritten: Sequence[Path]) -> list[Entry]:
    written = set(files).difference(unwritten)
    written |= {file.with_suffix(".json") for file in unwritten if file.suffix == ".bin"}
    return [Entry(file, "written" if file in written else _role(file)) for file in files]


def _role(file: Path) -> Role:
    if file.suffix == ".bin":
        return "tokens"
    if not format_of(file):
        return "foreign"
    return "description" if _is_description(file) else "documents"


def find_token_files(path: str, key: str) -> list[Path]:
    """The token files that `path` names: a `.bin` file, a glob of them, or a folder that holds
    some, at any depth.

    A Megatron pair may also be named by its `.idx` file.

    Returns:
        An empty list if `path` names documents or doesn't exist.
    """
    folder = os.path.expanduser(path)
    is_folder = os.path.isdir(folder)
    if not is_folder and path.endswith(".idx"):
        path = path.removesuffix(".idx") + ".bin"
    if not is_folder and not path.endswith(".bin"):
        return []
    result = scan(path, key)
    tokens = set(result.files("tokens"))
    if not is_folder:
        result.log(key)
        if not tokens:
            raise result.no_data_error(key)
        return sorted(tokens)
    files = {file for file, _ in result.entries}
    if Path(folder) not in {file.parent for file in tokens}:  # below it may lie other binary files
        tokens = {
            file for file in tokens if {file.with_suffix(".json"), file.with_suffix(".idx")} & files
        }
    tokens -= _held_out(tokens, key)
    if tokens:
        result.log(key)
    if tokens and (beside := result.files("documents")):
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


def find_text_files(
    path: str | Sequence[str], key: str, ignored: Ignored | None = None
) -> list[Path]:
    """The files of documents that `path` names: a file, folder or glob, or several of them. Sorted
    within each.

    Args:
        ignored: collects what lies beside them.

    Raises:
        UserError: there are none, or a file that is named by itself has an unknown format.
    """
    ignored = Ignored() if ignored is None else ignored
    paths = [path] if isinstance(path, str) else path
    documents: list[Path] = []
    for name in paths:
        result = scan(name, key)
        files = result.files("documents", "tokens", "description", "foreign")
        expanded = os.path.expanduser(name)
        is_file = os.path.isfile(expanded)
        if not is_file and any(f.suffix == ".arrow" or f.name == SPLITS_FILE for f in files):
            try:
                files = without_leftovers(files, os.path.isdir(expanded), key)
            except DataError as error:
                raise UserError(f"{key}: {error}") from None
        result.log(key)
        ignored.written |= result.written
        if not files:
            raise result.no_data_error(key)
        if is_file and format_of(files[0]) is None:
            raise UserError(f"{key}: {_unknown(name)}")
        readable = set(files if is_file else result.files("documents"))
        documents += [file for file in files if file in readable]
        ignored.files += [file for file in files if file not in readable]
    if not documents:
        foreign = _foreign(file.name for file in ignored.files)
        raise UserError(
            f"{key}: no documents in {listed(paths)}{ignored.in_words()}{foreign}; {_FORMATS_READ}"
        )
    if ignored.files:
        text = f"{key}: reading {plural(len(documents), 'file')}{Ignored(ignored.files).in_words()}"
        unknown = sum(not format_of(file) for file in ignored.files)
        if unknown > len(documents):
            logger.warning(f"{text}. {_FORMATS_READ[0].upper()}{_FORMATS_READ[1:]}")
        else:
            logger.info(text)
    return documents


_FORMATS_READ = (
    f"files must be of {', '.join(FORMATS)} (but for Parquet and Arrow also "
    f"{', '.join(COMPRESSED)})"
)


def path_problem(path: str) -> str | None:
    """The problem of a file or folder that its name or descriptions show, else None."""
    named = Path(path).expanduser()
    if not named.is_dir():
        is_known = format_of(named) or named.suffix in (".bin", ".idx")
        return None if is_known else _unknown(path)
    try:
        files = sorted(named.iterdir())
        if foreign := _foreign(file.name for file in files):
            readable = (
                role == "documents" or (role == "tokens" and not _foreign([file.name]))
                for file, role in _with_roles(files, files)
            )
            if not (any(readable) or any(map(Path.is_dir, files))):
                return f"no documents in {path}{foreign}; {_FORMATS_READ}"
        saved_splits(named)
        saved_shards(named)
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
