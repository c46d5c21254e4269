"""The position in the data after a step, as readers hold it and as checkpoints record it.

    DataState
        fingerprint: DataFingerprint              the data that the position is valid for
        step
        shares: SharesState                       how the rows were divided among the sources
        sources: name -> SourcePosition
            windows: WindowsPosition              only for token files
            lanes: index -> LanePosition          only for text; PackedPosition if it is packed
                cursor: DocumentPosition | StreamPosition

These models are the only definition of the format. Imports no torch.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from torchtitan.utils.formats import Count, Strict
from torchtitan.utils.limits import STATE_LEVELS


class DocumentPosition(Strict):
    """The next document of a lane, among documents that can be read in any order."""

    position: Count


class StreamPosition(Strict):
    """The next document of a lane of a stream."""

    epoch: Count
    stream: dict[str, JsonValue] | None
    """The stream's state; None at the beginning of an epoch."""
    skipped: dict[str, Count] = Field(default={})
    """Bad documents skipped since the first step, by kind."""


class LanePosition(Strict):
    """The next row of a lane."""

    cursor: DocumentPosition | StreamPosition
    """Position before the current document."""
    offset: Annotated[int, Field(ge=-1, lt=2**63)]
    """The next id of the current document or piece; -1 between two documents."""
    position: Count = 0
    """Where the current piece of a long document starts."""


class PackedPosition(Strict):
    """The next row of a lane whose documents are packed."""

    cursor: DocumentPosition | StreamPosition
    """Position before the current pool of documents."""
    pool_rows: Annotated[int, Field(ge=1, lt=2**63)]
    """Approximate number of rows that the pool fills."""
    rows: Count
    """Rows taken from the pool."""
    length: Annotated[int, Field(ge=2, lt=2**63)]
    """Length of the rows into which documents are packed."""


class WindowsPosition(Strict):
    """The next row of token files; see `data/order/windows.py`."""

    width: Annotated[int, Field(ge=1, lt=2**63)]
    """Predicted ids of each of the windows that are shuffled."""
    side: Annotated[int, Field(ge=1, lt=2**63)]
    """Windows of a group, from which shorter rows are cut side by side."""
    first: Count
    """The first window of the current group."""
    length: Count
    """Length of the rows read side by side from the group; 0: none yet."""
    rows: Count
    """Number of those rows."""
    rest: Count | None
    """Ids read from the group after those rows, window after window; None: none."""


class SourcePosition(Strict):
    """The amount read from a source, and the position in its windows or in each of its lanes."""

    contents: str
    """Fingerprint of the source."""
    rows: Count
    tokens: Count
    """Predicted tokens of those rows."""
    windows: WindowsPosition | None = None
    lane_count: Count | None = None
    lanes: dict[str, LanePosition | PackedPosition] | None = None

    @model_validator(mode="before")
    @classmethod
    def _current(cls, fields: object) -> object:
        if isinstance(fields, dict) and "tokens" not in fields:
            raise ValueError(
                "the data position is of an earlier version, which counted rows of one length; "
                "resume with the version that wrote it"
            )
        return fields

    @property
    def kind(self) -> Literal["tokens", "documents", "stream"]:
        """The kind of source that the position is in."""
        if not self.lanes:
            return "tokens"
        streams = [isinstance(lane.cursor, StreamPosition) for lane in self.lanes.values()]
        return "stream" if any(streams) else "documents"

    @property
    def packed_length(self) -> int | None:
        """Length of the rows that documents are packed into; None: they aren't packed."""
        lanes = (self.lanes or {}).values()
        lengths = [lane.length for lane in lanes if isinstance(lane, PackedPosition)]
        return lengths[0] if lengths else None

    @property
    def is_complete(self) -> bool:
        """Whether no lane is missing."""
        lanes = self.lanes or {}
        return lanes.keys() == {str(index) for index in range(len(lanes))} and len(lanes) == (
            self.lane_count or 0
        )

    @property
    def skip_counts(self) -> Counter[str]:
        """Bad documents that the lanes have skipped, by kind."""
        counts = Counter[str]()
        for lane in (self.lanes or {}).values():
            if isinstance(lane.cursor, StreamPosition):
                counts.update(lane.cursor.skipped)
        return counts

    def restarted(self) -> "SourcePosition":
        """This position for changed contents: each lane restarts its current document or pool, and
        token files their current windows.
        """
        if self.windows is not None:
            nothing = {"length": 0, "rows": 0, "rest": None}
            return self.model_copy(update={"windows": self.windows.model_copy(update=nothing)})
        lanes = {
            index: lane.model_copy(update={"rows": 0})
            if isinstance(lane, PackedPosition)
            else lane.model_copy(update={"offset": -1, "position": 0})
            for index, lane in (self.lanes or {}).items()
        }
        return self.model_copy(update={"lanes": lanes}) if lanes else self


