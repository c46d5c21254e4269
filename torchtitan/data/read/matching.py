"""Finds the files that a folder or a glob names, each under one name."""

import glob
import heapq
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence


def fixed_folder(path: str) -> str:
    """The folder `path`, or the part of a pattern before its first wildcard."""
    if os.path.isdir(path):
        return path
    fixed = itertools.takewhile(lambda name: not glob.has_magic(name), path.split("/")[:-1])
    return "/".join(fixed) or ("/" if path.startswith("/") else "")


class TooManyFilesError(Exception):
    """Too many files and folders would have to be searched."""


def matching_files(path: str, most: int, loops: list[str]) -> Iterator[str]:
    """The files below the folder `path`, or the files that match it as a pattern, in no order.

    The rules are as in `glob.glob(path, recursive=True)`, except that `**` finds each folder once,
    whatever links lead to it. Links that lead nowhere, pipes and devices are among the files:
    opening them raises the error.

    Args:
        most: number of files and folders to look at.
        loops: collects the links to folders that were searched already.

    Raises:
        TooManyFilesError: there are more.
    """
    budget = most

    def look_at(count: int) -> None:
        nonlocal budget
        budget -= count
        if budget < 0:
            raise TooManyFilesError(f"{path!r} searches more than {most:,} files and folders")

    def matching(folder: str, patterns: Sequence[str]) -> Iterator[str]:
        pattern, *below_it = patterns
        if pattern == "**":
            for below, files in _folders_below(folder, loops):
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


def _folders_below(folder: str, loops: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A folder and its subfolders, except hidden ones, each once and with the names of its files.

    Links come last, so that a folder is found under its own name.
    """
    links = [folder]
    seen = set()
    while links:
        for path, folders, files in os.walk(heapq.heappop(links) or "."):
            status = os.stat(path)
            key = (status.st_dev, status.st_ino)
            if key in seen and status.st_ino:  # 0: the file system doesn't number its files
                loops.append(path)
                folders.clear()
                continue
            seen.add(key)
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in folders:
                inner = os.path.join(path, name)
                if os.path.islink(inner):
                    heapq.heappush(links, inner)
            yield path, files


def without_aliases(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Each file under one name, and its other names, both sorted.

    A file's own name precedes the names of links; hard links are files.
    """
    folders: dict[str, str] = {}
    names: dict[str, str] = {}
    aliases = []
    for file in sorted(set(files)):
        folder, name = os.path.split(file)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        resolved = os.path.join(folders[folder], name)
        target = os.path.realpath(resolved) if os.path.islink(resolved) else resolved
        if target not in names:
            names[target] = file
        elif target == os.path.abspath(file):
            aliases.append(names[target])
            names[target] = file
        else:
            aliases.append(file)
    return sorted(names.values()), sorted(aliases)
