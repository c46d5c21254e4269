"""Text generation without a cache: every token costs a forward over the whole text, under any
layout.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.inference.generator import Continuation, Sampling, noise_generator, sample

NextLogits = Callable[[Sequence[list[int]]], Tensor]
"""From texts of token ids to the logits `[texts, vocab]` (fp32) of the token after each, the same
on every rank.
"""


def continue_prompts(
    prompts: Sequence[list[int]],
    next_logits: NextLogits,
    sampling: Sampling,
    *,
    stop: Sequence[int],
    max_new_tokens: int,
    max_seq_len: int,
    device: torch.device,
    ends: Callable[[Continuation], bool] = lambda _: False,
) -> list[Continuation]:
    """Continue each prompt until a stop token or a limit. All ranks make the same calls.

    Args:
        prompts: token ids; none empty, each shorter than `max_seq_len`.
        stop: tokens that end a text.
        ends: whether a text is complete for another reason.
    """
    rows = [Continuation(list(prompt)) for prompt in prompts]
    generators = [noise_generator(sampling.seed, prompt, device) for prompt in prompts]
    while growing := [i for i, row in enumerate(rows) if not row.end]:
        logits = next_logits([[*rows[i].prompt, *rows[i].tokens] for i in growing])
        drawn = sample(logits, sampling, [generators[i] for i in growing])
        dist.broadcast(drawn, src=0)  # ranks whose samples differ by rounding would hang
        for i, token in zip(growing, drawn.tolist(), strict=True):
            rows[i].take(token, stop, max_new_tokens, max_seq_len)
            if not rows[i].end and ends(rows[i]):
                rows[i].end = "stop"
    return rows
