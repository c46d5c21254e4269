"""The contents of a data source: a fingerprint for manifests, and the list of files behind it.

A checkpoint keeps the lists of all its sources in one file (`CONTENTS`), so that a resume can name
the file that has changed. Files may move and be renamed as long as their order stays. Imports no
torch.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from torchtitan.data.read.files import FORMATS
from torchtitan.data.read.matching import fixed_folder
from torchtitan.data.read.opening import COMPRESSED, FileStamp, open_data, sample_hash
from torchtitan.utils.formats import Count
from torchtitan.utils.wording import listed, plural, printable

CONTENTS = "data_files.json"
"""Name of the file in a checkpoint."""
_READERS = 8
"""Files that are sampled at a time: over a network, each block takes a round trip."""
_MAX_CHANGES = 6
"""Number of changes that a message names."""

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")]


class DataFile(NamedTuple):
    """A file of a data source. Checkpoints record it as a list of these values."""

    name: Annotated[str, Field(max_length=20_000)]
    """Relative to what the configuration names."""
    size: Count
    sample: Hash
    """`opening.sample_hash` of the contents."""
    full_hash: Hash = ""
    """Hash of all contents, if `torchtitan tokenize` recorded it."""

    def same_as(self, other: "DataFile") -> bool:
        """Whether the other file has the same kind and, by the hashes that both have, contents."""
        comparable = self.full_hash and other.full_hash
        same = (self.size, self.sample) == (other.size, other.sample)
        same = same and (not comparable or self.full_hash == other.full_hash)
        return same and (self.name == other.name or _kind(self.name) == _kind(other.name))


@dataclass(frozen=True)
class Contents:
    """The contents of a source: a fingerprint, and its files if it has any."""

    fingerprint: str
    files: Sequence[DataFile] = ()
    """Empty for streams and registered sources."""

    @classmethod
    def of(cls, files: Sequence[DataFile], reading: str = "") -> "Contents":
        """
        Args:
            reading: options that change the documents of the same files.
        """
        digest = hashlib.blake2b(digest_size=8)
        for file in files:
            digest.update(
                f"{_kind(file.name)} {file.size} {file.sample} {file.full_hash}\n".encode()
            )
        words = f"{plural(len(files), 'file')} with hash {digest.hexdigest()}"
        return cls(f"{words}; {reading}" if reading else words, files)


def _kind(name: str) -> str:
    """The endings of a name that decide how the file is read."""
    kind = ""
    for ending in reversed(name.rpartition("/")[2].lower().split(".")[1:]):
        kind = f".{ending}{kind}"
        if f".{ending}" in FORMATS or f".{ending}" not in COMPRESSED:
            break
    return kind


def data_file(path: str, base: str, size: int, sample: str, full_hash: str = "") -> DataFile:
    """
    Args:
        path: absolute.
        base: the folder that the file's name is relative to.
    """
    name = path.removeprefix(f"{base.rstrip('/')}/")
    if not name.isascii():
        name = os.fsencode(name).decode("utf-8", "backslashreplace")
    return DataFile(name, size, sample, full_hash)


def sample_files(
    stamps: Sequence[FileStamp], base: str | Path, full_hashes: Sequence[str] = ()
) -> list[DataFile]:
    """Sample files.

    Args:
        base: the folder that their names are relative to.
        full_hashes: hashes of all their contents, if there are any.
    """
    folder = os.path.abspath(base)

    def hash_of(stamp: FileStamp) -> str:
        with open_data(stamp.path, stamp) as file:
            return sample_hash(file.fileno())

    with ThreadPoolExecutor(_READERS) as pool:
        samples = list(pool.map(hash_of, stamps))
    hashes = full_hashes or [""] * len(stamps)
    return [
        data_file(s.path, folder, s.size, hash, full_hash=full_hash)
        for s, hash, full_hash in zip(stamps, samples, hashes, strict=True)
    ]


def base_folder(path: str | Sequence[str]) -> str:
    """The folder that the names of the files of `path` are relative to."""
    folders = []
    for name in [path] if isinstance(path, str) else path:
        folders.append(fixed_folder(os.path.abspath(name)))
    return os.path.commonpath(folders)


def changes(old: Sequence[DataFile], new: Sequence[DataFile]) -> list[str]:
    """The changes of files in words; empty if the same contents are read in the same order."""
    if len(old) == len(new) and all(map(DataFile.same_as, old, new)):
        return []
    before = {file.name: file for file in old}
    now = {file.name: file for file in new}
    names = {(file.size, file.sample): file.name for file in old}
    differences = [_change(before[name], now[name], names) for name in before.keys() & now.keys()]
    old_names = {file.name for file in old} - now.keys()
    for file in new:
        if file.name not in before:
            name = names.get((file.size, file.sample))
            if name in old_names:
                old_names.remove(name)
                differences.append(
                    f"{name} is now called {file.name}, and files are read in the order "
                    "of their names"
                )
            else:
                differences.append(f"{file.name} is new")
    differences += [f"{name} is missing" for name in old_names]
    differences = sorted(words for words in differences if words) or [
        "the files are in another order"
    ]
    return [printable(words) for words in differences]


def _change(before: DataFile, now: DataFile, names: Mapping[tuple[int, str], str]) -> str:
    if now.same_as(before):
        return ""
    other = names.get((now.size, now.sample), now.name)
    if other != now.name:
        return f"{now.name} has the contents that {other} had"
    if now.size != before.size:
        return f"{now.name} has {now.size:,} bytes instead of {before.size:,}"
    return f"{now.name} has other contents of the same size"


def in_words(differences: Sequence[str]) -> str:
    """Changes in one line."""
    more = (
        f", and {plural(len(differences) - _MAX_CHANGES, 'other change')}"
        if len(differences) > _MAX_CHANGES
        else ""
    )
    return listed(differences[:_MAX_CHANGES]) + more


FileLists = Mapping[str, Mapping[str, Sequence[DataFile]]]
"""The files of each source, by section and name: `lists["training"]["books"]`."""

_LISTS = TypeAdapter(
    dict[str, dict[str, list[DataFile]]], config={"strict": True, "hide_input_in_errors": True}
)


def render_lists(lists: FileLists) -> bytes:
    """The file for a checkpoint."""
    content = {
        section: {name: [_short(file) for file in files] for name, files in sources.items()}
        for section, sources in lists.items()
    }
    return json.dumps(content, separators=(",", ":")).encode()


def _short(file: DataFile) -> Iterable[object]:
    return file if file.full_hash else file[:3]


def parse_lists(content: bytes) -> FileLists:
    """
    Raises:
        ValueError: it isn't from `render_lists`.
    """
    return _LISTS.validate_json(content)
