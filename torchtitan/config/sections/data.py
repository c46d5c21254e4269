"""Tables that name data: `[[training.sources]]`, `[[training.stages]]`, `[[validation.sets]]` and
`[*.dataloader]`.
"""

from typing import Annotated, Any

from pydantic import Field

from torchtitan.config.types import (
    Few,
    FewOrZero,
    LocalPath,
    Name,
    Rows,
    Section,
    SeqLen,
    StepsOrDefault,
)


class DataLoader(Section):
    """Prefetching of data. Batches don't depend on these settings."""

    num_workers: FewOrZero = 0
    """Worker processes per rank. 0: a background thread prepares the next batches."""
    persistent_workers: bool = False
    """Keep the workers alive between validations."""
    pin_memory: bool = True
    """Copy batches to pinned memory, so the copy to the GPU overlaps with compute (CUDA only)."""
    prefetch_factor: Few | None = None
    """Batches that each worker prepares ahead. Default: 2."""
    cache_folder: LocalPath | None = None
    """Keep the index of local files here, and the texts of those that can't be read in any order
    (compressed, CSV, Parquet, Arrow, JSON arrays). `none`: keep nothing, and index plain JSON lines
    and text at every start. Default: `$TORCHTITAN_CACHE`, or `torchtitan` in the user's cache
    folder.
    """
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    """Retry a read this many times if it fails. Data that can't be decoded is not read again."""
    retry_pause_seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Wait about this long before the first retry, then twice as long before each further one."""
    timeout_seconds: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """Fail, naming the source, after waiting this long for data. Default: half of
    `comm.train_timeout_seconds`, so that it precedes the timeouts of other ranks' collectives. The
    first batch may take half of `comm.init_timeout_seconds`.
    """


class Source(Section):
    """A part of a mixture."""

    name: Name
    """Name the source in logs, metrics and checkpoints. A resumed run finds its position by it."""
    dataset: Name = "demo"
    """Like `training.dataset`."""
    dataset_path: LocalPath | None = None
    """Like `training.dataset_path`."""
    text_column: Name = "text"
    """Like `training.text_column`."""
    messages_column: Name | None = None
    """Like `training.messages_column`."""
    weight: Annotated[float, Field(ge=0, le=10**9)] = 1.0
    """The source's share of the tokens, relative to the weights of the others."""
    max_epochs: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Read the source at most this often; then the others share its weight. Default: no limit."""

    @property
    def column(self) -> str:
        """The column that is read."""
        return self.messages_column or self.text_column


class DataStage(Section):
    """A change during the run."""

    from_step: Annotated[int, Field(ge=1, le=10**12)]
    """The first step of the stage, counted from 1."""
    weights: dict[Name, Annotated[float, Field(ge=0, le=10**9)]] = {}
    """New weights of sources, by name. Other sources keep theirs."""
    lr_scale: Annotated[float, Field(gt=0, le=10**18)] | None = None
    """Multiply the schedule's learning rate by this. Default: as in the stage before, at first 1.
    """
    seq_len: SeqLen | None = None
    """Tokens per row. The batch in tokens changes with it, unless `global_batch_size` changes
    inversely. Default: as in the stage before.
    """
    global_batch_size: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Rows per optimizer step. Default: as in the stage before."""
    local_batch_size: Rows | None = None
    """Rows per forward and backward pass on each data-parallel rank. Default: as in the stage
    before.
    """
    rope_theta: Annotated[float, Field(gt=0, le=10**12)] | None = None
    """Base of the RoPE frequencies, as in `[model.overrides]`. Default: as in the stage before."""
    rope_scaling: dict[str, Any] = {}
    """Scaling of the RoPE frequencies, as in `[model.overrides]`: `{type = "yarn", factor = 8.0}`.
    Default: as in the stage before.
    """


class ValidationSet(Section):
    """Held-out data with a separate loss."""

    name: Name
    """Name of the set in logs and metrics."""
    dataset: Name = "c4_validation"
    """Like `validation.dataset`."""
    dataset_path: LocalPath | None = None
    """Like `training.dataset_path`."""
    text_column: Name = "text"
    """Like `training.text_column`."""
    messages_column: Name | None = None
    """Like `training.messages_column`."""
    steps: StepsOrDefault | None = None
    """Batches of this set. Default: `validation.steps`."""
