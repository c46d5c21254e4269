"""SentencePiece's models, such as the `tokenizer.model` of Llama 2 and Mistral: read by the library
`sentencepiece`.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from torchtitan.data.encode.base import Tokenizer, rust_errors
from torchtitan.data.encode.special_tokens import (
    CONFIG,
    read_folder_tokens,
    read_json,
    resolve_ends,
)
from torchtitan.utils.errors import UserError

_CLASSES = ("Llama", "CodeLlama", "Gemma", "PreTrained")
"""Prefixes of the classes that keep the ids of the model; others shift them."""
_CONVERT = (
    "Make a tokenizer.json of the folder with transformers: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
_HEAD = 64
"""Bytes that distinguish a protocol buffer from text."""


def is_sentencepiece(path: Path) -> bool:
    """Whether a file is a protocol buffer, as SentencePiece's models are, rather than text."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head.startswith(b"\n") and any(byte < 9 or 13 < byte < 32 for byte in head)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model."""

    def __init__(self, path: Path, end_of_document: str | None = None):
        """
        Args:
            end_of_document: the token that ends documents, instead of the folder's.

        Raises:
            UserError: the library is missing, the file is damaged, or it lacks a token.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise UserError(
                f"model.hf_assets_path: {path} is a SentencePiece model, which the library "
                f"sentencepiece reads: pip install 'titan-pretrain[sentencepiece]'. {_CONVERT}"
            ) from None
        super().__init__(path)
        self.backend = SentencePieceProcessor()
        with rust_errors(path, "is not a SentencePiece model"):
            self.backend.LoadFromFile(str(path))
        self._check_class(read_json(path.with_name(CONFIG)))
        self.vocab_size = self.backend.vocab_size()
        folder_tokens = read_folder_tokens(path)
        self._check_added(folder_tokens.added)
        begin, end = (
            self.backend.id_to_piece(id) if id >= 0 else None
            for id in (self.backend.bos_id(), self.backend.eos_id())
        )
        self.set_ends(
            resolve_ends(path, folder_tokens, (begin, end), self._token_id, end_of_document)
        )
        self.notes = tuple(folder_tokens.notes)

    def _check_class(self, config: dict[str, object]) -> None:
        """
        Raises:
            UserError: the ids of the class in `tokenizer_config.json` may differ from the model's.
        """
        kind = str(config.get("tokenizer_class") or _CLASSES[0])
        if not kind.startswith(_CLASSES):
            raise UserError(
                f"model.hf_assets_path: {self.path} is a SentencePiece model of the class {kind}, "
                "whose ids may differ from the model's. " + _CONVERT
            )
        prefixed = self.backend.id_to_piece(self.backend.encode("a")[0]).startswith("\u2581")
        if config.get("add_prefix_space") is False and prefixed:
            raise UserError(
                f"model.hf_assets_path: {self.path} puts a space before each text, and "
                f"{CONFIG} beside it has add_prefix_space = false. {_CONVERT}"
            )

    def _check_added(self, added: dict[int, dict[str, object]]) -> None:
        for id, token in added.items():
            name = token["content"]
            if id >= self.vocab_size or self.backend.id_to_piece(id) != name:
                raise UserError(
                    f"model.hf_assets_path: the files beside {self.path} add the token {name!a} "
                    f"({id}), which it doesn't have. " + _CONVERT
                )

    def _token_id(self, name: str) -> int | None:
        id: int = self.backend.piece_to_id(name)
        return id if self.backend.id_to_piece(id) == name else None

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text)

    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        return self.backend.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        texts = []
        for special, group in groupby(map(int, ids), self.backend.is_control):
            tokens = list(group)
            names = "".join(map(self.backend.id_to_piece, tokens)) if special else ""
            texts.append(names or self.backend.decode(tokens))
        return "".join(texts)

    def _byte_lengths(self) -> dict[int, int]:
        lengths = {}
        for id in range(self.vocab_size):
            piece = self.backend.id_to_piece(id).replace("\u2581", " ")
            if not self.backend.is_control(id) and id not in (self.bos_id, self.eos_id):
                lengths[id] = 1 if self.backend.is_byte(id) else len(piece.encode())
        return lengths
