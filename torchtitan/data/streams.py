"""Datasets too large to index, streamed from the Hugging Face hub."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torchtitan.data.documents import import_datasets
from torchtitan.data.retry import DataError, Retry
from torchtitan.utils.errors import UserError

KNOWN = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
}


def open_stream(dataset: str, section: str) -> Any:
    """Open a streaming dataset by a known name, or as `org/name[:config][@split]`.

    Raises:
        UserError: it can't be found or read.
    """
    datasets = import_datasets()
    if dataset in KNOWN:
        path, name, split = KNOWN[dataset]
    else:
        rest, _, split = dataset.partition("@")
        path, _, name = rest.partition(":")
    if "/" not in path:
        choices = ", ".join(["demo", "demo_validation", *KNOWN])
        raise UserError(
            f"{section}.dataset: no dataset {dataset!r}; choose from {choices}, name any Hugging Face dataset as "
            f'"org/name:config@split", or set {section}.dataset_path to local files'
        )
    try:
        return datasets.load_dataset(path, name or None, split=split or "train", streaming=True)
    except Exception as error:
        raise UserError(
            f"{section}.dataset: can't open {path} on the Hugging Face hub: {type(error).__name__}: {error}\n"
            f"Check the name and the network (HF_HUB_OFFLINE, HF_TOKEN), or set {section}.dataset_path to local files."
        ) from error


class StreamCursor:
    """The documents of one lane of a stream: every `lanes`-th shard, or document if there are too few shards."""

    def __init__(self, stream: Any, lane: int, lanes: int, infinite: bool, retry: Retry):
        from datasets.distributed import split_dataset_by_node

        self.stream = split_dataset_by_node(stream, lane, lanes)
        self.infinite, self.retry, self.lane = infinite, retry, lane
        self.key = f"{retry.section}.dataset"
        self.epoch = 0
        self.iterator: Iterator[dict[str, Any]] | None = None
        self.loaded: dict[str, Any] | None = None
        self.has_text = False
        """Whether any document of this epoch has text, as far as it was read; assumed after a resume within it."""

    @property
    def epochs(self) -> float:
        """Whole epochs: how long one is, a stream doesn't know."""
        return float(self.epoch)

    def next(self) -> str | None:
        """The next document; None at the end of a finite pass."""
        while True:
            before = self.state_dict()
            text = self.retry(self._place(before), self._read, partial(self.load_state_dict, before))
            self.loaded = None
            self.has_text |= bool(text)
            if text is not None or not self.infinite:
                return text
            if not self.has_text:
                raise UserError(f"{self.key}: lane {self.lane} of the dataset has no text; lower the batch size")
            self.epoch, self.iterator, self.has_text = self.epoch + 1, None, False

    def _read(self) -> str | None:
        if self.iterator is None:
            self.stream.set_epoch(self.epoch)
            self.iterator = iter(self.stream)
        row = next(self.iterator, None)
        if row is None:
            return None
        if "text" not in row:
            raise UserError(f"{self.key}: no column 'text'; it has {', '.join(row)}")
        if row["text"] is not None and not isinstance(row["text"], str):
            raise DataError(f"column 'text' holds {type(row['text']).__name__}, not text")
        return row["text"] or ""  # null is an empty document

    def _place(self, state: dict[str, Any]) -> str:
        """The position in words, as far as `datasets` gives it."""
        words, inner = [f"lane {self.lane}, epoch {self.epoch}"], state["stream"]
        while isinstance(inner, dict):
            words += [f"{k.removesuffix('_idx').replace('_', ' ')} {x}" for k, x in inner.items() if k.endswith("_idx")]
            inner = inner.get("examples_iterable")
        return ", ".join(words)

    def state_dict(self) -> dict[str, Any]:
        if self.loaded is not None:  # the stream returns it only after the next read
            return self.loaded
        return {"epoch": self.epoch, "stream": self.stream.state_dict() if self.iterator is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.loaded, self.has_text = state["epoch"], state, True
        self.stream.set_epoch(self.epoch)
        self.iterator = None
        if state["stream"] is not None:
            self.stream.load_state_dict(state["stream"])
            self.iterator = iter(self.stream)
