"""Hashes of files' contents that cost little: of a large file, of samples at fixed places.

They tell whether a file that has moved, or got other times, is still the same.
"""

import hashlib
import os

_BLOCK = 2**14
_BLOCKS = 16
WHOLE = _BLOCK * _BLOCKS
"""Bytes of the largest file whose sample is the whole file, and that are read of a larger one."""
_READ = 2**20


def sample(handle: int) -> str:
    """A hash of the size and contents of an open file; of a large one, of 16 blocks from its
    beginning to its end.
    """
    size = os.fstat(handle).st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    if size <= WHOLE:
        _add(digest, handle, 0, size)
    else:
        for i in range(_BLOCKS):
            _add(digest, handle, (size - _BLOCK) * i // (_BLOCKS - 1), _BLOCK)
    return digest.hexdigest()


def whole(handle: int) -> str:
    """A hash of all bytes of an open file."""
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, handle, 0, os.fstat(handle).st_size)
    return digest.hexdigest()


def _add(
    digest: "hashlib.blake2b",
    handle: int,
    start: int,
    size: int,
) -> None:
    end = start + size
    while start < end:
        part = os.pread(handle, min(_READ, end - start), start)
        if not part:  # cut in the meantime
            return
        digest.update(part)
        start += len(part)
