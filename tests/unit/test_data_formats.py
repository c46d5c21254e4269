"""Formats of local files and token files: the same rows in each."""

import json
import random
import re
import tracemalloc

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from tests.corpora import TEXTS, TOKENIZER, assert_same_rows, write_json_lines, write_megatron
from tests.runs import SAVE, arguments, losses, train
from tests.text_forms import FORMS, read, saved_splits, write
from torchtitan.commands import tokenize
from torchtitan.config import resolve
from torchtitan.data.read.documents import LocalDocuments
from torchtitan.data.read.records import read_records
from torchtitan.data.read.streams import open_stream
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_json_lines(tmp_path, form):
    """Also from a position in the middle, and when they are tokenized ahead."""
    (tmp_path / "form").mkdir()
    path = FORMS[form](tmp_path / "form")
    lines = write_json_lines(tmp_path / "x.jsonl")
    assert read(path) == TEXTS
    assert_same_rows(path, lines)
    for name, one in (("a", path), ("b", lines)):
        tokenize.main(["--input", str(one), "--output", str(tmp_path / name), "--workers", "1"])
    ids = [(tmp_path / name / "tokens-00000.bin").read_bytes() for name in ("a", "b")]
    assert ids[0] == ids[1] != b""


def test_rows_of_csv(tmp_path):
    """A byte-order mark, Windows' newlines, blank lines, one column, and fields that look like
    numbers or missing values.
    """
    assert read(write(tmp_path / "a.csv", '\ufeff"text"\r\n\r\none\r\n""\r\n"a\r\nb"\r\n')) == [
        "one",
        "",
        "a\r\nb",
    ]
    assert read(write(tmp_path / "b.csv", "id,text,n\n1,007,\nx,NA,5\n2,null,\n")) == [
        "007",
        "NA",
        "null",
    ]
    quoted = write(tmp_path / "c.csv", '"my, text"\nwhole\n')
    assert read(quoted, text_column="my, text") == ["whole"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_with_a_dot_in_its_name(tmp_path, suffix):
    """The exact name counts; a field of a struct isn't a column."""
    nested = pa.array([{"text": "inner"}, {"text": "inner"}])
    both = pa.table({"meta": nested, "meta.text": ["a", "b"]})
    path = tmp_path / f"x.{suffix}"
    for content in (both, both.select(["meta.text", "meta"])):
        if suffix == "parquet":
            pq.write_table(content, path)
        else:
            pyarrow.feather.write_feather(content, str(path))
        assert read(path, text_column="meta.text") == ["a", "b"]
    if suffix == "parquet":
        pq.write_table(both.select(["meta"]), path)
    else:
        pyarrow.feather.write_feather(both.select(["meta"]), str(path))
    with pytest.raises(UserError, match=r"row 1: no column 'meta.text'; it has meta. Name"):
        read(path, text_column="meta.text")


def test_bad_values_of_parquet(tmp_path):
    """Each is a bad document of its own."""
    texts = ["ä日本🚀 ".encode() * 50, None, b"caf\xe9", b"short", b"x" * 150 + b"\xff", b""]
    column = pa.array(texts, pa.binary()).view(pa.string())
    path = tmp_path / "x.parquet"
    for part, expected in (
        (column.slice(1), ["short", ""]),
        (column, [texts[0].decode(), "short", ""]),
    ):
        pq.write_table(pa.table({"text": part}), path, row_group_size=4)
        assert read(path, on_bad_document="skip") == expected
        documents = LocalDocuments(str(path), "key", on_bad_document="skip")
        assert documents.skip_counts == {"null text": 1, "not UTF-8": 2}
        table = pa.table({"text": part})
        pyarrow.feather.write_feather(table, str(tmp_path / "y.arrow"), compression="uncompressed")
        assert read(tmp_path / "y.arrow", on_bad_document="skip") == expected
    with pytest.raises(UserError, match=r"row 2: column 'text' is null"):
        read(path)


@pytest.mark.parametrize("form", ["arrow", "parquet", "stream"])
def test_a_column_declared_to_hold_images_opens_nothing(tmp_path, form):
    """The library `datasets` opens what such a column names, or lacks Pillow."""
    declared = {"info": {"features": {"text": {"_type": "Image"}}}}
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    image = {"bytes": None, "path": "/nonexistent/x.png"}
    column = pa.table({"text": pa.array([image], struct)})
    content = column.replace_schema_metadata({"huggingface": json.dumps(declared)})
    if form == "arrow":
        pyarrow.feather.write_feather(content, str(tmp_path / "x.arrow"))
    else:
        pq.write_table(content, tmp_path / "x.parquet")
    if form == "stream":
        assert list(open_stream(str(tmp_path), "training")) == [{"text": image}]
        return
    with pytest.raises(UserError, match="row 1: column 'text' holds dict, not text"):
        read(tmp_path)


def test_few_rows_of_parquet_are_held(tmp_path, monkeypatch):
    """Beside its pages, the rows of a batch."""
    monkeypatch.setattr("torchtitan.data.read.tables._BATCH_BYTES", 10 * 20_000)
    generator = random.Random(0)
    content = [[{"role": "user", "content": generator.randbytes(10_000).hex()}] for _ in range(500)]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"messages": content}), path)
    del content
    tracemalloc.start()
    try:
        records = read_records(path, "messages")
        next(records)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(1 for _ in records) == 499
    assert held < path.stat().st_size + 2 * 2**20  # a block of the file is one of them


