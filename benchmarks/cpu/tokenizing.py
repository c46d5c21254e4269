"""Speed of `torchtitan tokenize` beside the tokenizer library's own and datatrove's, with one
worker each:

    python benchmarks/cpu/tokenizing.py [--datatrove PYTHON]

All sides read the same JSONL file and use the same `tokenizer.json`. `library` gives batches of
documents to the library's fastest function, `encode_batch_fast`, and keeps nothing; `nanochat's
way` is the same with `encode_batch`. Datatrove, in an environment of its own whose interpreter is
PYTHON, writes token files as we do. Figures are user + system seconds of a side and its children.
"""

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path

TOKENIZER = "./tests/assets/tokenizer"
BATCH = 128
"""Documents of a batch, as in nanochat."""


def library(corpus: Path, folder: Path, fast: bool = True) -> None:
    """The least that a program does that knows the library."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json")
    backend.encode_special_tokens = True
    encode = backend.encode_batch_fast if fast else backend.encode_batch
    texts = []
    with corpus.open("rb") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            if len(texts) == BATCH:
                _ = [encoding.ids for encoding in encode(texts, add_special_tokens=False)]
                texts = []
    _ = [encoding.ids for encoding in encode(texts, add_special_tokens=False)]


def nanochats_way(corpus: Path, folder: Path) -> None:
    library(corpus, folder, fast=False)


def ours(corpus: Path, folder: Path) -> None:
    import contextlib
    import io

    from torchtitan.commands.tokenize import main

    with contextlib.redirect_stdout(io.StringIO()):
        main(
            [
                "--input",
                str(corpus),
                "--output",
                str(folder),
                "--tokenizer",
                TOKENIZER,
                "--workers",
                "1",
            ]
        )


def datatrove(corpus: Path, folder: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(corpus.parent), glob_pattern=corpus.name),
        DocumentTokenizer(
            str(folder), tokenizer_name_or_path=f"{TOKENIZER}/tokenizer.json", eos_token=None
        ),
    ]
    LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=str(folder / "logs")).run()


SIDES = {
    "library": library,
    "nanochat's way": nanochats_way,
    "torchtitan": ours,
    "datatrove": datatrove,
}


def side(name: str, corpus: Path) -> None:
    """Run one side, and print what it cost."""
    with tempfile.TemporaryDirectory() as folder:
        SIDES[name](corpus, Path(folder))
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        seconds += used.ru_utime + used.ru_stime
    print(json.dumps({"seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--datatrove", metavar="PYTHON", help="interpreter of an environment that has datatrove"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=3, help="of the demo text, about 9 MB each")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side(options.side[0], Path(options.side[1]))
        return
    from _sides import alternate, median, ratios

    from torchtitan.data.read.documents import DemoDocuments

    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        few = Path(folder, "few.jsonl")
        demo = DemoDocuments(validation=False)
        lines = [json.dumps({"text": demo[i]}) + "\n" for i in range(len(demo))]
        corpus.write_text("".join(lines * options.copies))
        few.write_text("".join(lines[:20]))
        sides = {}
        for name in SIDES:
            python = options.datatrove if name == "datatrove" else sys.executable
            if python:
                for size, file in (("", corpus), (", start", few)):
                    sides[name + size] = [python, __file__, "--side", name, str(file)]
        results = alternate(sides, options.rounds, threads=1)
        # What starting costs is not a rate.
        net = {
            name: [
                {"seconds": whole["seconds"] - start["seconds"]}
                for whole, start in zip(results[name], results[f"{name}, start"], strict=True)
            ]
            for name in SIDES
            if name in results
        }
        size = (corpus.stat().st_size - few.stat().st_size) / 1e6
        for name in net:
            rate = size / median(net, name, "seconds")
            print(
                f"{name:22} {rate:7.2f} MB per CPU-second, "
                f"{ratios(net, 'library', name, 'seconds')} of the library's"
            )


if __name__ == "__main__":
    main()
