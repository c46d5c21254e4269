"""Tokenize text once, ahead of training:

    torchtitan tokenize --input 'corpus/*.jsonl.gz' --output tokens/ \\
        --tokenizer assets/hf/Llama-3.1-8B

then set `training.dataset_path = "tokens/"`. One process reads the files in sequence, without a
cache, and others tokenize. Every `--part` documents make a token file, written atomically. After an
interruption, the same command does only the missing parts. `NAME-report.json` beside the token
files counts documents, tokens, bytes and bad documents.
"""

import argparse
import json
import os
import re
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.config.sections.schema import Model
from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.order.packing import PackingStats
from torchtitan.data.read.corpus import Corpus, hash_text
from torchtitan.data.read.documents import show_bad_documents
from torchtitan.data.read.files import REPORT
from torchtitan.data.tokens.encoding import Encoder
from torchtitan.data.tokens.tokenizing import (
    HeldOutSplit,
    Output,
    is_complete,
    split_alone,
    tokenize,
)
from torchtitan.utils.argument_types import command_parser, count, path_or_url, share
from torchtitan.utils.errors import UserError, reason
from torchtitan.utils.files import write_whole
from torchtitan.utils.formats import read_json_object
from torchtitan.utils.meter import Meter
from torchtitan.utils.wording import cut, plural, show_rate


class _Progress:
    """Counts documents and tokens as they are written."""

    def __init__(self, size: int):
        self.meter = Meter(size)
        self.documents = 0
        self.tokens = 0

    def wrote(self, documents: int, tokens: int) -> None:
        self.documents += documents
        self.tokens += tokens
        rate = show_rate(self.tokens / self.meter.seconds)
        self.meter.show(f"{plural(self.documents, 'document')}, {rate} tokens/s")


def parser() -> argparse.ArgumentParser:
    parser = command_parser("tokenize", __doc__)
    add = parser.add_argument
    add(
        "--input",
        type=path_or_url,
        required=True,
        nargs="+",
        metavar="PATH",
        help="files, folders or globs; or demo",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="folder for the token files")
    add(
        "--tokenizer",
        type=path_or_url,
        default=Model().hf_assets_path,
        metavar="DIR",
        help="as model.hf_assets_path",
    )
    add("--end-of-document", metavar="TOKEN", help="as model.end_of_document")
    add("--chat-template", type=path_or_url, metavar="FILE", help="as model.chat_template")
    column = parser.add_mutually_exclusive_group()
    column.add_argument(
        "--text-column",
        default="text",
        metavar="NAME",
        help="column or JSON key of the text (text)",
    )
    column.add_argument(
        "--messages-column",
        metavar="NAME",
        help="column or JSON key of conversations, instead of text: rendered by the tokenizer's "
        "chat template, with the assistant's turns alone predicted",
    )
    add(
        "--on-bad-document",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with a document that can't be decoded or has no text (stop)",
    )
    add(
        "--held-out",
        type=share,
        metavar="SHARE",
        help="write this share of the documents, such as 0.5%%, to DIR-held-out, for validation; "
        "chosen by a hash of the text; of a single document, its last characters",
    )
    add(
        "--best-fit",
        type=partial(count, fewest=2, most=2**30),
        metavar="SEQ_LEN",
        help="pack documents into rows of SEQ_LEN tokens, which each begin with a document, as "
        "training.packing does; training then needs that seq_len",
    )
    add(
        "--workers",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (all cores)",
    )
    add("--part", type=count, default=100_000, metavar="N", help="documents per file (100000)")
    add("--name", type=_file_name, default="tokens", help="prefix of the files' names (tokens)")
    return parser


def _file_name(text: str) -> str:
    if not re.fullmatch(r"[\w-][\w.-]*", text):
        raise argparse.ArgumentTypeError(
            f"{cut(text, 40)}: must be letters, digits, '_', '-' and '.', without one at the start"
        )
    return text


def _report(output: Output, file_count: int, corpus: Corpus) -> dict[str, Any]:
    """Write and return the summary of all token files."""
    metas = [meta for i in range(file_count) if (meta := output.meta(i))]
    documents = sum(meta["documents"] for meta in metas)
    tokens = sum(meta["tokens"] for meta in metas)
    predicted = sum(meta.get("predicted", meta["tokens"]) for meta in metas)
    size = sum(meta["bytes"] for meta in metas)
    bad = Counter[str]()
    packing = PackingStats()
    for meta in metas:
        bad.update(meta["bad"])
        packing += PackingStats(**meta.get("packing", {}))
    report = {
        "documents": documents,
        "tokens": tokens,
        **({"predicted": predicted} if predicted < tokens else {}),
        "bytes": size,
        "bytes_per_token": round(size / tokens, 4) if tokens else None,
        "skipped": dict(bad.most_common()),
        "first_skipped": [location for meta in metas for location in meta["places"]][:100],
        "files": file_count,
        "input_files": len(corpus.stamps),
        "ignored": corpus.ignored.in_words().removeprefix("; "),
    }
    if output.best_fit:
        report["packing"] = vars(packing)
    write_whole(output.folder / f"{output.name}{REPORT}", json.dumps(report, indent=1).encode())
    return report


