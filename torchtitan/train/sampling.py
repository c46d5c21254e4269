"""Texts that the model writes during training, from the prompts of `[sampling]`."""

from typing import Any

import torch

from torchtitan.config.sections.evals import Sampling
from torchtitan.data.text.tokenizer import Tokenizer
from torchtitan.inference import generator
from torchtitan.inference.generator import Continuation, continue_prompts
from torchtitan.train.logits import Probe


def write_samples(
    probe: Probe,
    config: Sampling,
    tokenizer: Tokenizer,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Continue the prompts. All ranks make the same calls, and get the same texts."""
    prompts = [prompt_ids(tokenizer, text) for text in config.prompts]
    rows: list[Continuation] = []
    for first in range(0, len(prompts), probe.batch):
        rows += continue_prompts(
            prompts[first : first + probe.batch],
            lambda texts: probe.next_logits(texts, tokenizer.vocab_size),
            generator.Sampling(temperature=config.temperature, seed=config.seed),
            stop=[tokenizer.eos_id],
            max_new_tokens=config.max_new_tokens,
            max_seq_len=probe.max_seq_len,
            device=device,
        )
    return [
        {
            "prompt": prompt,
            "text": row.text(tokenizer),
            "end": row.end,
        }
        for prompt, row in zip(config.prompts, rows, strict=True)
    ]


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A prompt as the beginning of a document."""
    return tokenizer.encode(text, bos=True) or [tokenizer.eos_id]
