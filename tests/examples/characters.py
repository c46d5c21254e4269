"""A tokenizer of single characters.

torchtitan train CONFIG.toml --experimental.custom_import characters --model.tokenizer characters
"""

import string
from collections.abc import Sequence
from pathlib import Path

from torchtitan.config.registry import Section, tokenizers
from torchtitan.data.encode.tokenizer import Tokenizer


class Keys(Section):
    alphabet: str = string.printable
    """The characters, in the order of their ids. Others become the last one."""


@tokenizers.register("characters", Keys)
class Characters(Tokenizer):
    def __init__(self, hf_assets_path: Path, keys: Keys):
        self.characters = keys.alphabet
        self.ids = {character: i for i, character in enumerate(keys.alphabet)}
        self.fingerprint = f"characters {keys.alphabet}"
        self.bos_id = None
        self.eos_id = len(keys.alphabet)
        self.vocab_size = len(keys.alphabet) + 1

    def _ids(self, text: str) -> list[int]:
        return [self.ids.get(character, len(self.characters) - 1) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("<end>" if i == self.eos_id else self.characters[i] for i in ids)
