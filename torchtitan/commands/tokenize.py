"""Tokenize text once, so that training reads ids:

    torchtitan tokenize --input 'corpus/*.jsonl.gz' --output tokens/ --tokenizer assets/hf/Llama-3.1-8B

then `training.dataset_path = "tokens/"`. Work is cut into parts of `--part` documents, spread over processes. A part is
written atomically; the same command after an interruption does only what is missing.
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

from torchtitan.data.documents import DemoDocuments, Documents, LocalDocuments
from torchtitan.data.token_files import write_token_file
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.utils.errors import UserError
from torchtitan.utils.text import count


@dataclass(frozen=True)
class Job:
    """What every worker needs to open the input for itself."""

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
    """Tokenize the parts `todo`, each in one of `workers` processes."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            for part in as_completed([pool.submit(_do_part, job, index) for index in todo]):
                part.result()
                advance()
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?). Finished parts are kept: give the same command again, "
                "with fewer --workers"
            ) from None
        except OSError as error:
            raise UserError(f"--output: can't write to {job.output}: {error}. Finished parts are kept") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _is_done(file: Path, expected: dict[str, Any]) -> bool:
    """Whether a part is there, complete, and of this input and tokenizer."""
    try:
        meta = json.loads(file.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return False
    if any(meta.get(key) != value for key, value in expected.items()):
        raise UserError(
            f"--output: {file} is of another input, tokenizer or --part; choose an empty folder or another --name"
        )
    return file.is_file()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="torchtitan tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", required=True, nargs="+", help="files, folders or globs of text; or demo")
    parser.add_argument("--output", required=True, type=Path, help="folder for the token files")
    parser.add_argument("--tokenizer", default="./tests/assets/tokenizer", help="as model.hf_assets_path")
    parser.add_argument("--workers", type=count, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--part", type=count, default=100_000, help="documents per file (100000)")
    parser.add_argument("--name", default="tokens", help="beginning of the files' names (tokens)")
    options = parser.parse_args(argv)

    job = Job(tuple(options.input), options.output, options.tokenizer, options.part, options.name)
    documents, tokenizer = job.documents(), build_tokenizer(job.tokenizer)
    if len(documents) == 0:
        raise UserError("--input: no documents")
    try:
        job.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: can't make the folder {job.output}: {error.strerror}") from error
    parts = range(-(-len(documents) // job.part))
    common = {"source": documents.fingerprint, "tokenizer": tokenizer.fingerprint, "part": job.part}
    todo = [i for i in parts if not _is_done(job.file(i), common)]
    if skipped := len(parts) - len(todo):
        print(f"{skipped} of {len(parts)} parts are there already")

    from rich.progress import Progress

    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("tokenizing", total=len(parts), completed=skipped)
        _do_parts(job, todo, min(options.workers, max(1, len(todo))), lambda: progress.advance(bar))
    total = sum(json.loads(job.file(i).with_suffix(".json").read_text())["tokens"] for i in parts)
    print(f"{total:,} tokens of {len(documents):,} documents in {job.output}")
    print(f'Train on them: --training.dataset_path {job.output} --model.hf_assets_path "{options.tokenizer}"')
    return 0
