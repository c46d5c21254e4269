"""The files that a path names, each once and with its role: `scan`, and filters of it."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from torchtitan.data.read.matching import (
    TooManyFilesError,
    fixed_folder,
    matching_files,
    without_aliases,
)
from torchtitan.data.read.opening import COMPRESSED, DataError, data_errors
from torchtitan.data.read.output_folders import OutputFolders
from torchtitan.data.read.saved_sets import (
    SPLITS_FILE,
    STATE_FILE,
    saved_shards,
    saved_splits,
    without_leftovers,
)
from torchtitan.utils.errors import UserError
from torchtitan.utils.limits import SEARCHED_FILES
from torchtitan.utils.logging import logger
from torchtitan.utils.wording import listed, plural, printable

Role = Literal["documents", "tokens", "description", "written", "foreign"]
"""The role of a file, by its name and its neighbors. Descriptions hold no documents, and neither do
files that runs and tools wrote.
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
_CODE = re.compile(
    r"\.(py|pyi|c|h|cc|cpp|hpp|cu|cuh|rs|go|java|kt|scala|swift|jsx?|tsx?|rb|php|pl|lua|jl|r|hs|ml"
    r"|sh|sql|html?|css|xml|ya?ml|toml|ini|tex|bib|rst|org|log)"
)
"""Endings of other texts, read only where a path or a glob's ending names them."""
_DESCRIPTION_NAMES = re.compile(
    "readme|license|licence|copying|notice|changelog|citation|contributing|security"
)
"""Beginnings of the names of text files that describe their folder and hold no documents."""
REPORT = "-report.json"
"""Ending of the report that `torchtitan tokenize` writes beside token files."""
_VALIDATION = re.compile(r"(.*[_-])?val([_-]\d+)?\.bin")
_FOREIGN = {
    "MosaicML's MDS": re.compile(r".*\.mds(\..+)?"),
    "litdata": re.compile(r"chunk-\d+-\d+(\..+)?\.bin"),
    "WebDataset, or another tar archive": re.compile(r".*\.(tar(\..+)?|tgz)"),
    "TFRecord": re.compile(r".*\.(tfrecords?|array_record)(-.+|\..+)?"),
    "NumPy arrays": re.compile(r".*\.np[yz]"),
    "SQLite, or another database": re.compile(r".*\.(sqlite3?|db|lmdb|mdb)"),
}
"""Names of files of formats that can't be read."""
_MAX_NAMES = 6
"""Maximum number of files and folders that a message names."""
_ENDINGS = 8
"""Maximum number of endings by which ignored files are counted."""
_DESCRIPTIONS = {"dataset_infos.json", "dataset_info.json", "croissant.json"}
_DESCRIPTIONS |= {STATE_FILE, SPLITS_FILE}


@dataclass
class Ignored:
    """Files that lie in a folder, or match a glob, and aren't read."""

    files: list[Path] = field(default_factory=list)
    """Files of unknown format, and descriptions."""
    outputs: dict[Path, str] = field(default_factory=dict)
    """Folders of runs, checkpoints and models, or files in them, and the kind of each."""

    def in_words(self) -> str:
        """`; ignoring 143 files without documents (96 .gz, 47 without an ending): a.gz, ...`;
        nothing if nothing is ignored.
        """
        text = ""
        if self.files:
            kinds = ", ".join(f"{number:,} {ending}" for ending, number in self._endings().items())
            names = listed(sorted({printable(file.name) for file in self.files}), _MAX_NAMES)
            count = plural(len(self.files), "file")
            text += f"; ignoring {count} without documents ({kinds}): {names}"
            texts = {_ending(file.name) for file in self.files if format_of(file) == "text"}
            if texts:
                globs = listed((f"'*{ending}'" for ending in sorted(texts)), _MAX_NAMES)
                text += f"; a glob reads those that are text: {globs}"
        if self.outputs:
            text += f"; leaving out {outputs_in_words(self.outputs)}"
        return text

    def _endings(self) -> dict[str, int]:
        counts = Counter(
            printable(file.suffix.lower()) or "without an ending" for file in self.files
        )
        common = counts.most_common(_ENDINGS)
        if others := counts.total() - sum(number for _, number in common):
            common.append(("others", others))
        return dict(common)


