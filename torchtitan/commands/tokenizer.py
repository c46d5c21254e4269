"""Train a byte-level byte-pair tokenizer on your own text:

    torchtitan tokenizer 'corpus/*.jsonl.gz' --vocab-size 32000 --output my_tokenizer/

then set `model.hf_assets_path = "my_tokenizer/"`. The folder is a Hugging Face tokenizer, with
begin-of-text and end-of-text tokens. The same documents give the same tokenizer, whatever their
order. The text is read once, without a cache.
"""

import argparse
from pathlib import Path
from typing import get_args

from torchtitan.data.encode.chat import MessageTexts
from torchtitan.data.encode.tokenizer_training import (
    BOS,
    CHAT_TEMPLATES,
    EOS,
    Pattern,
    Sample,
    TokenizerSummary,
    character_tokenizer,
    train_tokenizer,
)
from torchtitan.data.read.corpus import Corpus
from torchtitan.data.read.documents import show_bad_documents
from torchtitan.utils.argument_types import command_parser, count, path_or_url, share, size
from torchtitan.utils.errors import UserError, reason
from torchtitan.utils.meter import Meter
from torchtitan.utils.wording import plural, show_size


def parser() -> argparse.ArgumentParser:
    parser = command_parser("tokenizer", __doc__)
    add = parser.add_argument
    add(
        "input",
        type=path_or_url,
        nargs="+",
        metavar="PATH",
        help="files, folders or globs, as training.dataset_path; or demo",
    )
    add("--vocab-size", type=count, metavar="N", help="entries, special tokens included")
    add(
        "--characters", action="store_true", help="instead: an entry for each character of the text"
    )
    add(
        "--end-of-text",
        action="store_true",
        help=f"with --characters: also {EOS}, which ends each document",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="folder for the tokenizer")
    add(
        "--text-column",
        default="text",
        metavar="NAME",
        help="column or JSON key of the text (text)",
    )
    add(
        "--messages-column",
        metavar="NAME",
        help="train on the texts of conversations in this column or JSON key; the chat template is "
        "chatml unless given",
    )
    add(
        "--on-bad-document",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with a document that can't be decoded or has no text (stop)",
    )
    add(
        "--sample",
        type=_sample,
        metavar="SIZE",
        help="train on some documents, chosen by hash: 5%% of them, or 2GB of text (all)",
    )
    add(
        "--seed",
        type=lambda text: count(text, fewest=0),
        default=0,
        metavar="N",
        help="chooses another sample (0)",
    )
    add(
        "--pattern",
        choices=get_args(Pattern),
        default="llama3",
        help="how to split text into words: up to three digits together (llama3), "
        "each by itself (qwen2), or all (gpt2)",
    )
    add(
        "--special-token",
        action="append",
        default=[],
        metavar="TOKEN",
        help=f"a special token beside {BOS} and {EOS}; may be repeated",
    )
    add(
        "--chat-template",
        choices=tuple(CHAT_TEMPLATES),
        help="write a chat template, and add its special tokens",
    )
    add("--force", action="store_true", help="replace a tokenizer in the folder")
    return parser


def _sample(text: str) -> Sample:
    return Sample(share=share(text)) if text.endswith("%") else Sample(bytes=size(text))


def main(argv: list[str]) -> int:
    print(f"Train with it: {run(argv)}")
    return 0


def run(argv: list[str]) -> str:
    """Train the tokenizer; returns the flags that use it."""
    options = _parse(argv)
    chat = MessageTexts() if options.messages_column else None
    corpus = Corpus(
        options.input,
        "PATH",
        options.messages_column or options.text_column,
        chat=chat,
        stop=options.on_bad_document == "stop",
    )
    _make_folder(options)
    if sample := options.sample:
        sample = Sample(sample.share, sample.bytes, options.seed)
    meter = Meter(corpus.size)

    def advance(size: int) -> None:
        meter.advance(size)
        meter.show(f"of {show_size(corpus.size)}")

    try:
        with meter.bar:
            summary = (
                character_tokenizer(
                    corpus, options.output, end_of_text=options.end_of_text, advance=advance
                )
                if options.characters
                else train_tokenizer(
                    corpus,
                    options.output,
                    options.vocab_size,
                    pattern=options.pattern,
                    special_tokens=options.special_token,
                    chat_template=options.chat_template or ("chatml" if chat else None),
                    sample=sample,
                    advance=advance,
                )
            )
    except OSError as error:
        raise UserError(f"--output: can't write to {options.output}: {reason(error)}") from error
    _report(options, corpus, summary)
    messages = f" --training.messages_column {options.messages_column}" if chat else ""
    return f"--model.hf_assets_path {options.output}{messages}"


_OF_PAIRS = ("vocab_size", "special_token", "sample", "chat_template", "messages_column")
"""Options that a tokenizer of characters doesn't have."""


def _parse(argv: list[str]) -> argparse.Namespace:
    ours = parser()
    options = ours.parse_args(argv)
    if options.characters:
        for name in _OF_PAIRS:
            if getattr(options, name):
                ours.error(f"--{name.replace('_', '-')}: not with --characters")
    elif options.end_of_text:
        ours.error("--end-of-text: only with --characters; others always have it")
    elif options.vocab_size is None:
        ours.error("give --vocab-size N, or --characters for an entry per character")
    return options


def _make_folder(options: argparse.Namespace) -> None:
    """
    Raises:
        UserError: the folder can't be created, or already has a tokenizer.
    """
    if (options.output / "tokenizer.json").exists() and not options.force:
        raise UserError(
            f"--output: {options.output} has a tokenizer, which token files and checkpoints may "
            "depend on; choose another folder, or --force replaces it"
        )
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output: can't create the folder {options.output}: {error.strerror}"
        ) from error


def _report(options: argparse.Namespace, corpus: Corpus, summary: TokenizerSummary) -> None:
    read = f"{plural(summary.documents, 'document')}, {summary.bytes:,} bytes"
    print(f"Read {read}, from {corpus.sources()}")
    if options.sample:
        print(
            f"Trained on {plural(summary.sampled_documents, 'document')} of them, "
            f"{summary.sampled_bytes:,} bytes, chosen by hash with --seed {options.seed}"
        )
    if corpus.skip_counts:
        print(f"Skipped {show_bad_documents(corpus.skip_counts)}")
    print(f"{summary.vocab_size:,} entries in {options.output}")
    if options.characters and not options.end_of_text and summary.documents > 1:
        print("No token ends a document: each follows the one before. --end-of-text adds one")
    if summary.vocab_size < (options.vocab_size or 0):
        print(
            f"That is fewer than --vocab-size {options.vocab_size:,}: the text has no further "
            "pairs to merge"
        )
