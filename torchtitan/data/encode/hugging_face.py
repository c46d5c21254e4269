"""A Hugging Face folder's `tokenizer.json`, read by the `tokenizers` library with the settings of
the files beside it.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.data.encode.base import Tokenizer, rust_errors
from torchtitan.data.encode.special_tokens import (
    END_NAMES,
    FolderTokens,
    read_folder_tokens,
    resolve_ends,
    tokens_around,
)
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import BOM
from torchtitan.utils.limits import LONGER_TEXT

RANDOM = ("dropout", "alpha", "nbest_size")
"""Settings of a model that make ids random: of BPE, and of Unigram."""
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
"""Settings of a model that it adds to each character."""


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`."""

    def __init__(self, path: Path, end_of_document: str | None = None):
        """
        Args:
            end_of_document: the token that ends documents, instead of the folder's.

        Raises:
            UserError: it is damaged, contradicts the files beside it, or lacks a token.
        """
        super().__init__(path)
        self.backend, settings = open_backend(path)
        folder_tokens = read_folder_tokens(path)
        self.added = _add_tokens(self.backend, path, folder_tokens)
        """Entries for the tokens that only the files beside `tokenizer.json` list."""
        # The spelling of a special token in a text stays text.
        self.backend.encode_special_tokens = True
        self.vocab_size = (
            max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        processor = self.backend.post_processor
        self.added_tokens = self.backend.get_added_tokens_decoder()
        special = [token.content for token in self.added_tokens.values() if token.special]
        around = tokens_around(json.loads(processor.__getstate__()) if processor else None, special)
        ends = resolve_ends(path, folder_tokens, around, self.backend.token_to_id, end_of_document)
        self.set_ends(ends)
        self.names = ends.names
        """Special tokens by their roles, as the folder names them."""
        self.notes = (*settings, *folder_tokens.notes)
        if end_of_document is None:
            self.notes += tuple(self._end_of_turn(special))

    def _end_of_turn(self, special: Sequence[str]) -> Iterable[str]:
        """A warning if documents end with what probably ends a turn of a conversation."""
        end = next(map(self.backend.id_to_token, self.ends), None)
        base = next((name for name in END_NAMES if name in special), None)
        if end and end not in END_NAMES and base:
            yield (
                f"Documents end with {end}, which ends a turn in a folder of an instruct model. "
                f'Base models of its kind use {base}: set model.end_of_document = "{base}"'
            )

    @cached_property
    def reading_special_tokens(self) -> Any:
        """The library's tokenizer, set to read the spelling of a special token as that token."""
        backend = type(self.backend).from_str(self.backend.to_str())
        backend.encode_special_tokens = False
        return backend

    @property
    def text_size(self) -> int:
        ids = {id for id, token in self.added_tokens.items() if not token.special}
        ids |= set(self.backend.get_vocab(with_added_tokens=False).values())
        return max(ids | {*self.ends} | {self.bos_id or 0}) + 1

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        # "fast" leaves out the places of tokens in the text.
        encode = getattr(self.backend, "encode_batch_fast", self.backend.encode_batch)
        return (encoding.ids for encoding in encode(list(texts), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def _byte_lengths(self) -> dict[int, int]:
        added = self.added_tokens
        special = {id for id, token in added.items() if token.special} | {self.bos_id, self.eos_id}
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        plain = {id: name for name, id in vocabulary.items() if id not in added}
        kinds = _kinds(self.backend)
        if "ByteLevel" in kinds:
            # Each character of a token's name stands for a byte; added tokens are spelled out.
            lengths = {id: len(name) for id, name in plain.items()}
            lengths |= {id: len(token.content.encode()) for id, token in added.items()}
        else:
            lengths = self._decoded_lengths([*plain, *added])
            if "ByteFallback" in kinds:  # single bytes, which may not decode alone
                for id, name in plain.items():
                    if re.fullmatch("<0x[0-9A-F]{2}>", name):
                        lengths[id] = 1
        return {id: length for id, length in lengths.items() if id not in special}


def open_backend(path: Path) -> tuple[Any, list[str]]:
    """Open a `tokenizer.json` without the settings that make ids random or texts shorter.

    Returns:
        The library's tokenizer, and a note on the settings that were switched off.

    Raises:
        UserError: it is damaged.
    """
    from tokenizers import Tokenizer as Backend

    with rust_errors(path, "is not a tokenizer"):
        backend = Backend.from_buffer(path.read_bytes().removeprefix(BOM))
    model = backend.model
    affixes = [getattr(model, name, None) or "" for name in _AFFIXES]
    steps = [_growth(step) for step in (backend.normalizer, backend.decoder)]
    if (factor := max(*steps, *map(len, affixes))) > LONGER_TEXT:
        raise UserError(
            f"model.hf_assets_path: {path} may make a text {factor:,.0f} times as long; "
            f"{LONGER_TEXT} are allowed"
        )
    off = []
    if backend.truncation:
        off.append(f"truncation to {backend.truncation['max_length']} tokens")
        backend.no_truncation()
    if backend.padding:
        off.append("padding")
        backend.no_padding()
    for name in RANDOM:
        if value := getattr(model, name, None):
            off.append(f"{name} {value:g}")
            setattr(model, name, None)
    return backend, [f"{path}: switched off {', '.join(off)}"] if off else []


def _growth(component: Any) -> float:
    """The maximum factor by which a normalizer or decoder lengthens a text."""

    def factor(step: Mapping[str, Any]) -> float:
        kind = step.get("type")
        if kind == "Sequence":
            return math.prod(map(factor, step.get("normalizers") or step.get("decoders") or []))
        if kind == "Prepend":
            return 1.0 + len(step["prepend"])
        if kind != "Replace":
            return 1.0
        replaced = step["pattern"].get("String", "x")  # a pattern may match one character
        return max(1.0, len(step["content"]) / max(len(replaced), 1))

    return factor(json.loads(component.__getstate__())) if component else 1.0


def _add_tokens(backend: Any, path: Path, folder_tokens: FolderTokens) -> list[dict[str, Any]]:
    """Add the tokens that the files beside a tokenizer list, and the tokenizer lacks.

    Returns:
        Their entries, as in `tokenizer.json`.

    Raises:
        UserError: their ids are taken.
    """
    from tokenizers import AddedToken

    added_tokens = backend.get_added_tokens_decoder()
    roles = {name for role, name in folder_tokens.names.items() if name}
    entries = []
    for id, token in sorted(folder_tokens.added.items()):
        if id in added_tokens and added_tokens[id].content == token["content"]:
            continue
        fields = {"special": token["content"] in roles, "normalized": False} | token
        added = AddedToken(**fields)
        (backend.add_special_tokens if fields["special"] else backend.add_tokens)([added])
        actual_id = backend.token_to_id(token["content"])
        if actual_id != id:
            raise UserError(
                f"model.hf_assets_path: the files beside {path} give {token['content']!a} the id "
                f"{id}, but its place is {actual_id}"
            )
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        entries.append({"id": id, "content": added.content} | {f: getattr(added, f) for f in flags})
    return entries


def _kinds(backend: Any) -> set[str]:
    """The types of a tokenizer's decoders and pre-tokenizers."""
    kinds = set()
    for component in (backend.decoder, backend.pre_tokenizer):
        description = json.loads(component.__getstate__()) if component is not None else {}
        nested = [*description.get("decoders", []), *description.get("pretokenizers", [])]
        kinds |= {step["type"] for step in (description, *nested) if "type" in step}
    return kinds
