"""Formats of local files and token files: the same rows in each, and damage named."""

import csv
import gzip
import io
import json
import re
import tracemalloc
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from tests.corpora import TEXTS, assert_same_rows, loader, take, write_json_lines, write_megatron
from tests.runs import SAVE, arguments, losses, train
from torchtitan.commands import tokenize
from torchtitan.config import resolve
from torchtitan.data.text.documents import LocalDocuments
from torchtitan.data.text.index import find_documents, new_index
from torchtitan.data.text.json_records import records_of, without_long_strings
from torchtitan.data.text.opening import FileStamp
from torchtitan.data.text.records import read_records
from torchtitan.data.text.texts import BadDocument, HeldBytes
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError


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


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cut(make, end):
    """A file without its last bytes, or with those before `-end` only."""

    def cut_file(folder):
        path = make(folder)
        path.write_bytes(path.read_bytes()[:end])
        return path

    return cut_file


def overwritten(make, place, content):
    def overwrite(folder):
        path = make(folder)
        data = bytearray(path.read_bytes())
        data[place : place + len(content)] = content
        path.write_bytes(data)
        return path

    return overwrite


def offsets_beyond(folder):
    """Strings whose places lie far beyond their bytes: reading them unchecked ends the process."""
    path = folder / "x.arrow"
    texts = pa.array(["some", "texts"])
    ends = pa.py_buffer(np.array([0, 2**30, 9], np.int32))
    bad = pa.Array.from_buffers(pa.string(), 2, [None, ends, texts.buffers()[2]])
    with pa.ipc.new_stream(str(path), pa.schema({"text": pa.string()})) as writer:
        writer.write_batch(pa.record_batch([bad], ["text"]))
    return path


def without_a_shard(folder):
    path = saved(folder / "x")
    (path / "data-00001-of-00003.arrow").unlink()
    return path


def with_state(**state):
    def make(folder):
        path = saved(folder / "x")
        old = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps(old | state))
        return path

    return make


def two_texts(folder):
    both = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pa.ipc.new_file(str(folder / "x.arrow"), both.schema) as writer:
        writer.write_table(both)
    return folder


DAMAGED = {
    "two arrays": (
        lambda d: write(d / "x.json", '[{"text": "a"}]\n[{"text": "b"}]'),
        r"x.json: line 2, byte 17: nothing",
    ),
    "lines after": (
        lambda d: write(d / "x.json", '[{"text": "a"}]{"text": "b"}'),
        "line 1, byte 16: nothing may follow",
    ),
    "no comma": (
        lambda d: write(d / "x.json", '["a",\r\n"ä" "c"]'),
        r'line 2, byte 13: after entry 2 must be "," or',
    ),
    "comma at the end": (
        lambda d: write(d / "x.json", '["a", ]'),
        r'byte 7: after "," must be an entry, got "?.]',
    ),
    "two commas": (
        lambda d: write(d / "x.json", '["a",, "b"]'),
        'byte 6: after "," must be an entry',
    ),
    "comma first": (
        lambda d: write(d / "x.json", '[, "b"]'),
        r'byte 2: after "\[" must be an entry',
    ),
    "a quote that isn't closed": (
        lambda d: write(d / "x.csv", 'text\na\n"b\nc\n'),
        "x.csv: line 3: not CSV: .*quote",
    ),
    "a quote in a field": (lambda d: write(d / "x.csv", 'text\n"b" c\n'), "x.csv: line 2: not CSV"),
    "two columns": (
        lambda d: write(d / "x.csv", "text,text\na,b\n"),
        "header has 2 columns 'text'",
    ),
    "two columns, Arrow": (two_texts, "x.arrow: has 2 columns 'text'"),
    "cut Arrow file": (
        cut(FORMS["Arrow file"], -30),
        "x.arrow: not an Arrow file .damaged or cut off",
    ),
    "cut Arrow stream": (
        cut(FORMS["Arrow stream"], -300),
        "x.arrow: not an Arrow file .damaged or cut off",
    ),
    "Arrow stream without its end": (
        cut(FORMS["Arrow stream"], -8),
        "x.arrow: .* doesn't end with the mark",
    ),
    "no Arrow at all": (
        lambda d: write(d / "x.arrow", "text\n" * 50),
        "x.arrow: not an Arrow file",
    ),
    "empty Arrow file": (lambda d: write(d / "x.arrow", ""), "x.arrow: not an Arrow file"),
    "places beyond the bytes": (offsets_beyond, "x.arrow: not an Arrow file .*[Oo]ffset"),
    "Feather of version 1": (
        lambda d: write(d / "x.feather", b"FEA1" + bytes(50)),
        "x.feather: Feather version 1",
    ),
    "overwritten Parquet": (
        overwritten(FORMS["parquet"], 40, b"\xff" * 300),
        "x.parquet: not a Parquet file",
    ),
    "compressed Parquet": (
        lambda d: write(d / "x.parquet.gz", gzip.compress(b"")),
        "x.parquet.gz: decompress it",
    ),
    "a shard missing": (without_a_shard, "without its file data-00001-of-00003.arrow"),
    "rows chosen by indices": (
        with_state(_indices_files=[{"filename": "i.arrow"}]),
        "flatten_indices.. on it before",
    ),
    "a shard elsewhere": (
        with_state(_data_files=[{"filename": "../y.arrow"}]),
        "state.json: _data_files must be",
    ),
    "no list of shards": (
        with_state(_data_files={"filename": "y.arrow"}),
        "state.json: _data_files must be",
    ),
    "no train": (lambda d: saved_splits(d / "x", "a", "b"), "the splits a, b of .* such as .*/x/a"),
}


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(tmp_path, case, policy):
    """It isn't a bad document, which may be skipped."""
    make, text = DAMAGED[case]
    with pytest.raises(UserError, match=rf"(?s)training.dataset_path: .*{text}"):
        read(make(tmp_path), on_bad_document=policy)


