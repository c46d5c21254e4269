"""The ids of token files that each row has, whatever its length.

Files are cut into windows of equal width, which each epoch shuffles. Rows that are shorter than a
window are cut from a group of windows side by side: first the beginning of each, then the next
range of each. So the rows of a step are as mixed as if they had been shuffled themselves, and rows
as long as a window, in a later stage, are whole windows of text.

    windows 0 1 2 of a group, rows of a third      0a 1a 2a   0b 1b 2b   0c 1c 2c
    rows of a whole window after five of these     2b 0c | 1c 2c | the windows of the next group

Where the length changes within a group, its unread ids are read next, window after window. Rows
that don't divide the width are cut from windows one after another, too. Every id is predicted once,
except the first of each file.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.data.read.positions import WindowsPosition


class Piece(NamedTuple):
    """Consecutive predicted ids of a window."""

    window: int
    """Counted from the start of the first epoch, in shuffled order."""
    first: int
    after: int


@dataclass
class WindowOrder:
    """A position among windows, and the rows after it."""

    width: int
    """Predicted ids of a window. The last of a file may have fewer; its rows are padded."""
    side: int
    """Windows in a group, which are read side by side."""
    count: int
    """Windows in an epoch."""
    limit: int | None
    """Windows until the end; None: there is none."""
    first: int = 0
    """The current group's first window."""
    length: int = 0
    """Length of the rows read side by side from the group; 0 before the first."""
    rows: int = 0
    """Number of rows read side by side."""
    tail_read: int | None = None
    """Ids read after those rows, window after window; None: all rows so far were side by side."""

    def take(self, rows: int, length: int, indices: range) -> dict[int, list[Piece]]:
        """Advance by `rows` rows of `length` predicted ids.

        Args:
            indices: the rows to return.

        Returns:
            The pieces of each row, together at most `length`; none of rows after the end.
        """
        pieces_of = {}
        row = 0
        while row < rows and not self.ended:
            self._open(length)
            count = min(self._rows_of_group(length), rows - row)
            for index in range(max(row, indices.start), min(row + count, indices.stop)):
                pieces_of[index] = self._pieces(index - row, length)
            self._advance(count, length)
            row += count
        return pieces_of

    @property
    def ended(self) -> bool:
        return self.limit is not None and self.first >= self.limit

    @property
    def read(self) -> int:
        """Predicted ids read so far."""
        return self.first * self.width + self.rows * self.length + (self.tail_read or 0)

    def remaining_rows(self, length: int) -> int | None:
        """Rows of `length` until the end; None if there is no end."""
        if self.limit is None:
            return None
        if self.ended:
            return 0
        in_group = 0
        begins = self.first
        if self.length:
            in_group = self._rows_of_group(length)
            begins += self._size
        return in_group + -(-(self.limit - begins) * self.width // length)

    def position(self) -> WindowsPosition:
        return WindowsPosition(
            width=self.width,
            side=self.side,
            first=self.first,
            length=self.length,
            rows=self.rows,
            rest=self.tail_read,
        )

    def seek(self, position: WindowsPosition) -> None:
        """Continue from a position in windows of the same width."""
        self.side = position.side
        self.first = position.first
        self.length = position.length
        self.rows = position.rows
        self.tail_read = position.rest

    # ---- the current group

    @property
    def _size(self) -> int:
        """The group's number of windows. A group ends with the epoch, so that no window is read
        again before all others are read completely.
        """
        if self.width % self.length:
            size = self.length // math.gcd(self.length, self.width)
        else:
            size = min(self.side, self.count - self.first % self.count)
        return size if self.limit is None else min(size, self.limit - self.first)

    @property
    def _unread(self) -> int:
        """Positions of the group behind the rows that were read side by side."""
        return self._size * self.width - self.rows * self.length

    def _open(self, length: int) -> None:
        if not self.length:
            self.length = length
        if self.tail_read is None and (length != self.length or self.width % length):
            self.tail_read = 0

    def _rows_of_group(self, length: int) -> int:
        """Rows of `length` that remain in the group."""
        ids = self._unread - (self.tail_read or 0)
        return max(-(-ids // length), 1)

    def _advance(self, rows: int, length: int) -> None:
        if self.tail_read is None:
            self.rows += rows
        else:
            self.tail_read += rows * length
        if self._unread <= (self.tail_read or 0):
            self.first += self._size
            self.length = self.rows = 0
            self.tail_read = None

    def _pieces(self, index: int, length: int) -> list[Piece]:
        """The pieces of the row that is `index` rows after the position."""
        if self.tail_read is None:
            turn, which = divmod(self.rows + index, self._size)
            return [Piece(self.first + which, turn * length, (turn + 1) * length)]
        pieces = []
        at = self.tail_read + index * length
        after = min(at + length, self._unread)
        while at < after:
            which, first = self._locate(at)
            size = min(self.width - first, after - at)
            pieces.append(Piece(self.first + which, first, first + size))
            at += size
        return pieces

    def _locate(self, unread: int) -> tuple[int, int]:
        """The window of the group that holds an unread position, and the offset in that window."""
        turns, ahead = divmod(self.rows, self._size)
        begin = turns * self.length  # of the unread part of windows not `ahead`
        short = max(self.width - begin - self.length, 0)
        if unread < ahead * short:
            which, offset = divmod(unread, short)
            return which, begin + self.length + offset
        which, offset = divmod(unread - ahead * short, self.width - begin)
        return ahead + which, begin + offset
