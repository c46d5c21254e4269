"""The same rows in every format of local files."""

import csv
import gzip
import io

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from tests.corpora import TEXTS, write_json_lines
from torchtitan.data.read.documents import LocalDocuments


def read(path, **options):
    documents = LocalDocuments(str(path), "training.dataset_path", **options)
    return [str(documents[i]) for i in range(len(documents))]


def write_csv(path, delimiter=",", opener=open):
    content = io.StringIO()
    writer = csv.writer(content, delimiter=delimiter)
    writer.writerows([["n", "text"], *([i, text] for i, text in enumerate(TEXTS))])
    with opener(path, "wb") as file:
        file.write(content.getvalue().encode())
    return path


def table(texts=TEXTS, kind=None):
    return pa.table({"n": range(len(texts)), "text": pa.array(texts, kind or pa.string())})


def write_arrow(path, opener, kind=None):
    with opener(str(path), table(kind=kind).schema) as writer:
        writer.write_table(table(kind=kind), max_chunksize=7)
    return path


def write_feather(path):
    pyarrow.feather.write_feather(table(), str(path), compression="lz4")
    return path


def write_parquet(path, column=None):
    pq.write_table(column or table(), path, row_group_size=9)
    return path


def saved(path):
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    data.save_to_disk(path, num_shards=3)
    datasets.load_from_disk(path).map(lambda row: {"text": "of a cache"})
    return path


def saved_splits(path, *splits):
    import datasets

    datasets.disable_progress_bars()
    other = datasets.Dataset.from_dict({"text": ["other"]})
    parts = dict.fromkeys(splits, other)
    if "train" in splits:
        parts["train"] = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(parts).save_to_disk(path)
    return path


FORMS = {
    "ndjson": lambda d: write_json_lines(d / "x.ndjson"),
    "csv": lambda d: write_csv(d / "x.csv"),
    "csv.gz": lambda d: write_csv(d / "x.csv.gz", opener=gzip.open),
    "tsv": lambda d: write_csv(d / "X.TSV", delimiter="\t"),
    "Arrow file": lambda d: write_arrow(d / "x.arrow", pa.ipc.new_file),
    "Arrow stream": lambda d: write_arrow(d / "x.arrow", pa.ipc.new_stream),
    "large strings": lambda d: write_arrow(d / "x.arrow", pa.ipc.new_file, pa.large_string()),
    "string views": lambda d: write_arrow(d / "x.arrow", pa.ipc.new_stream, pa.string_view()),
    "Arrow dictionary": lambda d: write_arrow(
        d / "x.arrow", pa.ipc.new_file, pa.dictionary(pa.int8(), pa.string())
    ),
    "feather": lambda d: write_feather(d / "x.feather"),
    "parquet": lambda d: write_parquet(d / "x.parquet"),
    "save_to_disk": lambda d: saved(d / "x"),
    "save_to_disk of splits": lambda d: saved_splits(d / "x", "test", "train"),
}


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
