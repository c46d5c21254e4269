"""The position in the data after a step, as readers hold it and as checkpoints record it.

DataState
    fingerprint: DataFingerprint              what the position is valid for
    shares: SharesState                       how the rows were divided among the sources
    sources: name -> SourcePosition
        lanes: index -> LanePosition          only of text
            cursor: DocumentPosition | StreamPosition

These models are the only definition of the format. Imports no torch.
"""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from torchtitan.utils.strict import Count, Strict


class DocumentPosition(Strict):
    """The next document of a lane, among documents that can be read in any order."""

    position: Count


class StreamPosition(Strict):
    """The next document of a lane of a stream."""

    epoch: Count
    stream: dict[str, Any] | None
    """The stream's own state; None at the beginning of an epoch."""
    skipped: dict[str, Count] = Field(default={})
    """Bad documents that were passed over since the first step, by kind."""


class LanePosition(Strict):
    """The next row of a lane."""

    cursor: DocumentPosition | StreamPosition
    """Position before the current document."""
    offset: Annotated[int, Field(ge=-1, lt=2**63)]
    """The next id of the current document, or of the piece of it; -1 between two documents."""
    position: Count = 0
    """Where the current piece of a long document starts."""


class SourcePosition(Strict):
    """Rows that were read from a source, and of text, the position in each of its lanes."""

    contents: str
    """Fingerprint of the source."""
    rows: Count
    lane_count: Count | None = None
    lanes: dict[str, LanePosition] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        lanes = self.lanes or {}
        if len(lanes) != (self.lane_count or 0) or lanes.keys() != {str(index) for index in range(len(lanes))}:
            raise ValueError("lanes are missing")
        return self


class SharesState(Strict):
    """How the rows since the last change of weights were divided among the sources."""

    weights: dict[str, Annotated[int, Field(ge=1)]]
    rows: Count
    counts: dict[str, Count]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.weights.keys() != self.counts.keys():
            raise ValueError("counts are missing")
        return self


class SourceFingerprint(Strict):
    dataset: str
    contents: str


class DataFingerprint(Strict):
    """What a position is valid for."""

    sources: dict[str, SourceFingerprint]
    tokenizer: str
    seq_len: Count
    seed: Count


class DataState(Strict):
    """The data position."""

    fingerprint: DataFingerprint
    step: Count
    shares: SharesState
    sources: dict[str, SourcePosition]
