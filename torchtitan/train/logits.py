"""Read the model's logits at some positions of any texts, under any layout.

Validation uses the same forward. Texts are padded at the end, which causal attention doesn't see,
and spread over the ranks that read different rows. Instead of labels, the forward gets the numbers
of the positions; instead of a loss, a function that reads the logits there. Each position is
computed by one rank, so a sum over ranks collects the results.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.optim.loss import RowLoss
from torchtitan.parallel.collectives import all_reduce
from torchtitan.parallel.mesh import Mesh
from torchtitan.train.forward import Compute
from torchtitan.utils.activity import note

Read = Callable[[Tensor, Tensor], Tensor]
"""A function of the logits of n positions `[n, vocab]` (fp32), and of the positions' numbers `[n]`;
returns values `[n, width]`.
"""
_SHORTEST = 64
"""Length of the shortest rows. Longer rows have this length times a power of two, so that there are
few shapes.
"""
_AT_ONCE = 1024
"""Number of positions whose logits are gathered over the vocabulary at a time."""


@dataclass(eq=False)
class Probe:
    """Reads a model's logits. All ranks make the same calls, and get the same results."""

    build: Callable[[int, RowLoss], Compute]
    """Builds the `Compute` for rows of a length, with a loss."""
    mesh: Mesh
    device: torch.device
    rows: int
    """Number of rows in a batch of each rank."""
    unit: int
    """Divides the length of every row."""
    max_seq_len: int
    """Length of the longest text in tokens."""
    compiled: bool
    """Whether the model is compiled, for other shapes."""

    def __post_init__(self) -> None:
        self.before_batch: Callable[[], object] = lambda: None
        self._computes: dict[int, Compute] = {}
        self._read: Read = lambda logits, _: logits
        self._values = torch.empty(0)

    @property
    def batch(self) -> int:
        """Number of texts in one forward over all ranks."""
        return self.rows * self.mesh.dp_degree

    @torch.no_grad()
    def __call__(
        self, texts: Sequence[list[int]], positions: Sequence[Sequence[int]], read: Read, width: int
    ) -> Tensor:
        """The values that `read` returns for `positions`: `[positions, width]` fp32, on the device.

        Args:
            texts: token ids, at most `max_seq_len` each.
            positions: positions in each text, numbered over all texts, in order.
        """
        starts = torch.tensor([0, *map(len, positions)]).cumsum(0).tolist()
        values = torch.zeros(starts[-1], width, device=self.device)
        self._read = read
        self._values = values
        # texts of similar lengths share a batch
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        with self._inference():
            for first in range(0, len(order), self.batch):
                self.before_batch()
                together = order[first : first + self.batch]
                note(f"evaluating texts {first + 1} to {first + len(together)} of {len(texts)}")
                length = self._length(len(texts[together[0]]))
                local = together[self.mesh.dp_rank * self.rows :][: self.rows]
                tokens = torch.zeros(self.rows, length, dtype=torch.int64)
                numbers = torch.full_like(tokens, IGNORE_INDEX)
                for row, i in enumerate(local):
                    tokens[row, : len(texts[i])] = torch.tensor(texts[i])
                    numbers[row, list(positions[i])] = torch.arange(starts[i], starts[i + 1])
                compute = self._compute(length)
                compute.forward(compute.local_rows(tokens, numbers).to(self.device))
        self._values = torch.empty(0)
        return all_reduce(values, self.mesh.loss_group)

    def next_logits(self, texts: Sequence[list[int]], vocab_size: int) -> Tensor:
        """The logits of the token after each text: `[texts, vocab_size]` fp32.

        Args:
            vocab_size: number of the tokenizer's ids; the model may have more.
        """
        return self(
            texts,
            [[len(text) - 1] for text in texts],
            lambda logits, _: logits[:, :vocab_size],
            vocab_size,
        )

    def _length(self, tokens: int) -> int:
        """The length of rows that hold `tokens` tokens."""
        length = -(-_SHORTEST // self.unit) * self.unit
        while length < tokens:
            length *= 2
        return min(length, -(-self.max_seq_len // self.unit) * self.unit)

    def _compute(self, length: int) -> Compute:
        if length not in self._computes:
            self._computes[length] = self.build(length, self._take)
        return self._computes[length]

    def _take(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Read the logits of a microbatch, or of a slice of its positions; called as a loss is."""
        rows, columns = (numbers != IGNORE_INDEX).nonzero(as_tuple=True)
        for row, column in zip(rows.split(_AT_ONCE), columns.split(_AT_ONCE), strict=True):
            number = numbers[row, column]
            if len(number):
                self._values[number] = self._read(self._full_logits(logits, row, column), number)
        return torch.zeros(len(numbers), device=self.device)

    def _full_logits(self, logits: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """The logits of some positions over the whole vocabulary: `[n, vocab]` fp32."""
        if isinstance(logits, DTensor):
            local_logits = logits.to_local()[row, column].float()
            shape = torch.Size((len(row), logits.shape[-1]))
            full_logits = DTensor.from_local(
                local_logits,
                logits.device_mesh,
                [Shard(1)],
                run_check=False,
                shape=shape,
                stride=(shape[1], 1),
            )
            return full_logits.full_tensor()
        return logits[row, column].float()

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """A context in which the model evaluates, uncompiled: its graphs are for one shape only."""
        compute = self._compute(self._length(self.max_seq_len))
        stance = torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
        with stance, compute.evaluation():
            yield
