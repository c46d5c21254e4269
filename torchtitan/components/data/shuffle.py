"""A shuffle without a table: the order of an epoch as a function, evaluated where it is needed."""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """splitmix64's finalizer (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (x + np.uint64(key)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """Where position `index` of epoch `epoch` lies in a data set of `size` items: a bijection of `[0, size)`.

    A balanced Feistel network over the smallest even number of bits that holds `size`, applied again while the result
    lies outside (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    return int(permute_many(np.array([index], np.uint64), size, seed, epoch)[0])


def permute_many(index: NDArray[np.uint64], size: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """`permute` of many positions of one epoch."""
    if size <= 1:
        return np.zeros_like(index)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    base = (seed * 0x10001 + epoch * 0x9E3779B1 + 1) % 2**64
    keys = [int(_mix(np.array([r], np.uint64), base)[0]) for r in range(_ROUNDS)]

    def network(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        return (left << half) | right

    out = network(index.astype(np.uint64))
    while (outside := out >= size).any():
        out[outside] = network(out[outside])
    return out
