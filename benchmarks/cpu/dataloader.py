"""Speed of the data path: tokens per second and per CPU-second, by kind of source.

    python benchmarks/cpu/dataloader.py

The training thread of the debug model consumes about 1,300 tokens per CPU-second; the loader has to
stay far ahead.
"""

import argparse
import contextlib
import io
import itertools
import json
import tempfile
import time
from pathlib import Path

from torchtitan.commands import tokenize
from torchtitan.config.sections.data import DataLoader, Source
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.loader import build_loader
from torchtitan.data.read.documents import DemoDocuments
from torchtitan.data.sources import DataSpec

ROWS = 8
SEQ_LEN = 2048


def measure(sources: list[Source], steps: int) -> tuple[float, float]:
    """Tokens per wall second and per CPU-second, after the first step (which opens the files)."""
    spec = DataSpec(
        sources=sources,
        tokenizer=build_tokenizer("./tests/assets/tokenizer"),
        seq_len=SEQ_LEN,
        rows_per_step=ROWS,
        seed=0,
        infinite=True,
        options=DataLoader(),
    )
    loader = build_loader(spec)
    batches = iter(loader)
    for _ in range(4):  # the queue is full and being drained
        next(batches)
    wall = time.perf_counter()
    cpu = time.process_time()
    for _ in itertools.islice(batches, steps):
        pass
    tokens = steps * ROWS * SEQ_LEN
    rates = tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)
    loader.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jsonl = Path(folder, "demo.jsonl")
        demo = DemoDocuments(validation=False)
        jsonl.write_text("".join(json.dumps({"text": demo[i]}) + "\n" for i in range(len(demo))))
        with contextlib.redirect_stdout(io.StringIO()):
            tokenize.main(["--input", "demo", "--output", f"{folder}/tokens", "--workers", "1"])
        tokens = Source(name="tokens", dataset_path=f"{folder}/tokens")
        kinds = {
            "demo text": [Source(name="demo")],
            "local JSONL": [Source(name="jsonl", dataset_path=str(jsonl))],
            "token files": [tokens],
            "8 x JSONL": [
                Source(name=f"{i}", dataset_path=str(jsonl), weight=1 + i) for i in range(8)
            ],
            "8 x token files": [
                tokens.model_copy(update={"name": f"{i}", "weight": 1 + i}) for i in range(8)
            ],
        }
        for name, sources in kinds.items():
            wall, cpu = measure(sources, options.steps)
            print(
                f"{name:15} {wall:12,.0f} tokens/s {cpu:12,.0f} tokens per CPU-second", flush=True
            )


if __name__ == "__main__":
    main()
