"""What the ranks tell each other in a save: a few numbers, whatever the number of ranks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchtitan.checkpoint.load import RankError, describe

NUMBERS = 4
"""Of each exchange; the first one counts the ranks that failed."""
_TEXT_BYTES = 1000
"""Of an error's description, at most."""


class Exchange:
    """Sums over all ranks, on the host. Every method is called by all ranks together."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False):
        """
        Args:
            group: of all ranks, with gloo; None: the default one.
            alone: this process saves by itself.
        """
        self.group = group
        self.alone = alone or not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank()
        self.world = 1 if self.alone else dist.get_world_size()

    def step(self, action: Callable[[], Sequence[int]]) -> list[int]:
        """Run a part of a save on every rank, and wait for all.

        Args:
            action: returns numbers below 2^63, as many on all ranks.

        Returns:
            Their sums over the ranks, modulo 2^64.

        Raises:
            RankError: it failed on some rank; on every rank the same. The cause itself if `alone`.
        """
        values: Sequence[int] = ()
        cause = None
        try:
            values = action()
        except Exception as error:
            if self.alone:
                raise
            cause = error
        failed, *sums = self._sums([int(cause is not None), *values])
        if failed:
            texts = self._texts("" if cause is None else describe(cause))
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
            raise RankError(f"rank {rank}: {text}") from cause
        return sums

    def _sums(self, values: Sequence[int]) -> list[int]:
        """`values` summed over all ranks. Ranks that failed have none but the first.

        Along a binomial tree, and back along that of gloo's broadcast: of n ranks, each sends and
        receives twice on average, and log2(n) times at most. gloo's own sum is a ring of n steps.
        The barrier, of log2(n) messages, is what a diagnosis of a hang sees: gloo records no sends.
        """
        if not self.alone:
            dist.barrier(group=self.group)
        padded = torch.zeros(NUMBERS, dtype=torch.int64)
        padded[: len(values)] = torch.tensor(values, dtype=torch.int64)
        distance = 1
        while distance < self.world:
            if self.rank % (2 * distance):
                dist.send(padded, self.rank - distance, group=self.group)
                break
            if self.rank + distance < self.world:
                more = torch.empty_like(padded)
                dist.recv(more, self.rank + distance, group=self.group)
                padded += more
            distance *= 2
        if not self.alone:
            dist.broadcast(padded, src=0, group=self.group)
        return padded.tolist()

    def _texts(self, text: str) -> list[str]:
        """The text of each rank; only after a failure."""
        own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        content = text.encode()[:_TEXT_BYTES]
        if content:
            own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(every, own, group=self.group)
        return [bytes(x.tolist()).rstrip(b"\0").decode(errors="ignore") for x in every]


def bytes_from_rank_0(content: bytes | None) -> bytes | None:
    """Rank 0's `content`, on every rank, as a tensor: its length, and then itself."""
    length = torch.tensor(-1 if content is None else len(content))
    dist.broadcast(length, src=0)
    if length < 0:
        return None
    box = torch.empty(int(length), dtype=torch.uint8)
    if dist.get_rank() == 0 and content:
        box = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if len(box):
        dist.broadcast(box, src=0)
    return box.numpy().tobytes()