def _write(
    options: argparse.Namespace,
    encoder: Encoder,
    output: Output,
    split: HeldOutSplit | None,
    corpus: Corpus,
    chat: Chat | None,
) -> int:
    """Write the missing token files; returns the number of parts."""
    try:
        progress = _Progress(corpus.size)
        with progress.meter.bar:
            items = corpus.items(progress.meter.advance)
            tail: int | None = None
            if split and not encoder.messages:
                items, tail = split_alone(items, encoder.column, split.share)
            if split and tail is not None:
                split = replace(split, tail=tail)
                print(f"Of the only document, the last {split.share:.3%} are held out")
            else:
                _check_texts(corpus, chat, split)
            for target in (output, split.output) if split else (output,):
                target.folder.mkdir(parents=True, exist_ok=True)
            return tokenize(
                items, encoder, output, options.workers, advance=progress.wrote, split=split
            )
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, probably for lack of memory. Finished parts are kept: "
            "run the same command again with fewer --workers"
        ) from None
    except OSError as error:
        raise UserError(
            f"--output: can't write to {options.output}: {reason(error)}. Finished parts are kept"
        ) from error


def _check_texts(corpus: Corpus, chat: Chat | None, split: HeldOutSplit | None) -> None:
    """Check that there is text to write, and to hold out. Reads until there is.

    Raises:
        UserError: there is none.
    """
    sides = {False, True} if split else {False}
    """Sides without a document so far: True is the held-out one."""
    count = 0
    for text, hash, _ in corpus.texts(lambda size: None):
        count += 1
        if chat:
            hash = hash_text(chat.rendered(text).text)[0]
        if text:
            sides.discard(bool(split and split.choose(np.array([hash], np.uint64))[0]))
        if not sides:
            return
    skipped = f"{show_bad_documents(corpus.skip_counts)} skipped"
    if split and len(sides) == 1:
        which = "none" if True in sides else "each"
        raise UserError(
            f"--held-out: {which} of {plural(count, 'document')} is held out, {skipped}; choose "
            "another share"
        )
    text = f"all {count:,} documents are empty" if count else "no documents"
    raise UserError(f"--input: {', '.join(corpus.paths)} holds no text: {text}; {skipped}")


def main(argv: list[str]) -> int:
    print(f"Train on them: {run(argv)}")
    return 0


def run(argv: list[str]) -> str:
    """Write the token files that are missing; returns the flags to train on all of them."""
    options = parser().parse_args(argv)
    stop = options.on_bad_document == "stop"
    column = options.messages_column or options.text_column
    tokenizer = build_tokenizer(
        options.tokenizer, None, options.end_of_document, options.chat_template
    )
    messages = options.messages_column is not None
    chat = Chat(tokenizer, "--messages-column") if messages else None
    corpus = Corpus(options.input, "--input", column, chat=chat, stop=stop)
    if options.best_fit:
        tokenizer.end_for("--best-fit")
    for note in (*tokenizer.notes, tokenizer.describe()):
        print(note)
    common = {
        "source": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "part": options.part,
        "held_out": options.held_out,
        "best_fit": options.best_fit,
        "chat_template": chat.fingerprint if chat else None,
    }
    if chat:
        common["stop_ids"] = list(tokenizer.stop_ids)
    output = Output(options.output, options.name, options.part, common, options.best_fit)
    split = None
    if options.held_out:
        apart = Output(_held_out_folder(options.output), options.name, options.part, common)
        split = HeldOutSplit(options.held_out, apart)
    if complete_count := sum(is_complete(i, output, split) for i in output.existing()):
        print(f"{plural(complete_count, 'part')} already done")
    encoder = Encoder(tokenizer.origin, column, stop, chat is not None)
    file_count = complete_count
    if not _is_whole(split.output if split else output, complete_count):
        file_count = _write(options, encoder, output, split, corpus, chat)
    report = _report(output, file_count, corpus)
    print(f"Read {corpus.sources()}")
    _print_report(output.folder, report)
    train = f"--training.dataset_path {output.folder}"
    if split:
        split_report = _report(split.output, file_count, corpus)
        print(f"Held out: {_sizes(split_report, split.output.folder)}")
        train += f" --validation.enable --validation.dataset_path {split.output.folder}"
    if options.best_fit:
        train += f" --training.seq_len {options.best_fit}"
    if options.end_of_document is not None:
        train += f' --model.end_of_document "{options.end_of_document}"'
    return f'{train} --model.hf_assets_path "{options.tokenizer}"'


def _held_out_folder(folder: Path) -> Path:
    if folder.name in ("", ".."):
        folder = folder.resolve()  # has a name then
    return folder.with_name(f"{folder.name}-held-out")


def _is_whole(output: Output, file_count: int) -> bool:
    """Whether an earlier run finished with the same number of files. Its report is written last."""
    try:
        report = read_json_object(output.folder / f"{output.name}{REPORT}")
    except (OSError, ValueError):
        return False
    return bool(report.get("files") == file_count)


def _sizes(report: dict[str, Any], folder: Path) -> str:
    return (
        f"{report['tokens']:,} tokens of {plural(report['documents'], 'document')} in {folder}: "
        f"{report['bytes']:,} bytes, {report['bytes_per_token']} per token"
    )


def _print_report(folder: Path, report: dict[str, Any]) -> None:
    print(_sizes(report, folder))
    if "predicted" in report:
        print(f"{report['predicted']:,} of these tokens are predicted")
    if "packing" in report:
        print(f"Best-fit packing: {PackingStats(**report['packing'])}")
    if skipped := Counter(report["skipped"]):
        print(f"Skipped {show_bad_documents(skipped)}; the first is {report['first_skipped'][0]}")