class SharesState(Strict):
    """The division among the sources of the rows since the last change of weights."""

    weights: dict[str, Annotated[int, Field(ge=1)]]
    rows: Count
    counts: dict[str, Count]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.weights.keys() != self.counts.keys():
            raise ValueError("counts are missing")
        return self


class DataPosition(Strict):
    """The position of one reader, with its lanes only, or of all readers together."""

    step: Count
    shares: SharesState
    sources: dict[str, SourcePosition]


class SourceFingerprint(Strict):
    dataset: str
    contents: str


class DataFingerprint(Strict):
    """The data that a position is valid for."""

    sources: dict[str, SourceFingerprint]
    tokenizer: str
    seq_len: Count
    seed: Count
    held_out: dict[str, SourceFingerprint] = Field(default={})
    """Validation sets by their sections. No position depends on them."""


class DataState(DataPosition):
    """The data position in a checkpoint: complete, and the same for any number of readers."""

    fingerprint: DataFingerprint

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name, source in self.sources.items():
            if not source.is_complete:
                raise ValueError(f"sources.{name}: lanes are missing")
        return self


def merge_positions(positions: Sequence[DataPosition]) -> DataPosition:
    """The position of all readers, each of which has some of the lanes."""
    first = positions[0]
    sources = dict(first.sources)
    for name, source in first.sources.items():
        if source.lanes is not None:
            lanes: dict[str, LanePosition | PackedPosition] = {}
            for position in positions:
                lanes |= position.sources[name].lanes or {}
            sources[name] = source.model_copy(update={"lanes": lanes})
    return DataPosition(step=first.step, shares=first.shares, sources=sources)


def complete_state(state: DataState, positions: Sequence[DataPosition]) -> DataState:
    """The state that a checkpoint records.

    Args:
        state: any reader's, by `StepLoader.local_state`.
        positions: the positions of all readers after the same step.
    """
    merged = merge_positions(positions)
    return DataState(
        step=merged.step,
        shares=merged.shares,
        sources=merged.sources,
        fingerprint=state.fingerprint,
    )


def json_fault(value: object, depth: int = 0) -> tuple[str, str] | None:
    """Path and description of an element of `value` that JSON would change, or None."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return "", f"a key of type {_name(type(key))}"
            if key_fault := _scalar_fault(key):
                return "", f"as a key, {key_fault}"
        items = [(f".{key}", inner) for key, inner in value.items()]
    elif isinstance(value, list):
        items = [(f"[{index}]", inner) for index, inner in enumerate(value)]
    else:
        scalar_fault = _scalar_fault(value)
        return ("", scalar_fault) if scalar_fault else None
    if depth == STATE_LEVELS:
        return "", f"more than {STATE_LEVELS} levels of lists and dicts"
    for key, inner in items:
        if fault := json_fault(inner, depth + 1):
            return key + fault[0], fault[1]
    return None


def _scalar_fault(value: object) -> str | None:
    if type(value) is float and not math.isfinite(value):
        return f"the number {value}"
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return "a string with a lone surrogate"
    plain = value is None or type(value) in (bool, int, float, str)
    return None if plain else f"a value of type {_name(type(value))}"


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
