"""Long texts in pieces: encoding needs memory for one piece, and the ids are those of the whole.

A tokenizer splits a text into words with a regular expression and encodes each word by itself. A
piece ends where the expressions below end a word in any text: none of their alternatives matches a
cut's two characters one after the other, and the only one that looks ahead, from a blank, never
ends at a cut. Imports no torch.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"  # noqa: E501
    r"|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before byte-pair merging."""

QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
"""As Llama 3, with every digit by itself."""
_PATTERNS = (LLAMA3_PATTERN, QWEN2_PATTERN)
"""Expressions with words that end at every `_CUT`: those of Llama 3 and Qwen 2. GPT-2's is built
into `ByteLevel`.
"""

# Before a space that follows no blank, and between a letter or digit and a newline or a punctuation
# mark. Only characters that every version of Unicode has, and no marks that are usual within added
# tokens, as in <tool_call>.
_CUT = re.compile(
    r"(?<=\S)(?= )"
    r"|(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])"
    r"(?=[\n!\"(),.;=+?{}\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
PIECE = 100_000
"""Smallest number of characters of a piece; at twice as many, a run without a cut is cut anyway."""


def pieces(text: str | Iterable[str]) -> Iterator[str]:
    """The pieces of a text, given as a whole or in consecutive parts."""
    held = ""
    for part in [text] if isinstance(text, str) else text:
        held = held + part if held else part
        start = 0
        # A cut depends on the 2 * PIECE characters before it alone.
        while len(held) - start > 2 * PIECE:
            found = _CUT.search(held, start + PIECE, start + 2 * PIECE)
            end = found.start() if found else start + 2 * PIECE
            yield held[start:end]
            start = end
        held = held[start:]
    yield held


def separable(backend: Any) -> bool:
    """Whether a tokenizer of the `tokenizers` library has the same words in pieces as in a whole
    text.
    """
    normalizer = backend_state(backend.normalizer)
    words = backend_state(backend.pre_tokenizer)
    parts = words.get("pretokenizers", [words])
    for token in backend.get_added_tokens_decoder().values():
        # Unless it is special, it is found in a text before the words are.
        looks_around = token.lstrip or token.rstrip or token.single_word
        if not token.special and (looks_around or _CUT.search(token.content)):
            return False
    local = normalizer.get("type") in (None, "NFC") and all(map(_local, parts))
    return local and any(map(_splits, parts))


def backend_state(part: Any) -> dict[str, Any]:
    """The settings of a part of a `tokenizers` tokenizer, as in its file; empty if it is None."""
    return json.loads(part.__getstate__()) if part is not None else {}


def _splits(part: dict[str, Any]) -> bool:
    """Whether this step of a pre-tokenizer ends a word at every cut."""
    if part.get("type") == "ByteLevel":
        return _local(part) and part["use_regex"]
    known = part.get("type") == "Split" and part["pattern"].get("Regex") in _PATTERNS
    return known and part["behavior"] == "Isolated" and not part["invert"]


def _local(part: dict[str, Any]) -> bool:
    """Whether this step does the same to a word whatever surrounds it."""
    if part.get("type") == "ByteLevel":
        return not part["add_prefix_space"]
    return part.get("type") == "Digits" or _splits(part)
