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
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from torchtitan.config.sections.schema import Model
from torchtitan.data.text.corpus import Corpus
from torchtitan.data.text.documents import counted
from torchtitan.data.text.files import REPORT
from torchtitan.data.text.tokenizer import build_tokenizer
from torchtitan.data.tokens.duplicates import count_duplicates
from torchtitan.data.tokens.tokenizing import Encoder, Output, tokenize
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.meter import Meter
from torchtitan.utils.text import count, plural, show_rate


class _Progress:
    """Counts documents and tokens as they are written."""

    def __init__(self, size: int):
        self.meter = Meter(size)
        self.documents = 0
        self.tokens = 0

    def wrote(
        self,
        documents: int,
        tokens: int,
    ) -> None:
        self.documents += documents
        self.tokens += tokens
        rate = show_rate(self.tokens / self.meter.seconds)
        self.meter.show(f"{plural(self.documents, 'document')}, {rate} tokens/s")


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


def _write(
    options: argparse.Namespace,
    encoder: Encoder,
    output: Output,
    corpus: Corpus,
) -> int:
    """Write the missing token files; returns the number of parts."""
    try:
        progress = _Progress(corpus.size)
        with progress.meter.bar:
            return tokenize(
                corpus.items(progress.meter.advance),
                encoder,
                output,
                options.workers,
                progress.wrote,
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
    stop = options.on_bad_document == "stop"
    corpus = Corpus(
        options.input,
        "--input",
        options.text_column,
        stop=stop,
    )
    common = {
        "source": corpus.fingerprint,
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
    encoder = Encoder(options.tokenizer, options.text_column, stop)
    report = _report(output, _write(options, encoder, output, corpus))
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
