"""CRC-32 of files and of the chunks in them, computed while they are written or read.

CRC-32 is linear: the checksum of A followed by B is the checksum of A, shifted by the length of B,
xor the checksum of B. So the checksums of a file up to two positions give the checksum of the bytes
between them (zlib's `crc32_combine`, which Python's zlib lacks).
"""

import errno
import io
import zlib
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from torchtitan.utils.files import open_regular

_CHUNK = 1 << 22
_EDGE = 1 << 16
_POLYNOMIAL = 0xEDB88320
_UNIT = 1 << 31
"""The polynomial 1. Polynomials over GF(2) have their lowest power in the highest bit."""


def crc32(path: Path) -> int:
    """CRC-32 of a regular file's contents."""
    value = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def crc32_of_end(before: int, total: int, length: int) -> int:
    """CRC-32 of the last `length` bytes of a content.

    Args:
        before: the checksum of the content without these bytes.
        total: the checksum of the content.
    """
    return total ^ _multiply(_power(8 * length), before)


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, modulo CRC-32's polynomial."""
    product = 0
    while a:
        if a & _UNIT:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power(n: int) -> int:
    """The polynomial x^n."""
    result = _UNIT
    square = _UNIT >> 1
    while n:
        if n & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        n >>= 1
    return result


class SummedFile:
    """A file being written, with the size and CRC-32 of its contents and of each chunk.

    DCP calls `tell` before and after each tensor, so these positions are the ends of the chunks.
    """

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.bytes = 0
        self.crc32 = 0
        self.error: OSError | None = None
        """The error of a failed write, after which torch raises another one."""
        self._crc32_before = {0: 0}
        """CRC-32 of everything before a position, by position."""

    def write(self, data: Any) -> int:
        self.bytes += memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def tell(self) -> int:
        self._crc32_before[self.bytes] = self.crc32
        return self.bytes

    def crc32_of(self, start: int, length: int) -> int:
        """CRC-32 of a range of bytes whose ends `tell` has returned."""
        return crc32_of_end(self._crc32_before[start], self._crc32_before[start + length], length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class SummedRange(io.RawIOBase):
    """A range of a file, as a file, that computes the checksum of the bytes read from it.

    `torch.load` reads the ends of a chunk in small pieces, in any order, and the tensor between
    them in one piece into its memory. So the ends are buffered here, and the middle passes through.
    """

    def __init__(self, file: Any, start: int, length: int):
        """
        Args:
            file: unbuffered, with `seek` and `readinto`.
        """
        super().__init__()
        self._file = file
        self._start = start
        self._length = length
        self._position = 0
        self._head = self._read_at(0, min(_EDGE, length))
        self._tail_start = max(length - _EDGE, len(self._head))
        self._tail = self._read_at(self._tail_start, length - self._tail_start)
        self._summed = len(self._head)
        self._crc32 = zlib.crc32(self._head)

    def crc32(self) -> int:
        """CRC-32 of the whole range; reads the remaining bytes."""
        while self._summed < self._tail_start:
            self._position = self._summed
            self.readinto(bytearray(min(_CHUNK, self._tail_start - self._summed)))
        return zlib.crc32(self._tail, self._crc32)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        offset = 0
        while offset < len(view) and self._position < self._length:
            count = self._read_some(view[offset:])
            self._position += count
            offset += count
        return offset

    def _read_some(self, view: memoryview) -> int:
        """Read at the position from the head, the middle or the tail."""
        for start, buffered in ((0, self._head), (self._tail_start, self._tail)):
            if start <= self._position < start + len(buffered):
                content = buffered[self._position - start :][: len(view)]
                view[: len(content)] = content
                return len(content)
        view = view[: self._tail_start - self._position]
        self._fill(self._position, view)
        if self._position == self._summed:
            self._crc32 = zlib.crc32(view, self._crc32)
            self._summed += len(view)
        return len(view)

    def _read_at(self, position: int, count: int) -> bytes:
        content = bytearray(count)
        self._fill(position, memoryview(content))
        return bytes(content)

    def _fill(self, position: int, view: memoryview) -> None:
        self._file.seek(self._start + position)
        offset = 0
        while offset < len(view):
            count = self._file.readinto(view[offset:])
            if not count:
                raise OSError(errno.EIO, "ends too early")
            offset += count
