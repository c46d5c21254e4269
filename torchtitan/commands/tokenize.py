"""Tokenize text once, ahead of training:

    torchtitan tokenize --input 'corpus/*.jsonl.gz' --output tokens/ --tokenizer assets/hf/Llama-3.1-8B

then set `training.dataset_path = "tokens/"`. Processes tokenize parts of `--part` documents each, and write each part
atomically. After an interruption, the same command does only the missing parts.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torchtitan.config.schema import Model
from torchtitan.data.documents import DemoDocuments, Documents, LocalDocuments, check_has_text
from torchtitan.data.token_files import write_token_file
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.utils.errors import UserError
from torchtitan.utils.text import count


@dataclass(frozen=True)
class Job:
    """What a worker process needs to tokenize a part."""

    input: tuple[str, ...]
    output: Path
    tokenizer: str
    part: int
    name: str

    def documents(self) -> Documents:
        if self.input in (("demo",), ("demo_validation",)):
            return DemoDocuments(validation=self.input == ("demo_validation",))
        return LocalDocuments(self.input, "--input")

    def file(self, index: int) -> Path:
        return self.output / f"{self.name}-{index:05d}.bin"


@cache
def _opened(job: Job) -> tuple[Documents, Tokenizer]:
    return job.documents(), build_tokenizer(job.tokenizer)


def _do_part(job: Job, index: int) -> None:
    """Tokenize part `index`."""
    documents, tokenizer = _opened(job)
    chosen = range(index * job.part, min((index + 1) * job.part, len(documents)))
    ids: Iterator[list[int]] = (tokenizer.encode_document(documents[i]) for i in chosen)
    about = {"source": documents.fingerprint, "first_document": chosen.start, "part": job.part}
    write_token_file(job.file(index), ids, tokenizer, about)


def _do_parts(job: Job, todo: list[int], workers: int, advance: Callable[[], None]) -> None:
    """Tokenize the parts `todo`, in this process or in several `workers`."""
    try:
        if workers == 1:
            for index in todo:
                _do_part(job, index)
                advance()
            return
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("forkserver")) as pool:
            try:
                for part in as_completed([pool.submit(_do_part, job, index) for index in todo]):
                    part.result()
                    advance()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, probably for lack of memory. Finished parts are kept: run the same command "
            "again with fewer --workers"
        ) from None
    except OSError as error:
        raise UserError(f"--output: can't write to {job.output}: {error}. Finished parts are kept") from error


def _is_done(file: Path, expected: dict[str, Any]) -> bool:
    """Whether a part is complete.

    Raises:
        UserError: it was made from another input or tokenizer, or with another part size.
    """
    try:
        meta = json.loads(file.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return False
    if any(meta.get(key) != value for key, value in expected.items()):
        raise UserError(
            f"--output: {file} was made from another input, tokenizer or --part; choose an empty folder or another "
            "--name"
        )
    return file.is_file()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", required=True, nargs="+", metavar="PATH", help="files, folders or globs; or demo")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the token files")
    parser.add_argument("--tokenizer", default=Model().hf_assets_path, metavar="DIR", help="as model.hf_assets_path")
    parser.add_argument("--workers", type=count, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)")
    parser.add_argument("--part", type=count, default=100_000, metavar="N", help="documents per file (100000)")
    parser.add_argument("--name", default="tokens", help="prefix of the files' names (tokens)")
    return parser


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    job = Job(tuple(options.input), options.output, options.tokenizer, options.part, options.name)
    documents, tokenizer = job.documents(), build_tokenizer(job.tokenizer)
    check_has_text(documents, "--input", ", ".join(job.input))
    try:
        job.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: can't create the folder {job.output}: {error.strerror}") from error
    parts = range(-(-len(documents) // job.part))
    common = {"source": documents.fingerprint, "tokenizer": tokenizer.fingerprint, "part": job.part}
    todo = [i for i in parts if not _is_done(job.file(i), common)]
    if skipped := len(parts) - len(todo):
        print(f"{skipped} of {len(parts)} parts are already done")

    from rich.progress import Progress

    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("tokenizing", total=len(parts), completed=skipped)
        _do_parts(job, todo, min(options.workers, max(1, len(todo))), lambda: progress.advance(bar))
    total = sum(json.loads(job.file(i).with_suffix(".json").read_text())["tokens"] for i in parts)
    print(f"{total:,} tokens of {len(documents):,} documents in {job.output}")
    print(f'Train on them: --training.dataset_path {job.output} --model.hf_assets_path "{options.tokenizer}"')
    return 0
