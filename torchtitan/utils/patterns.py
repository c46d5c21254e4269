"""Files that match a pattern, found with a limit."""

import fnmatch
import os
import re
from collections.abc import Callable, Iterator


class TooManyEntriesError(Exception):
    """A pattern makes too many folders be searched, perhaps in a circle of links."""


def matching_files(pattern: str, most: int) -> Iterator[str]:
    """The files that a pattern matches, by the rules of `glob.glob(pattern, recursive=True)`, in no order.

    Links that lead nowhere, pipes and devices are among them: whoever opens them says what is wrong.

    Args:
        most: entries of folders to look at.

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
                        raise TooManyEntriesError(f"{pattern!r} searches more than {most:,} files and folders")
                    if fnmatch.fnmatch(entry.name, names) and (names.startswith(".") or not entry.name.startswith(".")):
                        yield entry
        except OSError:  # as glob: what can't be read matches nothing
            return

    parts = [part for part in re.sub(r"(\*\*/)+", "**/", pattern).split("/") if part]
    todo = [("/" if pattern.startswith("/") else "", [*parts, "*"] if parts[-1] == "**" else parts)]
    while todo:
        folder, (part, *rest) = todo.pop()
        if part == "**":
            todo += [(entry.path, [part, *rest]) for entry in entries(folder, "*") if _is(entry.is_dir)]
            todo.append((folder, rest))
        elif not _is_pattern(part):
            path = os.path.join(folder, part)
            todo += [(path, rest)] if rest else []
            yield from [path] if not rest and _is_no_folder(path) else []
        elif rest:
            todo += [(entry.path, rest) for entry in entries(folder, part) if _is(entry.is_dir)]
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