def test_damage_is_named_in_a_stream(tmp_path):
    write(tmp_path / "x.json", '[{"text": "a"}]\n[{"text": "b"}]')
    with pytest.raises(
        UserError, match=r"^training.dataset: .*x\.json: line 2, byte 17: nothing may follow"
    ):
        take(loader(tmp_path, stream=True), 2)


def test_sound_arrays_in_small_blocks(monkeypatch):
    monkeypatch.setattr("torchtitan.data.text.json_records.BLOCK", 5)
    for content in (
        "[]",
        " [ ] \n",
        '\ufeff["a",\r\n\t"b" ]\n\n',
        "[12345678, -1.5e3]",
        '[{"text": "a", "x": [1, {}]}]',
    ):
        found = [record.content for record in records_of(io.BytesIO(content.encode()))]
        assert found == json.loads(content.removeprefix("\ufeff"))


def test_long_strings_of_lines_in_blocks(monkeypatch):
    """As `json` decodes them, from every position, wherever blocks end; among strings that look
    like their end.
    """
    monkeypatch.setattr("torchtitan.data.text.json_records.BLOCK", 16)
    random = Random(3)
    pieces = ["a", "\\", '"', "\n", "ä", "日", "🚀", "\\u00e9", "\0", "word " * 3]
    for trial in range(60):
        text = "".join(random.choices(pieces, k=40 + trial))
        row = {'na"me\\': [text, {"x": text[::-1]}], "text": text, "more": "\\"}
        line = json.dumps(row, ensure_ascii=bool(trial % 2)).encode()
        short, held = without_long_strings(line, 30)
        assert len(short) < len(line)
        found = held[json.loads(short)["text"]]
        assert str(found) == text
        assert sum(map(found.size, found.parts())) == len(text)
        start = random.randrange(len(text) + 1)
        assert "".join(found.parts(start)) == text[start:]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (rb"\x" + b"a" * 50, "not JSON"),
        (b"a" * 50 + b"\t", "not JSON"),
        (b"a" * 50 + rb"\ud83d", "lone surrogate"),
        (b"a" * 30 + b"\xff" + b"a" * 30, "not UTF-8"),
        (b"a" * 50 + b"\xe6\x97", "not UTF-8"),
    ],
)
def test_faults_in_long_strings_of_lines(tmp_path, monkeypatch, content, kind):
    monkeypatch.setattr("torchtitan.data.text.records.LONG", 20)
    monkeypatch.setattr("torchtitan.data.text.json_records.BLOCK", 16)
    write(tmp_path / "x.jsonl", b'{"text": "' + content + b'"}\n"sound"\n')
    documents = LocalDocuments(str(tmp_path), "key", on_bad_document="skip")
    assert documents.skipped == {kind: 1}
    assert read(tmp_path, on_bad_document="skip") == ["sound"]


def test_a_bad_entry_is_found_without_reading_the_rest():
    class Counted(io.BytesIO):
        def __init__(self, content):
            super().__init__(content)
            self.count = 0

        def read1(self, size=-1):
            part = super().read1(size)
            self.count += len(part)
            return part

    file = Counted(b'[{"text": a},' + b'"x",' * 2**21 + b'"x"]')
    (record,) = records_of(file, array=True)
    assert "not JSON" in str(record.content)
    assert file.count < 3 * 2**20


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
