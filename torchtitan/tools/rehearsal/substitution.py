"""Replacing functions of torch, and the few of this project without an argument for it, while a
rank is simulated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_ABSENT = object()


class Substitution(NamedTuple):
    """An attribute of a module, class or object, and what it is while a rank is simulated."""

    owner: Any
    name: str
    replacement: Any


@contextmanager
def substituted(*substitutions: Substitution) -> Iterator[None]:
    """Make substitutions inside the context, and take them back after it, the last one first."""
    originals = []
    try:
        for owner, name, replacement in substitutions:
            originals.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is _ABSENT:  # inherited, or nothing had this name
                delattr(owner, name)
            else:
                setattr(owner, name, original)
