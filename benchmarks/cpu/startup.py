"""Start-up on huge data: opens sources of 1 TB each and reads steps from all of them.

    python benchmarks/cpu/startup.py

The sizes are simulated, the rest is real: a source is 1,000 files of 1 GB, links to one sparse file
that begins with real documents, beside an index of as many documents as such a file has. Needs
about 30 MB of disk.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SOURCES = 8
FILES = 1000
SIZE = 10**9
DOCUMENT = 3000
"""Bytes of a document, about that of a web page."""
ROWS = 8
SEQ_LEN = 2048
STEPS = 3
TOKENIZER = "./tests/assets/tokenizer"


def make_jsonl(folder: Path, cache: Path) -> None:
    """Files of JSON lines, and what a first start finds out about them."""
    from torchtitan.data.read.index import CachedFile, find_documents, new_index
    from torchtitan.data.read.opening import FileStamp, open_data, sample_hash

    lines = [
        json.dumps({"text": f"document {i} " + "of some words " * (DOCUMENT // 14)})
        for i in range(50)
    ]
    first = folder / "first.jsonl"
    first.write_text("\n".join(lines) + "\n")
    ranges = find_documents(new_index(FileStamp.of(first), "text"), stop=True)
    os.truncate(first, SIZE)
    documents = SIZE // DOCUMENT
    table = folder / "first.ranges"
    table.write_bytes(np.resize(ranges, (documents, 2)).tobytes())
    status = table.stat()
    with open_data(first) as content:
        hashed = sample_hash(content.fileno())
    for source in range(SOURCES):
        (folder / f"source-{source}").mkdir()
        for i in range(FILES):
            file = folder / f"source-{source}/{i:04d}.jsonl"
            os.link(first, file)
            index = new_index(FileStamp.of(file), "text")
            index.documents = documents
            index.text_bytes = SIZE
            index.sample = hashed
            # The hash is compared only if the others differ.
            index.ranges = CachedFile(
                size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino, sum=""
            )
            os.link(table, cache / f"{index.key}.ranges")
            (cache / f"{index.key}.json").write_text(index.model_dump_json())


def make_tokens(folder: Path) -> None:
    from torchtitan.data.encode.tokenizer import build_tokenizer
    from torchtitan.data.tokens.token_files import write_token_file

    tokens = SIZE // 2
    rows = [np.arange(100, 2000)] * 100
    write_token_file(
        folder / "first.bin",
        rows,
        build_tokenizer(TOKENIZER),
        {"tokens": tokens, "bytes": 2 * SIZE},
    )
    os.truncate(folder / "first.bin", SIZE)
    for source in range(SOURCES):
        (folder / f"source-{source}").mkdir()
        for i in range(FILES):
            for ending in ("bin", "json"):
                os.link(folder / f"first.{ending}", folder / f"source-{source}/{i:04d}.{ending}")


def count_files() -> list[str]:
    """The files that the main thread opens from now on, in order; without code."""
    from torchtitan.health.rank_dumps import is_library

    paths: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or threading.current_thread() is not threading.main_thread():
            return
        if isinstance(args[0], str | bytes | os.PathLike):
            path = os.fsdecode(args[0])
            code = path.endswith((".py", ".pyc", ".so")) or is_library(path)
            if not (code or path.startswith(("/dev/", "/proc/", "/sys/"))):
                paths.append(path)

    sys.addaudithook(hook)
    return paths


def start(folder: Path, cache: Path) -> None:
    """Open all sources, read some steps, and print what it took."""
    from torchtitan.config.sections.data import DataLoader, Source
    from torchtitan.data.encode.tokenizer import build_tokenizer
    from torchtitan.data.loader import build_loader
    from torchtitan.data.sources import DataSpec

    tokenizer = build_tokenizer(TOKENIZER)
    files = count_files()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    cpu = time.process_time()
    loaders = [
        build_loader(
            DataSpec(
                sources=[
                    Source(
                        name="files", dataset="files", dataset_path=str(folder / f"source-{source}")
                    )
                ],
                tokenizer=tokenizer,
                seq_len=SEQ_LEN,
                rows_per_step=ROWS,
                seed=0,
                infinite=True,
                options=DataLoader(cache_folder=str(cache)),
            )
        )
        for source in range(SOURCES)
    ]
    opened = time.perf_counter() - begin
    for loader in loaders:
        for _ in itertools.islice(loader, STEPS):
            pass
        loader.close()
    took = {
        "seconds to open": opened,
        f"and to read {STEPS} steps of each": time.perf_counter() - begin,
        "CPU-seconds": time.process_time() - cpu,
        "MB more": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "files opened": len(files),
    }
    print("; ".join(f"{name} {value:.2f}" for name, value in took.items()))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start(*options.start)
        return
    print(f"{SOURCES} sources of {FILES:,} files of {SIZE / 1e9:.0f} GB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("jsonl", "tokens", "cache"):
            (folder / kind).mkdir()
        make_jsonl(folder / "jsonl", folder / "cache")
        make_tokens(folder / "tokens")
        for title, kind in (
            ("JSONL, first start on indexed files", "jsonl"),
            ("JSONL, later start", "jsonl"),
            ("token files", "tokens"),
        ):
            print(f"{title}: ", end="", flush=True)
            subprocess.run(
                [sys.executable, __file__, "--start", folder / kind, folder / "cache"], check=True
            )


if __name__ == "__main__":
    main()