def outputs_in_words(outputs: Mapping[Path, str]) -> str:
    """`outputs (run), exported (model or tokenizer)`."""
    return listed(
        (printable(f"{path} ({kind})") for path, kind in sorted(outputs.items())), _MAX_NAMES
    )


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
    """Links to files that have another name."""
    outputs: Mapping[Path, str]
    """Folders and files that runs wrote, and the kind of each."""

    def files(self, *roles: Role) -> list[Path]:
        """The files that have one of these roles."""
        return [file for file, role in self.entries if role in roles]

    def log(self, key: str) -> None:
        if self.links:
            logger.info(
                f"{key}: skipping {plural(len(self.links), 'link')} to what is read under another "
                f"name: {listed(self.links, _MAX_NAMES)}"
            )
        if self.outputs:
            logger.info(f"{key}: leaving out {outputs_in_words(self.outputs)}: never data")

    def no_data_error(self, key: str) -> UserError:
        """The error about a path that names no data."""
        only = f"; {outputs_in_words(self.outputs)} is no data" if self.outputs else ""
        return UserError(
            f"{key}: no file matches {self.path!r} (looked for {', '.join(FORMATS)} and .bin "
            f"token files){only}"
        )


def scan(path: str, key: str) -> Scan:
    """The file that `path` names, the files in a folder, except hidden ones, or the files that a
    pattern matches.

    Raises:
        UserError: too many files would have to be searched.
    """
    loops: list[str] = []
    matches = matching_files(path, SEARCHED_FILES, loops)
    try:
        names, aliases = without_aliases(matches)
    except TooManyFilesError as error:
        raise UserError(f"{key}: {error}; name a folder closer to the files") from None
    files = sorted(map(Path, names))
    links = sorted({*loops, *aliases})
    ending = "" if os.path.isdir(path) else _ending(path)
    by_name = ending != "" and not glob.has_magic(ending)
    if os.path.isfile(path):
        return Scan(path, _with_roles(files, files, by_name), links, {})
    folders = OutputFolders(Path(fixed_folder(path)))
    entries = _with_roles(files, folders.without(files), by_name)
    return Scan(path, entries, links, folders.outputs)


def _with_roles(
    files: Sequence[Path], unwritten: Sequence[Path], by_name: bool = False
) -> list[Entry]:
    """
    Args:
        by_name: the files are named by their ending, so all that is text is read.
    """
    outputs = set(files).difference(unwritten)
    outputs |= {file.with_suffix(".json") for file in unwritten if file.suffix == ".bin"}
    return [Entry(file, "written" if file in outputs else _role(file, by_name)) for file in files]


def _role(file: Path, by_name: bool) -> Role:
    if file.suffix == ".bin":
        return "tokens"
    kind = format_of(file)
    if kind == "text" and by_name:
        return "documents"
    if kind is None or _CODE.fullmatch(_ending(file.name)):
        return "foreign"
    return "description" if _is_description(file) else "documents"


def find_token_files(path: str, key: str) -> list[Path]:
    """The token files that `path` names: a `.bin` file, a glob, or a folder that holds some, at any
    depth.

    A Megatron pair may also be named by its `.idx` file.

    Returns:
        An empty list if `path` names documents or doesn't exist.
    """
    is_folder = os.path.isdir(path)
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
    if Path(path) not in {file.parent for file in tokens}:  # below it may lie other binary files
        tokens = {
            file for file in tokens if {file.with_suffix(".json"), file.with_suffix(".idx")} & files
        }
    tokens -= _validation_files(tokens, key)
    if tokens:
        result.log(key)
    if tokens and (texts := result.files("documents")):
        names = listed(sorted(file.name for file in texts), 6)
        logger.warning(
            f"{key}: reading {plural(len(tokens), 'token file')} of {path}, and not what lies "
            f"beside: {names}. To read that, name it by itself, or as another source"
        )
    return sorted(tokens)


