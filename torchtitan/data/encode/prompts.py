"""Prompts as ids: texts to continue, and conversations to answer. Imports no torch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.data.read.opening import data_errors


def encode_prompts(
    prompts: Iterable[Any], tokenizer: Tokenizer, key: str, *, chat: bool
) -> Iterator[tuple[str, list[int]]]:
    """Yield the text and the ids of each prompt: a text, or a list of messages.

    Args:
        key: the key or option that asks for the chat template, for errors.
        chat: a text is a user's message.

    Raises:
        UserError: the tokenizer has no chat template, or it refuses a prompt.
    """
    template = None
    for i, prompt in enumerate(prompts, 1):
        if isinstance(prompt, str) and not chat:
            yield prompt, tokenizer.encode(prompt, bos=True) or tokenizer.ends
            continue
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        template = template or Chat(tokenizer, key)
        with data_errors(f"{key}: prompt {i}"):
            rendered = template.prompt(messages)
        yield rendered


def prompt_problems(
    prompts: Iterable[Sequence[int]], vocab_size: int, max_seq_len: int
) -> Iterator[str]:
    """Reasons why a model can't continue the ids of prompts."""
    for i, prompt in enumerate(prompts, 1):
        if not prompt:
            yield f"prompt {i} has no tokens, and the tokenizer none to begin a text with"
        elif max(prompt) >= vocab_size:
            yield f"prompt {i} has the token {max(prompt)}, which is not in the model's vocabulary"
        if len(prompt) >= max_seq_len:
            yield (
                f"prompt {i} has {len(prompt)} tokens; the model reads {max_seq_len}, of which one "
                "must be new: shorten it"
            )
