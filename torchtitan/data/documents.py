"""Documents that can be read in any order: the demo text and local files."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torchtitan.data.retry import DataError, first_line
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.patterns import TooManyEntriesError, matching_files

FORMATS = {".jsonl": "json", ".json": "json", ".txt": "text", ".md": "text", ".parquet": "parquet"}
_MOST_ENTRIES = 1_000_000
"""Files and folders that a pattern may search. They take some seconds."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")

# Tests differ between distributions, and tables of encodings are not text.
_NOT_DEMO = {"test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip", "turtledemo", "__pycache__"}
_HELD_OUT_EVERY = 20


class Documents(Protocol):
    """A fixed collection of texts."""

    fingerprint: str
    """Changes when the texts do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...


class DemoDocuments:
    """The source files of Python's standard library: real text on every machine, without a download.

    Every 20th file is held out, for `demo_validation`.
    """

    def __init__(self, validation: bool):
        root = Path(sysconfig.get_paths()["stdlib"])
        files = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(d for d in subfolders if d not in _NOT_DEMO and not d.endswith("-packages"))
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        files.sort(key=lambda path: path.relative_to(root).as_posix())
        self.files = [f for i, f in enumerate(files) if (i % _HELD_OUT_EVERY == 0) == validation]
        listing = "".join(f"{f.relative_to(root)}:{f.stat().st_size};" for f in self.files)
        self.fingerprint = hashlib.sha256(listing.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        return self.files[index].read_text(encoding="utf-8", errors="replace")


class LocalDocuments:
    """JSONL, text or Parquet files, memory-mapped by the `datasets` library, which indexes them once per node.

    A text file is one document; other formats hold one per line or row, in the column `text`.
    """

    def __init__(self, path: str | Sequence[str], key: str):
        self.files = find_files(path, key)
        kinds = {_format(file) for file in self.files}
        if len(kinds) != 1 or None in kinds:
            names = ", ".join(sorted({file.name for file in self.files})[:3])
            raise UserError(
                f"{key}: files must all have the same format, one of {', '.join(FORMATS)} (also .gz, .zst); got {names}"
            )
        self.table = self._load(str(kinds.pop()), self.files, key)
        columns = self.table.column_names
        if "text" not in columns:
            raise UserError(f"{key}: no column 'text' in {path}; it has {', '.join(columns)}. Rename one to 'text'")
        kind = getattr(self.table.features["text"], "dtype", "nested values")
        if kind not in ("string", "large_string"):
            raise UserError(f"{key}: column 'text' in {path} holds {kind}, not text")
        listing = "".join(f"{file.name}:{file.stat().st_size};" for file in self.files)
        self.fingerprint = hashlib.sha256(listing.encode()).hexdigest()[:16]

    @staticmethod
    def _load(kind: str, files: Sequence[Path], key: str) -> Any:
        datasets = import_datasets()
        options = {"sample_by": "document"} if kind == "text" else {}
        try:
            return datasets.load_dataset(kind, data_files=[str(f) for f in files], split="train", **options)
        except Exception as error:
            if len(files) > 1:  # name the one that fails
                for file in files:
                    LocalDocuments._load(kind, [file], key)
                why = first_line(_innermost(error))
                raise UserError(f"{key}: the files don't all have the same columns: {why}") from error
            if files[0].stat().st_size == 0 or "EmptyDataset" in type(error).__name__:
                raise UserError(f"{key}: {files[0]} is empty") from None
            cause = _innermost(error)
            if isinstance(cause, DataError):
                raise UserError(f"{key}: {cause}") from None
            raise UserError(f"{key}: can't read {files[0]} (damaged or truncated?): {first_line(cause)}") from error

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> str:
        return self.table[index]["text"] or ""


def find_files(path: str | Sequence[str], key: str) -> list[Path]:
    """The files that `path` names: a file, folder or glob, or several of them. Sorted within each.

    Raises:
        UserError: there are none.
    """
    if not isinstance(path, str):
        return [file for one in path for file in find_files(one, key)]
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        found = [p for p in sorted(Path(expanded).rglob("*")) if p.is_file() and _format(p)]
    else:
        try:
            found = [Path(p) for p in sorted(set(matching_files(expanded, _MOST_ENTRIES)))]
        except TooManyEntriesError as error:
            raise UserError(f"{key}: {error}; name a folder closer to the files") from None
    if not found:
        raise UserError(f"{key}: no file matches {path!r} (looked for {', '.join(FORMATS)} and .bin token files)")
    return found


def _format(file: Path) -> str | None:
    name = file.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return FORMATS.get(Path(name).suffix)


def import_datasets() -> Any:
    """The library `datasets`, quiet, and reading JSON by `json_texts`. Its import takes seconds."""
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    reader = Path(__file__).with_name("json_texts.py")
    version = hashlib.sha256(reader.read_bytes()).hexdigest()  # names its folder in the library's cache
    _PACKAGED_DATASETS_MODULES["json"] = (f"{__package__}.{reader.stem}", version)
    return datasets


def _innermost(error: BaseException) -> BaseException:
    while (inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = inner
    return error


def open_documents(dataset: str, dataset_path: str | None, section: str) -> Documents | None:
    """Open the local files or demo text that the configuration names; None if it names a stream.

    Raises:
        UserError: files are missing, damaged, empty, or of an unknown format.
    """
    documents: Documents
    if dataset_path is not None:
        documents = LocalDocuments(dataset_path, f"{section}.dataset_path")
    elif dataset in ("demo", "c4_test", "demo_validation"):
        if dataset == "c4_test":
            logger.info(f'{section}.dataset: "c4_test" is an alias of "demo": the source of Python\'s standard library')
        documents = DemoDocuments(validation=dataset == "demo_validation")
    else:
        return None
    check_has_text(documents, f"{section}.dataset_path", dataset_path or dataset)
    return documents


def check_has_text(documents: Documents, key: str, name: str) -> None:
    """
    Raises:
        UserError: there are no documents, or all are empty; training would only see begin-of-text and end-of-text.
    """
    if len(documents) == 0:
        raise UserError(f"{key}: {name} holds no documents")
    if not any(documents[i] for i in range(len(documents))):  # seldom reads more than one
        raise UserError(f"{key}: {name} holds no text: all its documents are empty ({len(documents):,} of them)")
