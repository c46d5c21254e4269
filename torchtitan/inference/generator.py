"""Text generation: sampling, and the loop over tokens with a cache or without one.

Shapes: b rows, s new tokens of each, vocab size of the vocabulary.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.rnn import pad_sequence

from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.inference.cache import GenerationCache


@dataclass(frozen=True)
class SamplingSettings:
    """Settings for choosing the next token."""

    temperature: float = 0.8
    """Divides the logits; 0: always the likeliest token."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest tokens that together have this probability (Holtzman et al.,
    arXiv:1904.09751).
    """
    seed: int = 0


@dataclass
class Continuation:
    """A prompt and the tokens generated after it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """Without the end-of-text token."""
    end: Literal["", "eos", "length", "context", "stop"] = ""
    """Reason of its end: end of text, `max_new_tokens`, `max_seq_len` or a stop text; or empty."""

    def take(
        self, token: int, stop: Collection[int], max_new_tokens: int, max_seq_len: int
    ) -> None:
        """Append a token, or end."""
        if token in stop:
            self.end = "eos"
            return
        self.tokens.append(token)
        if len(self.tokens) == max_new_tokens:
            self.end = "length"
        elif len(self.prompt) + len(self.tokens) == max_seq_len:
            self.end = "context"

    def text(self, tokenizer: Tokenizer) -> str:
        """The continuation, decoded after the prompt: some tokenizers drop the leading space of a
        text, except after a mark at its beginning.
        """
        has_mark = self.prompt[0] in (tokenizer.bos_id, tokenizer.eos_id)
        prompt = self.prompt[has_mark:]
        whole = tokenizer.decode([*prompt, *self.tokens])
        return whole[len(tokenizer.decode(prompt)) :] if prompt else whole


