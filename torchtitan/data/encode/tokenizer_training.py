"""Trains a byte-level byte-pair tokenizer (Sennrich et al., arXiv:1508.07909) on a corpus.

    documents -> a sample, by hash of the text -> words -> the most frequent pairs, merged in turn

The library `tokenizers` counts words and merges pairs. The result depends on the documents alone:
neither on their order nor on the number of cores. Imports no torch.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchtitan.data.encode.base import pieces
from torchtitan.data.encode.tiktoken_files import ENCODINGS
from torchtitan.data.read.corpus import Corpus, uniform
from torchtitan.data.read.documents import show_bad_documents
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_all

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
BYTES = 256
"""Entries that every vocabulary has: one for each byte, so that it can encode any text."""

Pattern = Literal["llama3", "qwen2", "gpt2"]
CHAT_TEMPLATES = {
    "chatml": (
        ("<|im_start|>", "<|im_end|>"),
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
        "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    )
}
"""Special tokens and Jinja source of each template. Text inside `generation` is predicted, also by
transformers.
"""


@dataclass(frozen=True)
class Sample:
    """The documents to train on, chosen by hash: the same in any order and any number of files."""

    share: float | None = None
    """Fraction of the documents."""
    bytes: int | None = None
    """Bytes of text, reached by whole documents, which are held in memory."""
    seed: int = 0

    def rank(self, hash: int) -> float:
        return uniform(hash, f"seed {self.seed}")


@dataclass
class TokenizerSummary:
    """Counts of the text that a tokenizer was trained on, and its size."""

    documents: int = 0
    """Documents of the corpus."""
    bytes: int = 0
    sampled_documents: int = 0
    sampled_bytes: int = 0
    vocab_size: int = 0
    """Entries; fewer than requested if the pairs to merge run out."""


def train_tokenizer(
    corpus: Corpus,
    output: Path,
    vocab_size: int,
    *,
    pattern: Pattern = "llama3",
    special_tokens: Sequence[str] = (),
    chat_template: str | None = None,
    sample: Sample | None = None,
    advance: Callable[[int], None] = lambda size: None,
) -> TokenizerSummary:
    """Write `tokenizer.json` and `tokenizer_config.json` to the folder `output`.

    Begin-of-text, end-of-text and `special_tokens` have the first ids.

    Args:
        vocab_size: largest number of entries, special tokens included.
        pattern: the model whose pattern splits text into words.
        special_tokens: beside `BOS` and `EOS`.
        chat_template: a name of `CHAT_TEMPLATES`, whose special tokens are added.
        sample: None trains on all documents.
        advance: called with the number of bytes of every read.

    Raises:
        UserError: the corpus can't be read or has no text, a special token could be the word of a
            text, or `vocab_size` is too small.
        OSError: writing fails.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    chat_tokens, template = CHAT_TEMPLATES[chat_template] if chat_template else ((), None)
    special = [BOS, EOS, *chat_tokens, *special_tokens]
    words = _words(pattern)
    _check(special, words, vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    summary = TokenizerSummary()
    texts = _sampled(corpus.texts(advance), sample, summary)
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    _check_has_text(corpus, summary)
    summary.vocab_size = tokenizer.get_vocab_size()
    content = json.loads(tokenizer.to_str()) | {"post_processor": post_processor(BOS, 0)}
    settings: dict[str, Any] = {"chat_template": template} if template else {}
    _write(output, content, tokenizer_config(settings, BOS, EOS))
    return summary


def character_tokenizer(
    corpus: Corpus,
    output: Path,
    *,
    end_of_text: bool = False,
    advance: Callable[[int], None] = lambda size: None,
) -> TokenizerSummary:
    """Write a tokenizer with an entry for each character of the corpus.

    Characters are numbered from 0 by code point, so the ids of a text match nanoGPT's `prepare.py`
    for characters. There is no begin-of-text.

    Args:
        end_of_text: add `EOS` as the last entry; else documents follow each other without a token
            in between.

    Raises:
        UserError: the corpus can't be read or has no text.
        OSError: writing fails.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    summary = TokenizerSummary()
    characters: set[str] = set()
    for text in _sampled(corpus.texts(advance), None, summary):
        characters.update(text)
    _check_has_text(corpus, summary)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(sorted(characters))}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    if end_of_text:
        tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    summary.vocab_size = tokenizer.get_vocab_size()
    _write(
        output,
        json.loads(tokenizer.to_str()),
        tokenizer_config({}, None, EOS if end_of_text else None),
    )
    return summary


def _write(output: Path, content: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    write_all(
        {
            output / "tokenizer.json": json.dumps(content, ensure_ascii=False).encode(),
            output / "tokenizer_config.json": (json.dumps(config, indent=1) + "\n").encode(),
        }
    )


def _words(pattern: Pattern) -> "PreTokenizer":
    """Splits text into words, within which pairs are merged."""
    from tokenizers import Regex, pre_tokenizers

    if pattern == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    expression = ENCODINGS["Llama 3" if pattern == "llama3" else "Qwen"].pattern
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _check(special: Sequence[str], words: "PreTokenizer", vocab_size: int) -> None:
    """
    Raises:
        UserError: a special token can't be one, or `vocab_size` is too small.
    """
    for i, token in enumerate(special):
        if token in special[:i]:
            raise UserError(f"--special-token: {token!r} is there twice")
        if len(words.pre_tokenize_str(token)) < 2:
            raise UserError(
                f"--special-token: {token!r} could be a word of a text, whose ids would then be "
                f"the special token's; enclose it in marks, such as <|{token.strip() or 'name'}|>"
            )
    if vocab_size < BYTES + len(special):
        raise UserError(
            f"--vocab-size: {vocab_size:,} is too small: {BYTES} bytes and {len(special)} special "
            f"tokens need {BYTES + len(special)}"
        )


def _check_has_text(corpus: Corpus, summary: TokenizerSummary) -> None:
    """
    Raises:
        UserError: no text was read, or none is in the sample.
    """
    names = ", ".join(corpus.paths)
    if not summary.bytes:
        what = (
            f"all {summary.documents:,} documents are empty"
            if summary.documents
            else "no documents"
        )
        raise UserError(
            f"{corpus.key}: {names} holds no text: {what}; "
            f"{show_bad_documents(corpus.skip_counts)} skipped"
        )
    if not summary.sampled_bytes:
        raise UserError(
            f"--sample: none of the {summary.documents:,} documents of {names} with text is in the "
            "sample; choose a larger one"
        )


def _sampled(
    texts: Iterable[tuple[str, int, int]], sample: Sample | None, summary: TokenizerSummary
) -> Iterator[str]:
    """The texts of the sample. Counts all texts and the sample."""

    def read() -> Iterator[tuple[str, int, int]]:
        for text, hash, size in texts:
            summary.documents += 1
            summary.bytes += size
            if sample is None or sample.share is None or sample.rank(hash) < sample.share:
                yield text, hash, size

    sample_texts = read()
    if sample is not None and sample.bytes is not None:
        sample_texts = _lowest(sample_texts, sample)
    for text, _, size in sample_texts:
        summary.sampled_documents += 1
        summary.sampled_bytes += size
        yield text


def _lowest(
    texts: Iterable[tuple[str, int, int]], sample: Sample
) -> Iterator[tuple[str, int, int]]:
    """The texts of lowest rank that together reach the sample's bytes."""
    assert sample.bytes is not None
    highest: list[tuple[float, int, int, str]] = []
    sample_bytes = 0
    for number, (text, hash, size) in enumerate(texts):
        entry = (-sample.rank(hash), number, size, text)
        if sample_bytes >= sample.bytes and entry < highest[0]:
            continue
        heapq.heappush(highest, entry)
        sample_bytes += size
        while sample_bytes - highest[0][2] >= sample.bytes:
            sample_bytes -= heapq.heappop(highest)[2]
    for _, _, size, text in sorted(highest, key=lambda entry: entry[:2], reverse=True):
        yield text, 0, size


def post_processor(bos: str | None, bos_id: int | None) -> dict[str, Any] | None:
    """The entry of `tokenizer.json` that adds only begin-of-text, as training does if the tokenizer
    has it.
    """
    if bos is None:
        return None
    pieces_of_pair: list[dict[str, Any]] = []
    for type_id, sequence in enumerate("AB"):
        pieces_of_pair.append({"SpecialToken": {"id": bos, "type_id": type_id}})
        pieces_of_pair.append({"Sequence": {"id": sequence, "type_id": type_id}})
    return {
        "type": "TemplateProcessing",
        "single": pieces_of_pair[:2],
        "pair": pieces_of_pair,
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def tokenizer_config(
    config: Mapping[str, Any], bos: str | None, eos: str | None, max_length: int | None = None
) -> dict[str, Any]:
    """`tokenizer_config.json`, naming the class that uses `tokenizer.json` as it is.

    Args:
        config: its contents so far, whose tokens stay as they are.
        max_length: maximum number of tokens, unless `config` sets it.
    """
    class_fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bos is not None,
        "add_eos_token": False,
    }
    defaults: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if max_length is not None:
        defaults["model_max_length"] = max_length
    user_fields = {
        key: value["content"] if key.endswith("_token") and isinstance(value, dict) else value
        for key, value in config.items()
        if key != "auto_map"
    }
    return defaults | {"bos_token": bos, "eos_token": eos} | user_fields | class_fields