def is_undescribed(file: Path) -> bool:
    """Whether neither a JSON description nor Megatron's index lies beside a token file."""
    return not (file.with_suffix(".json").exists() or file.with_suffix(".idx").exists())


def _validation_files(tokens: Set[Path], key: str) -> set[Path]:
    """The files that llm.c and nanoGPT name as validation sets, if others are for training."""
    bare_files = {file for file in tokens if is_undescribed(file)}
    validation = {file for file in bare_files if _VALIDATION.fullmatch(file.name)}
    if not validation or validation == bare_files:
        return set()
    names = listed(sorted(file.name for file in validation), _MAX_NAMES)
    logger.info(
        f"{key}: leaving out {names}, by name for validation; name it as validation.dataset_path"
    )
    return validation


def find_text_files(
    path: str | Sequence[str], key: str, ignored: Ignored | None = None
) -> list[Path]:
    """The files of documents that `path` names: a file, folder or glob, or several; sorted within
    each.

    Args:
        ignored: collects the files beside them.

    Raises:
        UserError: there are none, or a file that is named by itself has an unknown format.
    """
    ignored = Ignored() if ignored is None else ignored
    paths = [path] if isinstance(path, str) else path
    documents: list[Path] = []
    for name in paths:
        result = scan(name, key)
        files = result.files("documents", "tokens", "description", "foreign")
        is_file = os.path.isfile(name)
        if not is_file and any(f.suffix == ".arrow" or f.name == SPLITS_FILE for f in files):
            with data_errors(key):
                files = without_leftovers(files, os.path.isdir(name), key)
        result.log(key)
        ignored.outputs |= result.outputs
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
    """A problem that the name or the descriptions of a file or folder show; None without one."""
    target = Path(path)
    if not target.is_dir():
        is_readable = format_of(target) or target.suffix in (".bin", ".idx")
        return None if is_readable else _unknown(path)
    try:
        files = sorted(target.iterdir())
        if not files:
            return f"{path} is empty"
        if foreign := _foreign(file.name for file in files):
            readable = (
                role == "documents" or (role == "tokens" and not _foreign([file.name]))
                for file, role in _with_roles(files, files)
            )
            if not (any(readable) or any(map(Path.is_dir, files))):
                return f"no documents in {path}{foreign}; {_FORMATS_READ}"
        saved_splits(target)
        saved_shards(target)
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None


def _unknown(path: str) -> str:
    return f"{path} has an unknown format{_foreign([os.path.basename(path)])}; {_FORMATS_READ}"


def _foreign(names: Iterable[str]) -> str:
    """`: a.tfrecord is TFRecord, which can't be read`; empty if all formats are unknown."""
    for name in sorted(names):
        for words, pattern in _FOREIGN.items():
            if pattern.fullmatch(name.lower()):
                return f": {printable(name)} is {words}, which can't be read"
    return ""


def _is_description(file: Path) -> bool:
    name = file.name.lower()
    if name in _DESCRIPTIONS or name.endswith(REPORT):
        return True
    if name == "index.json" and _foreign(os.listdir(file.parent)):
        return True
    is_text = FORMATS.get(file.suffix.lower()) == "text"
    return is_text and _DESCRIPTION_NAMES.match(name) is not None


def format_of(file: Path) -> Format | None:
    """The format by a file's name, compressed or not."""
    ending = _ending(file.name)
    return "text" if _CODE.fullmatch(ending) else FORMATS.get(ending)


def _ending(path: str) -> str:
    """The last ending of a name or pattern, without compression."""
    path = path.lower()
    for ending in COMPRESSED:
        path = path.removesuffix(ending)
    return Path(path).suffix
