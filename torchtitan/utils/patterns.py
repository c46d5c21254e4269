"""Files in folders or that match a pattern: found with a limit, and only once, whatever links lead
to them.
"""

import fnmatch
import heapq
import os
import re
from collections.abc import Callable, Iterable, Iterator


class TooManyEntriesError(Exception):
    """Too many files and folders would have to be searched."""


class _Folders:
    """The folders still to search, each once. Links come last, so that a folder is found under its
    own name.
    """

    def __init__(self, skipped: list[str]):
        """
        Args:
            skipped: takes the links to folders that were searched already.
        """
        self._folders: list[tuple[str, list[str]]] = []
        self._links: list[tuple[str, list[str]]] = []
        self._seen: set[tuple[int, int, int]] = set()
        self._skipped = skipped

    def add(self, path: str, rest: list[str]) -> None:
        """
        Args:
            rest: the parts of a pattern that remain to be matched below the folder.
        """
        if os.path.islink(path):
            heapq.heappush(self._links, (path, rest))
        else:
            self._folders.append((path, rest))

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        while self._folders or self._links:
            path, rest = self._folders.pop() if self._folders else heapq.heappop(self._links)
            try:
                status = os.stat(path or ".")
            except OSError:
                continue
            key = (status.st_dev, status.st_ino, len(rest))
            if key in self._seen and status.st_ino:  # 0: the file system doesn't number its files
                self._skipped.append(path)
                continue
            self._seen.add(key)
            yield path, rest


def files_below(folder: str, most: int, skipped: list[str]) -> list[str]:
    """Files in a folder and its subfolders, except hidden ones, in no order.

    Args:
        most: entries of folders to look at.
        skipped: takes the links to folders that were searched already.

    Raises:
        TooManyEntriesError: there are more.
    """
    files = []
    seen = 0
    folders = _Folders(skipped)
    folders.add(folder, [])
    for parent, _ in folders:
        try:
            entries = list(os.scandir(parent))
        except OSError:  # as glob: what can't be read holds nothing
            continue
        seen += len(entries)
        if seen > most:
            raise TooManyEntriesError(f"{folder} holds more than {most:,} files and folders")
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is(entry.is_dir):
                folders.add(entry.path, [])
            else:
                files.append(entry.path)
    return files


def without_aliases(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Each file under one name, and the other names. A file's own name precedes those of links;
    hard links are files.

    Returns:
        The files and the names left out, both sorted.
    """
    folders: dict[str, str] = {}
    names: dict[str, str] = {}
    again = []
    for file in sorted(set(files)):
        folder, name = os.path.split(file)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        own = os.path.join(folders[folder], name)
        target = os.path.realpath(own) if os.path.islink(own) else own
        if target not in names:
            names[target] = file
        elif target == os.path.abspath(file):
            again.append(names[target])
            names[target] = file
        else:
            again.append(file)
    return sorted(names.values()), sorted(again)


def matching_files(pattern: str, most: int, skipped: list[str]) -> Iterator[str]:
    """The files that a pattern matches, by the rules of `glob.glob(pattern, recursive=True)`, in no
    order.

    Links that lead nowhere, pipes and devices are among them: whoever opens them says what is
    wrong.

    Args:
        most: entries of folders to look at.
        skipped: takes the links to folders that were searched already.

    Raises:
        TooManyEntriesError: there are more.
    """
    if not _is_pattern(pattern):
        yield from [pattern] if _is_no_folder(pattern) else []
        return
    seen = 0

    def entries(folder: str, names: str) -> Iterator[os.DirEntry[str]]:
        nonlocal seen
        try:
            with os.scandir(folder or ".") as found:
                for entry in found:
                    seen += 1
                    if seen > most:
                        raise TooManyEntriesError(
                            f"{pattern!r} searches more than {most:,} files and folders"
                        )
                    if fnmatch.fnmatch(entry.name, names) and (
                        names.startswith(".") or not entry.name.startswith(".")
                    ):
                        yield entry
        except OSError:  # as glob: what can't be read matches nothing
            return

    parts = [part for part in re.sub(r"(\*\*/)+", "**/", pattern).split("/") if part]
    todo = _Folders(skipped)
    todo.add("/" if pattern.startswith("/") else "", [*parts, "*"] if parts[-1] == "**" else parts)
    for folder, (part, *rest) in todo:
        if part == "**":
            for entry in entries(folder, "*"):
                if _is(entry.is_dir):
                    todo.add(entry.path, [part, *rest])
            todo.add(folder, rest)
        elif not _is_pattern(part):
            path = os.path.join(folder, part)
            if rest:
                todo.add(path, rest)
            elif _is_no_folder(path):
                yield path
        elif rest:
            for entry in entries(folder, part):
                if _is(entry.is_dir):
                    todo.add(entry.path, rest)
        else:
            yield from (entry.path for entry in entries(folder, part) if not _is(entry.is_dir))


def _is_pattern(name: str) -> bool:
    return re.search(r"[*?[]", name) is not None


def _is_no_folder(path: str) -> bool:
    """Whether there is something else by this name, even if only a link."""
    return os.path.lexists(path) and not os.path.isdir(path)


def _is(test: Callable[[], bool]) -> bool:
    """The answer of a `DirEntry`; False for links that lead nowhere or in a circle."""
    try:
        return test()
    except OSError:
        return False