def noise_generator(seed: int, prompt: Sequence[int], device: torch.device) -> torch.Generator:
    """A random generator that depends on the prompt, and not on the rest of its batch."""
    digest = hashlib.sha256(f"{seed}:{list(prompt)}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def sample(
    logits: Tensor, sampling: SamplingSettings, generators: Sequence[torch.Generator]
) -> Tensor:
    """Sample one token per row.

    The argmax of logits plus Gumbel noise is a sample of their softmax (Gumbel, 1954). Noise is
    independent per token, so rounding errors in the logits, which differ between batches, rarely
    change the sample.

    Args:
        logits: `[b, vocab]`, fp32.
        generators: one per row.

    Returns:
        `[b]` int64.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        cutoff = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < cutoff, -torch.inf)
    if sampling.top_p < 1:
        ranking = logits.sort(descending=True).values
        probabilities = ranking.softmax(-1)
        mass = probabilities.cumsum(-1) - probabilities
        cutoff = ranking.masked_fill(mass >= sampling.top_p, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < cutoff, -torch.inf)
    noise = torch.empty_like(logits)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    noise = noise.clamp_(min=torch.finfo(noise.dtype).tiny).log()
    return (logits - noise).argmax(-1)


NextLogits = Callable[[Sequence[list[int]], Sequence[int]], Tensor]
"""Maps texts of ids, and the indices of their prompts, to the logits of the next token:
`[b, vocab]` fp32, equal on all ranks.
"""


def continue_prompts(
    prompts: Sequence[list[int]],
    next_logits: NextLogits,
    sampling: SamplingSettings,
    *,
    stop: Collection[int],
    max_new_tokens: int,
    max_seq_len: int,
    device: torch.device,
    ends: Callable[[Continuation], bool] = lambda _: False,
    progress: Callable[[Continuation], None] = lambda _: None,
    agree: bool = True,
) -> list[Continuation]:
    """Continue each prompt until a stop token or a limit. All ranks make the same calls.

    Args:
        prompts: token ids; none empty, each shorter than `max_seq_len`.
        stop: tokens that end a text.
        ends: whether a text is complete for another reason.
        progress: called with a continuation whenever it has grown or ended.
        agree: take rank 0's samples.
    """
    rows = [Continuation(list(prompt)) for prompt in prompts]
    generators = [noise_generator(sampling.seed, prompt, device) for prompt in prompts]
    while active := [i for i, row in enumerate(rows) if not row.end]:
        texts = [[*rows[i].prompt, *rows[i].tokens] for i in active]
        logits = next_logits(texts, active)
        samples = sample(logits, sampling, [generators[i] for i in active])
        if agree:
            dist.broadcast(samples, src=0)  # ranks whose samples differ by rounding would hang
        for i, token in zip(active, samples.tolist(), strict=True):
            rows[i].take(token, stop, max_new_tokens, max_seq_len)
            if not rows[i].end and ends(rows[i]):
                rows[i].end = "stop"
            progress(rows[i])
    return rows


class TextGenerator:
    """Continues prompts. Under tensor parallelism, all ranks of the mesh make the same calls."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        *,
        rows: int,
        max_seq_len: int,
        vocab_size: int,
        stop: Sequence[int],
        mesh: DeviceMesh | None = None,
    ):
        """
        Args:
            model: without FSDP; sharded over `mesh` if there is one. Its own `max_seq_len` must
                exceed this value by the number of ranks.
            rows: largest number of prompts per call.
            max_seq_len: longest text, prompt included.
            vocab_size: the tokenizer lacks ids from here on, so they are never sampled.
            stop: tokens that end a text.
        """
        self.model = model.eval()
        self.device = device
        self.mesh = mesh
        self.max_rows = rows
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.stop = set(stop)
        self.ranks = mesh.size() if mesh is not None else 1
        self.cache = GenerationCache(model, rows, max_seq_len + self.ranks)

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingSettings,
        max_new_tokens: int,
        progress: Callable[[Continuation], None] = lambda _: None,
    ) -> list[Continuation]:
        """Continue each prompt until a stop token or a limit.

        Args:
            prompts: token ids; at most `rows` prompts, none empty, each shorter than `max_seq_len`.
            progress: called with a continuation whenever it has grown or ended.
        """
        done = [0] * len(prompts)
        """Tokens of each row in the cache."""

        def next_logits(texts: Sequence[list[int]], active: Sequence[int]) -> Tensor:
            # Rows that have ended compute a token again, which is ignored.
            begin = [max(0, tokens - 1) for tokens in done]
            new = [torch.zeros(1, dtype=torch.int64)] * len(prompts)
            for i, text in zip(active, texts, strict=True):
                begin[i], done[i] = done[i], len(text)
                new[i] = torch.tensor(text[begin[i] :])
            tokens = pad_sequence(new, batch_first=True)
            return self._logits(tokens, begin, [len(ids) - 1 for ids in new])[active]

        return continue_prompts(
            prompts,
            next_logits,
            sampling,
            stop=self.stop,
            max_new_tokens=max_new_tokens,
            max_seq_len=self.max_seq_len,
            device=self.device,
            progress=progress,
            agree=self.ranks > 1,
        )

    def _logits(self, tokens: Tensor, begin: Sequence[int], last: Sequence[int]) -> Tensor:
        """The logits of the next token, `[b, vocab]` fp32.

        Args:
            tokens: new tokens and padding, `[b, s]`.
            begin: position of each row's first new token.
            last: index of each row's last new token.
        """
        padding = -tokens.shape[1] % self.ranks  # the ranks divide the sequence evenly
        tokens = F.pad(tokens, (0, padding)).to(self.device)
        positions = torch.tensor(begin)[:, None] + torch.arange(tokens.shape[1])
        self.cache.advance(positions, [index + 1 for index in last], self.device)
        hidden = self.model(tokens, self.cache.positions, project=False)
        if self.mesh is not None:
            sequence_shard = DTensor.from_local(hidden, self.mesh, [Shard(1)], run_check=False)
            hidden = sequence_shard.full_tensor()
        hidden = hidden[torch.arange(len(last)), torch.tensor(last)][:, None]
        # Under tensor parallelism, every rank passes the same token as its part of the sequence.
        logits = self.model.project(hidden, self.model.output_weight)[:, 0].float()
        return logits[:, : self.vocab_size]
