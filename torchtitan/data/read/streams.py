"""Datasets too large to index, streamed from the Hugging Face hub."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

from torchtitan.config.registry import unknown_dataset
from torchtitan.data.read.documents import OnBad
from torchtitan.data.read.opening import BadDocument, DataError, Retry
from torchtitan.data.read.positions import StreamPosition, json_fault
from torchtitan.data.read.records import SKIP_ADVICE, Conversations, decode
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger

SHORT_NAMES = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
}


class Stream(Protocol):
    """A `datasets.IterableDataset`."""

    num_shards: int

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def open_stream(dataset: str, section: str, text_column: str = "text") -> Stream:
    """Open a streaming dataset by a short name, or as `org/name[:config][@split]`, for its column
    `text_column`.

    Raises:
        UserError: it can't be found or read.
    """
    if problem := unknown_dataset(dataset):
        raise UserError(f"{section}.dataset: {problem}")
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    if dataset in SHORT_NAMES:
        path, name, split = SHORT_NAMES[dataset]
    else:
        name_and_config, _, split = dataset.partition("@")
        path, _, name = name_and_config.partition(":")
    try:
        builder = datasets.load_dataset_builder(path, name or None)
        if getattr(builder.config, "columns", 0) is None:  # Parquet: skip the others' bytes
            builder.config.columns = [text_column]
        stream = builder.as_streaming_dataset(split=split or "train")
        # A column declared to hold images would be fetched from the addresses in it.
        return stream.decode(False) if stream.features else stream
    except DataError as error:
        raise UserError(f"{section}.dataset: {error}") from None
    except Exception as error:
        raise UserError(
            f"{section}.dataset: can't open {path} on the Hugging Face hub: "
            f"{type(error).__name__}: {error}\nCheck the name and the network (HF_HUB_OFFLINE, "
            f"HF_TOKEN), or set {section}.dataset_path to local files."
        ) from error


class StreamCursor:
    """The documents of a lane: every `lanes`-th shard, or document if there are too few shards."""

    def __init__(
        self,
        stream: Stream,
        lane: int,
        lanes: int,
        infinite: bool,
        retry: Retry,
        text_column: str = "text",
        on_bad_document: OnBad = "stop",
        chat: Conversations | None = None,
    ):
        """
        Args:
            chat: the column holds conversations.
        """
        from datasets.distributed import split_dataset_by_node

        self.stream: Stream = split_dataset_by_node(stream, lane, lanes)
        self.infinite = infinite
        self.retry = retry
        self.lane = lane
        self.text_column = text_column
        self.chat = chat
        self.stop = on_bad_document == "stop"
        self.skip_counts: Counter[str] = Counter()
        """Bad documents skipped since the first step, by kind."""
        self.key = f"{retry.section}.dataset"
        self.epoch = 0
        self.iterator: Iterator[dict[str, Any]] | None = None
        self.target: StreamPosition | None = None
        """The position that was sought; None after the next read."""
        self.has_text = False
        """Whether a document of this epoch has text so far; True after a resume within it."""

    @property
    def epochs(self) -> float:
        """Whole epochs, as the length of a stream is unknown."""
        return float(self.epoch)

    def next(self) -> str | None:
        """The next document; None at the end of a finite pass."""
        while True:
            before = self.position()
            text = self.retry(self._location(before.stream), self._read, partial(self.seek, before))
            self.target = None
            if isinstance(text, BadDocument):
                if not self.skip_counts:
                    logger.warning(
                        f"{self.key}: skipping bad documents of {self.retry.source}; the "
                        f"first is {text}"
                    )
                self.skip_counts[text.kind] += 1
                continue
            self.has_text |= bool(text)
            if text is not None or not self.infinite:
                return text
            if not self.has_text:
                raise UserError(
                    f"{self.key}: lane {self.lane} of the dataset has no text; lower the batch size"
                )
            self.epoch += 1
            self.iterator = None
            self.has_text = False

    def _read(self) -> str | BadDocument | None:
        if self.iterator is None:
            self.stream.set_epoch(self.epoch)
            self.iterator = iter(self.stream)
        row = next(self.iterator, None)
        if row is None:
            return None
        try:
            return decode(row, self.text_column, self.chat)
        except BadDocument as error:
            if self.stop:
                raise DataError(f"{error}{SKIP_ADVICE}") from None
            return error

    def _location(self, inner: Any) -> str:
        """The stream's state in words."""
        words = [f"lane {self.lane}, epoch {self.epoch}"]
        while isinstance(inner, dict):
            for key, value in inner.items():
                if key.endswith("_idx"):
                    words.append(f"{key.removesuffix('_idx').replace('_', ' ')} {value}")
            inner = inner.get("examples_iterable")
        return ", ".join(words)

    def position(self) -> StreamPosition:
        if self.target is not None:  # the stream returns it only after the next read
            return self.target
        state = None
        if self.iterator is not None:
            state = self.stream.state_dict()
            check_state(state, self.key, self.retry.source)
        return StreamPosition(epoch=self.epoch, stream=state, skipped=dict(self.skip_counts))

    def seek(self, position: StreamPosition) -> None:
        self.epoch = position.epoch
        self.skip_counts = Counter(position.skipped)
        self.target = position
        self.has_text = True
        self.stream.set_epoch(self.epoch)
        self.iterator = None
        if position.stream is not None:
            self.stream.load_state_dict(position.stream)
            self.iterator = iter(self.stream)


def check_state(state: Any, key: str, name: str) -> None:
    """
    Args:
        state: of a stream or a callback.
        key: the configuration key that names it.
        name: its value.

    Raises:
        UserError: a checkpoint, which is JSON, couldn't hold it.
    """
    if not isinstance(state, dict):
        raise UserError(
            f"{key}: the state_dict() of {name!r} is a value of type {type(state).__name__}, not a "
            "dict"
        )
    if fault := json_fault(state):
        path, what = fault
        raise UserError(
            f"{key}: the state_dict() of {name!r} has "
            f"{what}{f' at {ascii(path)[1:-1]}' if path else ''}, which a checkpoint can't hold; "
            "use only dicts with string keys, lists, strings, finite numbers, bools and None"
        )
