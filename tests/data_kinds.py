"""One text as every kind of source, and loaders of it."""

import gzip
import itertools

import numpy as np

from tests.runs import write_corpus
from torchtitan.commands import tokenize
from torchtitan.config.sections.data import DataLoader, Source
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.loader import build_loader
from torchtitan.data.spec import DataSpec

TOKENIZER = build_tokenizer("./tests/assets/tokenizer")
SEQ = 24
ROWS = 8


def loader(path, rank=0, degree=1, *, infinite=True, rows=ROWS, dataset="files", **options):
    text_column = options.pop("text_column", "text")
    path = None if path is None else str(path)
    spec = DataSpec(
        sources=[Source(name="data", dataset=dataset, dataset_path=path, text_column=text_column)],
        tokenizer=TOKENIZER,
        seq_len=options.pop("seq_len", SEQ),
        rows_per_step=rows,
        seed=options.pop("seed", 3),
        infinite=infinite,
        on_bad_document=options.pop("on_bad_document", "stop"),
        options=DataLoader(**options),
    )
    return build_loader(spec, dp_rank=rank, dp_degree=degree)


def take(loader, count):
    """The next `count` steps, as (tokens, labels, position)."""
    try:
        return [(b.tokens, b.labels, b.position) for b in itertools.islice(iter(loader), count)]
    finally:
        loader.close()


def write_kinds(folder):
    """Write the same text in every kind of source; paths by kind."""
    jsonl = write_corpus(folder / "corpus.jsonl", documents=23)
    (folder / "shards").mkdir()
    for i, lines in enumerate(np.array_split(jsonl.read_text().splitlines(), 4)):
        with gzip.open(folder / f"shards/{i}.json.gz", "wt") as file:
            file.write("\n".join(lines))
    tokenize.main(
        [
            "--input",
            str(jsonl),
            "--output",
            str(folder / "tokens"),
            "--part",
            "10",
            "--workers",
            "1",
        ]
    )
    return {
        "jsonl": jsonl,
        "shards": folder / "shards",
        "tokens": folder / "tokens",
        "stream": None,
    }


def open_kind(kind, corpora, *args, **kwargs):
    """`stream` reads the compressed shards as `datasets` streams a hub dataset."""
    return loader(
        corpora[kind],
        *args,
        dataset=str(corpora["shards"]) if kind == "stream" else "files",
        **kwargs,
    )


def read(documents):
    return [str(documents[i]) for i in range(len(documents))]


def token_file_ids(folder):
    return np.concatenate(
        [np.fromfile(file, np.uint16) for file in sorted(folder.glob("*.bin"))]
    ).tolist()
