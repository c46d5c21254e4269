"""Texts as token ids the way transformers does it, so that scores are those of lm-eval's `hf`
backend.

Unlike in training, the spelling of a special token in a text becomes that token. A trained model
gets begin-of-text where training does, as its export says; for a Hugging Face folder, the
tokenizer's files say which tokens are added.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torchtitan.data.text.tokenizer import HuggingFaceTokenizer, TiktokenTokenizer, Tokenizer
from torchtitan.utils.formats import read_json_object


class EvalTokenizer:
    """The tokenizer of a model under evaluation."""

    def __init__(self, tokenizer: Tokenizer, *, by_file: bool = False):
        """
        Args:
            by_file: add the special tokens that the tokenizer's files ask for, not those of
            training.
        """
        self.eos_id = tokenizer.eos_id
        self.prefix_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        """What a text without context follows."""
        self._before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        self._after: list[int] = []
        self._ids: Callable[[str, bool], list[int]] = lambda text, _: tokenizer.encode(text)
        self._decode = tokenizer.decode
        self._special = {tokenizer.bos_id, tokenizer.eos_id}
        if isinstance(tokenizer, TiktokenTokenizer):
            backend = tokenizer.backend
            self._ids = lambda text, _: backend.encode(text, allowed_special="all")
            self._special = {
                backend.encode_single_token(name) for name in backend.special_tokens_set
            }
        elif isinstance(tokenizer, HuggingFaceTokenizer):
            self._read(tokenizer, by_file)

    def _read(self, tokenizer: HuggingFaceTokenizer, by_file: bool) -> None:
        """As transformers' fast tokenizers read their files."""
        assert tokenizer.path is not None
        # recognizes special tokens
        backend: Any = type(tokenizer.backend).from_file(str(tokenizer.path))
        backend.no_truncation()
        backend.no_padding()
        self._special = {
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._ids = lambda text, _: backend.encode(text, add_special_tokens=False).ids
        if not by_file:
            return
        file = tokenizer.path.with_name("tokenizer_config.json")
        config = read_json_object(file) if file.exists() else {}
        asked = {key: config[key] for key in ("add_bos_token", "add_eos_token") if key in config}
        # a rule of the file for what is added
        own = not asked and backend.post_processor is not None
        self._before = [self.prefix_id] if asked.get("add_bos_token") else []
        self._after = [self.eos_id] if asked.get("add_eos_token") else []
        self._ids = lambda text, special: (
            backend.encode(text, add_special_tokens=special and own).ids
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """
        Args:
            add_special_tokens: begin the text as training does, or as the tokenizer's files ask
            for.
        """
        ids = self._ids(text, add_special_tokens)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._decode([i for i in ids if not (skip_special_tokens and i in self._special)])
