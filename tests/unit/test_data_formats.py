"""Formats of local files and token files: the same rows in each."""

import random
import re
import tracemalloc

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from tests.corpora import TEXTS, assert_same_rows, write_json_lines, write_megatron
from tests.runs import SAVE, arguments, losses, train
from tests.text_forms import FORMS, read, saved_splits, write
from torchtitan.commands import tokenize
from torchtitan.config import resolve
from torchtitan.data.text.documents import LocalDocuments
from torchtitan.data.text.index import find_documents, new_index
from torchtitan.data.text.opening import FileStamp
from torchtitan.data.text.records import read_records
from torchtitan.data.text.texts import BadDocument, HeldBytes
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
    """A byte-order mark, Windows' newlines, blank lines, one column, and what is wrong with one row
    alone.
    """
    assert read(write(tmp_path / "a.csv", '\ufeff"text"\r\n\r\none\r\n""\r\n"a\r\nb"\r\n')) == [
        "one",
        "",
        "a\r\nb",
    ]
    bad = write(tmp_path / "b.csv", b'id,text\n1,"two\nlines"\n2\n3,caf\xe9\n4,a,b\n5,last\n')
    documents = LocalDocuments(str(bad), "key", on_bad_document="skip")
    assert read(bad, on_bad_document="skip") == ["two\nlines", "last"]
    assert documents.skipped == {"wrong number of fields": 2, "not UTF-8": 1}
    with pytest.raises(UserError, match=r"b.csv: line 4: 1 fields instead of the header's 2"):
        read(bad)
    with pytest.raises(UserError, match=r"c.csv: line 2: no column 'text'; it has id;body"):
        read(write(tmp_path / "c.csv", "id;body\n1;a\n"))


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


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_long_and_bad_values_of_tables(tmp_path, suffix, monkeypatch):
    """Long values are not copied; each bad one is a bad document of its own."""
    monkeypatch.setattr("torchtitan.data.text.tables.LONG", 100)
    monkeypatch.setattr("torchtitan.data.text.tables._BATCH", 300)
    long = "ä日本🚀 " * 50
    content = [long.encode(), None, b"caf\xe9", b"short", b"x" * 150 + b"\xff", b""]
    column = pa.array(content, pa.binary()).view(pa.string())
    values = pa.table({"text": column.slice(1)}), pa.table({"text": column})
    path = tmp_path / f"x.{suffix}"
    for one, expected in zip(values, (["short", ""], [long, "short", ""]), strict=True):
        if suffix == "parquet":
            pq.write_table(one, path, row_group_size=4)
        else:
            pyarrow.feather.write_feather(one, str(path))
        assert read(path, on_bad_document="skip") == expected
        documents = LocalDocuments(str(path), "key", on_bad_document="skip")
        assert documents.skipped == {"null text": 1, "not UTF-8": 2}
    contents = [record.content["text"] for record in read_records(path, "text")]
    assert [type(text) for text in contents] == [
        HeldBytes,
        type(None),
        bytes,
        bytes,
        HeldBytes,
        bytes,
    ]
    with pytest.raises(BadDocument, match="0xff, invalid start byte at byte 151"):
        str(contents[4])


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_few_rows_of_lists_are_held(tmp_path, suffix, monkeypatch):
    """Beside pages of Parquet, the rows of a batch; of Arrow, as many as are converted at once."""
    monkeypatch.setattr("torchtitan.data.text.tables._BATCH", 10 * 20_000)
    if suffix == "arrow":
        monkeypatch.setattr("torchtitan.data.text.tables._ROWS", 10)
    generator = random.Random(0)
    content = [[{"role": "user", "content": generator.randbytes(10_000).hex()}] for _ in range(500)]
    table = pa.table({"messages": content})
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        pyarrow.feather.write_feather(table, str(path))
    del content, table
    tracemalloc.start()
    try:
        records = read_records(path, "messages")
        next(records)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(1 for _ in records) == 499
    pages = path.stat().st_size if suffix == "parquet" else 0
    assert held < pages + 2 * 2**20  # a block of the file is one of them


@pytest.mark.parametrize(("suffix", "most"), [("parquet", 0.3), ("arrow", 1.2)])
def test_python_holds_no_copy_of_a_long_document(tmp_path, suffix, most):
    """Of 60 MiB among short ones, beside what Arrow reads; a string with one emoji would take 240
    MiB.
    """
    long = "0123456789" * (6 * 2**20) + "🚀"
    size = len(long.encode())
    path = tmp_path / f"x.{suffix}"
    content = pa.table({"text": ["short", long, *["short"] * 20]})
    if suffix == "parquet":
        pq.write_table(content, path)
    else:
        pyarrow.feather.write_feather(content, str(path))
    del long, content
    index = new_index(FileStamp.of(path), "text")
    tracemalloc.start()
    try:
        with open(tmp_path / "texts", "wb") as texts:
            find_documents(index, True, None, texts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (index.documents, index.text_bytes) == (22, size + 21 * len("short"))
    assert peak < most * size


def test_config_refuses_what_it_can_see(tmp_path):
    """An unknown format and a saved data set that can't be read, also as one of several sources."""
    split = saved_splits(tmp_path / "saved", "a", "b")
    unknown = write(tmp_path / "x.pdf", "x")
    source = '[[training.sources]]\nname = "{}"\ndataset_path = "{}"\n'
    both = write(
        tmp_path / "both.toml", source.format("one", split) + source.format("two", unknown)
    )
    for argv, problems in {
        f"--training.dataset_path={split}": ["training.dataset_path: .* holds the splits a, b"],
        f"--training.dataset_path={unknown}": [
            "training.dataset_path: .*x.pdf has an unknown format"
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
