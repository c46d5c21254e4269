"""Texts as token ids the way transformers does it, so that scores are those of lm-eval's `hf` backend.

Unlike in training, the spelling of a special token in a text becomes that token, and the tokenizer's file says which
special tokens are added.
"""

from collections.abc import Sequence
from typing import Any

from torchtitan.data.tokenizer import HuggingFaceTokenizer, TiktokenTokenizer, Tokenizer
from torchtitan.utils.json_files import read_json_object


class EvalTokenizer:
    """The tokenizer of a model under evaluation."""

    def __init__(self, tokenizer: Tokenizer):
        self.eos_id = tokenizer.eos_id
        self.prefix_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        """What a text without context follows."""
        self._before: list[int] = []
        self._after: list[int] = []
        self._backend: Any
        if isinstance(tokenizer, TiktokenTokenizer):
            self._backend, self._own = tokenizer.backend, False
            self._special = set(tokenizer.backend._special_tokens.values())
            self._before = [self.prefix_id]
            return
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.path is None:  # a registered one
            self._backend, self._own, self._before = tokenizer, False, [self.prefix_id]
            return
        self._backend = type(tokenizer.backend).from_file(str(tokenizer.path))
        self._backend.no_truncation()
        self._backend.no_padding()
        file = tokenizer.path.with_name("tokenizer_config.json")
        config = read_json_object(file) if file.exists() else {}
        asked = {key: config[key] for key in ("add_bos_token", "add_eos_token") if key in config}
        self._own = not asked and self._backend.post_processor is not None
        """The file has a rule of its own for which special tokens are added."""
        self._before = [self.prefix_id] if asked.get("add_bos_token") else []
        self._after = [self.eos_id] if asked.get("add_eos_token") else []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """
        Args:
            add_special_tokens: those that the tokenizer's file asks for.
        """
        if hasattr(self, "_special"):
            ids = self._backend.encode(text, allowed_special="all")
        elif isinstance(self._backend, Tokenizer):
            ids = self._backend.encode(text)
        else:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens and self._own).ids
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if hasattr(self, "_special"):
            return self._backend.decode([i for i in ids if not (skip_special_tokens and i in self._special)])
        if isinstance(self._backend, Tokenizer):
            special = {self.prefix_id, self.eos_id} if skip_special_tokens else set()
            return self._backend.decode([i for i in ids if i not in special])
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
