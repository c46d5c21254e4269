"""Tokenize text once, ahead of training:

    torchtitan tokenize --input 'corpus/*.jsonl.gz' --output tokens/ \\
        --tokenizer assets/hf/Llama-3.1-8B

then set `training.dataset_path = "tokens/"`. One process reads the files in sequence, without a
cache, and others tokenize. Every `--part` documents make a token file, written atomically. After an
interruption, the same command does only the missing parts. `NAME-report.json` beside the token
files counts documents, tokens, bytes, exact duplicates and bad documents.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from torchtitan.config.sections.schema import Model
from torchtitan.data.text.contents import Contents, base_of, sampled
from torchtitan.data.text.documents import DemoDocuments, counted
from torchtitan.data.text.files import REPORT, find_text_files
from torchtitan.data.text.opening import FileStamp
from torchtitan.data.text.retry import DataError
from torchtitan.data.text.tokenizer import build_tokenizer
from torchtitan.data.tokens.duplicates import count_duplicates
from torchtitan.data.tokens.tokenizing import Encoder, Item, Output, read_items, tokenize
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.text import count, plural, show_duration, show_rate

_REPORT_SECONDS = 30.0


class Meter:
    """Documents, rate and remaining time: a bar on a terminal, else a line every half minute."""

    def __init__(self, size: int):
        """
        Args:
            size: bytes of all files.
        """
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.bar = Progress(*columns, disable=not sys.stdout.isatty())
        self.task = self.bar.add_task("", total=size)
        self.size = size
        self.read = 0
        self.documents = 0
        self.tokens = 0
        self.start = self.reported = time.monotonic()

    def advance(self, size: int) -> None:
        """Count `size` bytes as read."""
        self.read += size

    def wrote(
        self,
        documents: int,
        tokens: int,
    ) -> None:
        """Count documents and tokens as written."""
        self.documents += documents
        self.tokens += tokens
        now = time.monotonic()
        rate = self.tokens / max(now - self.start, 1e-9)
        what = f"{plural(self.documents, 'document')}, {show_rate(rate)} tokens/s"
        self.bar.update(
            self.task,
            completed=self.read,
            description=what,
        )
        if self.bar.disable and now - self.reported > _REPORT_SECONDS:
            self.reported = now
            left = (self.size - self.read) * (now - self.start) / max(self.read, 1)
            print(
                f"{self.read / max(self.size, 1):.1%} read, {what}, {show_duration(left)} left",
                flush=True,
            )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files, folders or globs; or demo",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder for the token files",
    )
    parser.add_argument(
        "--tokenizer",
        default=Model().hf_assets_path,
        metavar="DIR",
        help="as model.hf_assets_path",
    )
    parser.add_argument(
        "--text-column",
        default="text",
        metavar="NAME",
        help="column or JSON key of the text (text)",
    )
    parser.add_argument(
        "--on-bad-document",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with a document that can't be decoded or has no text (stop)",
    )
    parser.add_argument(
        "--workers",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (all cores)",
    )
    parser.add_argument(
        "--part",
        type=count,
        default=100_000,
        metavar="N",
        help="documents per file (100000)",
    )
    parser.add_argument(
        "--name",
        default="tokens",
        help="prefix of the files' names (tokens)",
    )
    return parser


def _size_and_fingerprint(
    options: argparse.Namespace, stamps: Sequence[FileStamp]
) -> tuple[int, str]:
    """Size of the input in bytes, and a fingerprint of it."""
    if not stamps:
        demo = _demo(options)
        return demo.text_bytes, demo.contents.fingerprint
    reading = ""
    if (options.text_column, options.on_bad_document) != ("text", "stop"):
        reading = f"{options.text_column}: {options.on_bad_document}"
    contents = Contents.of(sampled(stamps, base_of(options.input)), None, reading)
    return sum(stamp.size for stamp in stamps), contents.fingerprint


def _demo(options: argparse.Namespace) -> DemoDocuments:
    return DemoDocuments(validation=options.input == ["demo_validation"])


def _demo_items(demo: DemoDocuments, meter: Meter) -> Iterator[Item]:
    for i, file in enumerate(demo.files):
        meter.advance(file.stat().st_size)
        yield Item(str(file), i + 1, demo[i])


def _report(output: Output, parts: int) -> dict[str, Any]:
    """The summary of all token files."""
    metas = [meta for i in range(parts) if (meta := output.meta(i))]
    documents = sum(meta["documents"] for meta in metas)
    tokens = sum(meta["tokens"] for meta in metas)
    size = sum(meta["bytes"] for meta in metas)
    bad = Counter[str]()
    for meta in metas:
        bad.update(meta["bad"])
    hashes = [output.file(i).with_suffix(".hashes") for i in range(parts)]
    again, again_bytes = count_duplicates(hashes)
    return {
        "documents": documents,
        "tokens": tokens,
        "bytes": size,
        "bytes_per_token": round(size / tokens, 4) if tokens else None,
        "duplicates": {"documents": again, "bytes": again_bytes},
        "skipped": dict(bad.most_common()),
        "first_skipped": [place for meta in metas for place in meta["places"]][:100],
        "files": parts,
    }


def _stamps(options: argparse.Namespace) -> list[FileStamp]:
    """The files of the input; empty for the demo text.

    Raises:
        UserError: there are none, or one can't be read.
    """
    if options.input in (["demo"], ["demo_validation"]):
        return []
    try:
        return [FileStamp.of(file) for file in find_text_files(options.input, "--input")]
    except DataError as error:
        raise UserError(f"--input: {error}") from None


def _write(
    options: argparse.Namespace,
    encoder: Encoder,
    output: Output,
    stamps: Sequence[FileStamp],
    size: int,
) -> int:
    """Write the missing token files; returns the number of parts."""
    try:
        with (meter := Meter(size)).bar:
            items = (
                read_items(stamps, options.text_column, meter.advance)
                if stamps
                else _demo_items(_demo(options), meter)
            )
            return tokenize(
                items,
                encoder,
                output,
                options.workers,
                meter.wrote,
            )
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, probably for lack of memory. Finished parts "
            "are kept: run the same command "
            "again with fewer --workers"
        ) from None
    except OSError as error:
        raise UserError(
            f"--output: can't write to {options.output}: {error}. Finished parts are kept"
        ) from error


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    stamps = _stamps(options)
    size, fingerprint = _size_and_fingerprint(options, stamps)
    common = {
        "source": fingerprint,
        "tokenizer": build_tokenizer(options.tokenizer).fingerprint,
        "part": options.part,
    }
    output = Output(
        options.output,
        options.name,
        options.part,
        common,
    )
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output: can't create the folder {options.output}: {error.strerror}"
        ) from error
    if done := sum(output.meta(i) is not None for i in output.existing()):
        print(f"{plural(done, 'part')} already done")
    encoder = Encoder(options.tokenizer, options.text_column, options.on_bad_document == "stop")
    report = _report(
        output,
        _write(
            options,
            encoder,
            output,
            stamps,
            size,
        ),
    )
    write_whole(options.output / f"{options.name}{REPORT}", json.dumps(report, indent=1).encode())
    skipped = Counter(report["skipped"])
    if not report["bytes"]:
        what = (
            f"all {report['documents']:,} documents are empty"
            if report["documents"]
            else "no documents"
        )
        raise UserError(
            f"--input: {', '.join(options.input)} holds no text: {what}; {counted(skipped)} skipped"
        )
    print(
        f"{report['tokens']:,} tokens of {plural(report['documents'], 'document')} in "
        f"{options.output}: "
        f"{report['bytes']:,} bytes, {report['bytes_per_token']} per token"
    )
    duplicates = report["duplicates"]
    print(
        f"{plural(duplicates['documents'], 'exact duplicate')} of other documents, "
        f"{duplicates['bytes']:,} bytes"
    )
    if skipped:
        print(f"Skipped {counted(skipped)}; the first is {report['first_skipped'][0]}")
    print(
        f"Train on them: --training.dataset_path {options.output} --model.hf_assets_path "
        f'"{options.tokenizer}"'
    )
    return 0
