"""A shuffle without a table: the order of an epoch as a function, evaluated where it is needed."""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4
_GOLDEN = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1


def _mix(x: int, key: int) -> int:
    """splitmix64's finalizer (Steele et al., "Fast splittable pseudorandom number generators",
    2014).
    """
    x = (x + key) * _GOLDEN & _64_BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _64_BITS
    return x ^ (x >> 31)


def mixed(values: NDArray[np.int64], *keys: int) -> NDArray[np.uint64]:
    """A hash of each of `values`, another one for other `keys`."""
    key = 0
    for part in keys:
        key = _mix(part & _64_BITS, key)
    x = (values.astype(np.uint64) + np.uint64(key)) * np.uint64(_GOLDEN)  # as _mix, modulo 2^64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(
    index: int,
    size: int,
    seed: int,
    epoch: int,
) -> int:
    """Where position `index` of epoch `epoch` lies in a data set of `size` items: a bijection of
    `[0, size)`.

    A balanced Feistel network over the smallest even number of bits that holds `size`, applied
    again while the result lies outside (cycle walking; Black and Rogaway, "Ciphers with arbitrary
    finite domains", 2002).
    """
    if size <= 1:
        return 0
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    base = (seed * 0x10001 + epoch * 0x9E3779B1 + 1) & _64_BITS
    keys = [_mix(number, base) for number in range(_ROUNDS)]
    while True:
        left = index >> half
        right = index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        index = (left << half) | right
        if index < size:
            return index
