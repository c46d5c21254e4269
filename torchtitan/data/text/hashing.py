"""Hashes of texts, and choices by hash: the same for a text wherever and how often it occurs."""

import hashlib

from torchtitan.data.text.texts import Text, parts_of


def hash_text(text: Text) -> tuple[int, int]:
    """A 64-bit hash of a text, and its size in bytes.

    Raises:
        BadDocument: a long text can't be decoded to its end.
    """
    digest = hashlib.blake2b(digest_size=8)
    size = 0
    for part in parts_of(text):
        data = part.encode()
        digest.update(data)
        size += len(data)
    return int.from_bytes(digest.digest(), "little"), size


def uniform(hash: int, purpose: str) -> float:
    """A number in [0, 1) for the text of this hash; independent between purposes.

    Args:
        purpose: at most 16 bytes.
    """
    data = hash.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=6, person=purpose.encode())
    return int.from_bytes(digest.digest(), "little") / 2**48