def test_config_refuses_what_it_can_see(tmp_path):
    """An unknown format and a saved data set that can't be read, also as one of several sources."""
    split = saved_splits(tmp_path / "saved", "a", "b")
    unknown = write(tmp_path / "x.pdf", "x")
    (tmp_path / "nothing").mkdir()
    meta = {"dtype": "uint16", "tokens": 0, "tokenizer": TOKENIZER.fingerprint}
    (tmp_path / "tokens").mkdir()
    no_tokens = write(tmp_path / "tokens" / "x.bin", "")
    write(tmp_path / "tokens" / "x.json", json.dumps(meta))
    source = '[[training.sources]]\nname = "{}"\ndataset_path = "{}"\n'
    both = write(
        tmp_path / "both.toml", source.format("one", split) + source.format("two", unknown)
    )
    for argv, problems in {
        f"--training.dataset_path={split}": ["training.dataset_path: .* holds the splits a, b"],
        f"--training.dataset_path={unknown}": [
            "training.dataset_path: .*x.pdf has an unknown format"
        ],
        f"--training.dataset_path={tmp_path / 'nothing'}": ["training.dataset_path: .* is empty"],
        f"--training.dataset_path={no_tokens}": [
            f"training.dataset_path: no tokens in {no_tokens}"
        ],
        f"--training.dataset_path={no_tokens.parent}": [
            f"training.dataset_path: no tokens in {no_tokens}"
        ],
        f"--job.config_file={both}": [
            "sources.one.dataset_path: .* the splits",
            "sources.two.dataset_path: .*x.pdf",
        ],
    }.items():
        with pytest.raises(ConfigError) as error:
            preflight(resolve([argv], 1).config, output=False)
        assert len(error.value.problems) == len(problems)
        assert all(re.search(*pair) for pair in zip(problems, error.value.problems, strict=True))
    for path in (
        split / "a",
        write_megatron(tmp_path),
        tmp_path / "corpus.idx",
        FORMS["tsv"](tmp_path),
    ):
        preflight(resolve([f"--training.dataset_path={path}"], 1).config, output=False)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["documents", "tokens"])
def test_a_resumed_run_has_the_losses_of_another_format(tmp_path, ranks, kind):
    lines = write_json_lines(tmp_path / "x.jsonl")
    if kind == "documents":
        paths = [lines, saved_splits(tmp_path / "saved", "train", "test")]
    else:
        tokenize.main(
            ["--input", str(lines), "--output", str(tmp_path / "tokens"), "--workers", "1"]
        )
        (tmp_path / "megatron").mkdir()
        paths = [tmp_path / "tokens", write_megatron(tmp_path / "megatron")]
    found = []
    for path, parts in zip(paths, ([4], [2, 4]), strict=True):
        out = tmp_path / f"run of {path.name}"
        out.mkdir()
        for steps in parts:
            argv = arguments(out, *SAVE, "--lr_scheduler.total_steps=4", steps=steps)
            run = ranks(1, train, [*argv, f"--training.dataset_path={path}"])[0]
        found.append(losses(run))
    assert len(found[0]) == 4
    assert found[0] == found[1]
