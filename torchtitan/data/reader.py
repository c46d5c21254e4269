"""The rows of each step, from all sources."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchtitan.data.order.mixture import Shares, divide, place
from torchtitan.data.order.rows import Row, Share, SourceReader, StepRows, blank_row, own_rows
from torchtitan.data.positions import DataPosition
from torchtitan.data.sources import DataSpec, Source
from torchtitan.utils.errors import UserError


@dataclass(frozen=True)
class Rows:
    """A reader's part of one step."""

    rows: list[Row]
    sources: list[int]
    """The source of each row, by its index in the configuration."""
    epochs: list[float]
    """How often each source has been read after the step."""
    position: DataPosition
    """This reader's part of the position after the step."""


class StepReader:
    """Reads a share of the rows of every step, in order."""

    def __init__(
        self,
        spec: DataSpec,
        sources: Mapping[str, Source],
        share: Share,
        start: DataPosition,
    ):
        """
        Args:
            start: position to continue from, with all lanes of the sources that it has.
        """
        self.spec = spec
        self.share = share
        self.step = start.step
        self.shares = Shares()
        self.shares.seek(start.shares)
        self.readers: dict[str, SourceReader] = {}
        for name, source in sources.items():
            if saved := start.sources.get(name):
                self.readers[name] = source.reader(share, saved.lane_count)
                self.readers[name].seek(saved)
            else:
                self.readers[name] = source.reader(share)
        self.parked = {name: saved for name, saved in start.sources.items() if name not in sources}
        """Positions of sources that this run doesn't read. It may read them again later."""

    def steps(self) -> Iterator[Rows]:
        """The remaining steps. Training data has no end.

        Raises:
            UserError: all sources have ended.
        """
        while (rows := self._next()) is not None:
            yield rows

    def _next(self) -> Rows | None:
        """None at the end of a finite pass."""
        _, count, weights = self.spec.at(self.step)
        step = StepRows(self.step, count, own_rows(count, self.share))
        left = {name: reader.left for name, reader in self.readers.items()}
        ends = (
            {name: rows for name, rows in left.items() if rows is not None}
            if self.spec.infinite
            else {}
        )
        counts = divide(self.shares, weights, count, ends)
        if sum(counts.values()) < count:
            raise UserError(
                f"{self.spec.section}.sources: all have been read max_epochs times after "
                f"{self.step} steps; set "
                f"training.steps = {self.step}, or raise max_epochs"
            )
        rows: dict[int, tuple[Row, int]] = {}
        slots = place(counts, self.spec.seed, self.step)
        for index, (name, reader) in enumerate(self.readers.items()):
            if name in slots:
                rows |= {slot: (row, index) for slot, row in reader.read(step, slots[name]).items()}
        if not self.spec.infinite and not rows:
            return None
        self.step += 1
        blank = blank_row(self.spec.seq_len), 0
        found, sources = (
            zip(*(rows.get(slot, blank) for slot in step.own), strict=True)
            if step.own
            else ((), ())
        )
        return Rows(
            list(found),
            list(sources),
            [reader.epochs for reader in self.readers.values()],
            self.position(),
        )

    def position(self) -> DataPosition:
        """The position after the last step, with this reader's lanes."""
        sources = {name: reader.position() for name, reader in self.readers.items()}
        return DataPosition(
            step=self.step,
            shares=self.shares.position(),
            sources=self.parked | sources,
        )
