"""Formats of local files and token files: the same rows in each, and damage named."""

import csv
import gzip
import io
import itertools
import json
import logging
import os
import re
import struct
import tracemalloc
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

from tests.runs import SAVE, arguments, losses, train
from torchtitan.commands import tokenize
from torchtitan.config import resolve
from torchtitan.config.data import DataLoader, Source
from torchtitan.data.documents import LocalDocuments
from torchtitan.data.files import FileStamp
from torchtitan.data.index import find_documents, new_index
from torchtitan.data.json_records import records_of
from torchtitan.data.json_strings import without_long_strings
from torchtitan.data.loader import build_loader
from torchtitan.data.records import read_records
from torchtitan.data.sources import DataSpec
from torchtitan.data.texts import BadDocument, HeldBytes
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError

TOKENIZER = build_tokenizer("./tests/assets/tokenizer")
TEXTS = ["", "a, b\tc", "two\nlines\r\nand a third", 'say "so"', "ä日本🚀", "\ufeff x"] + [
    f"{i} of {i * i} words, as {'many ' * (i % 5)}others" for i in range(25)
]


def read(path, **options):
    documents = LocalDocuments(str(path), "training.dataset_path", **options)
    return [str(documents[i]) for i in range(len(documents))]


def loader(path):
    source = Source(name="data", dataset_path=str(path))
    spec = DataSpec(
        sources=[source],
        tokenizer=TOKENIZER,
        seq_len=16,
        rows_per_step=4,
        seed=1,
        infinite=True,
        options=DataLoader(),
    )
    return build_loader(spec, dp_rank=0, dp_degree=1)


def take(loader, count):
    try:
        return list(itertools.islice(iter(loader), count))
    finally:
        loader.close()


def write_json_lines(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    return path


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
    "Arrow dictionary": lambda d: write_arrow(d / "x.arrow", pa.ipc.new_file, pa.dictionary(pa.int8(), pa.string())),
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
    expected = take(loader(lines), 9)
    whole = take(loader(path), 5)
    resumed = loader(path)
    resumed.seek(resumed.state([whole[-1].position]))
    for step, other in zip([*whole, *take(resumed, 4)], expected, strict=True):
        assert torch.equal(step.tokens, other.tokens)
        assert torch.equal(step.labels, other.labels)
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
    "no comma": (lambda d: write(d / "x.json", '["a",\r\n"ä" "c"]'), r'line 2, byte 13: after entry 2 must be "," or'),
    "comma at the end": (lambda d: write(d / "x.json", '["a", ]'), r'byte 7: after "," must be an entry, got "?.]'),
    "two commas": (lambda d: write(d / "x.json", '["a",, "b"]'), 'byte 6: after "," must be an entry'),
    "comma first": (lambda d: write(d / "x.json", '[, "b"]'), r'byte 2: after "\[" must be an entry'),
    "a quote that isn't closed": (lambda d: write(d / "x.csv", 'text\na\n"b\nc\n'), "x.csv: line 3: not CSV: .*quote"),
    "a quote in a field": (lambda d: write(d / "x.csv", 'text\n"b" c\n'), "x.csv: line 2: not CSV"),
    "two columns": (lambda d: write(d / "x.csv", "text,text\na,b\n"), "header has 2 columns 'text'"),
    "two columns, Arrow": (two_texts, "x.arrow: has 2 columns 'text'"),
    "cut Arrow file": (cut(FORMS["Arrow file"], -30), "x.arrow: not an Arrow file .damaged or cut off"),
    "cut Arrow stream": (cut(FORMS["Arrow stream"], -300), "x.arrow: not an Arrow file .damaged or cut off"),
    "Arrow stream without its end": (cut(FORMS["Arrow stream"], -8), "x.arrow: .* doesn't end with the mark"),
    "no Arrow at all": (lambda d: write(d / "x.arrow", "text\n" * 50), "x.arrow: not an Arrow file"),
    "empty Arrow file": (lambda d: write(d / "x.arrow", ""), "x.arrow: not an Arrow file"),
    "places beyond the bytes": (offsets_beyond, "x.arrow: not an Arrow file .*[Oo]ffset"),
    "Feather of version 1": (lambda d: write(d / "x.feather", b"FEA1" + bytes(50)), "x.feather: Feather version 1"),
    "overwritten Parquet": (overwritten(FORMS["parquet"], 40, b"\xff" * 300), "x.parquet: not a Parquet file"),
    "compressed Parquet": (lambda d: write(d / "x.parquet.gz", gzip.compress(b"")), "x.parquet.gz: decompress it"),
    "a shard missing": (without_a_shard, "without its file data-00001-of-00003.arrow"),
    "rows chosen by indices": (with_state(_indices_files=[{"filename": "i.arrow"}]), "flatten_indices.. on it before"),
    "a shard elsewhere": (with_state(_data_files=[{"filename": "../y.arrow"}]), "state.json: _data_files must be"),
    "no list of shards": (with_state(_data_files={"filename": "y.arrow"}), "state.json: _data_files must be"),
    "no train": (lambda d: saved_splits(d / "x", "a", "b"), "the splits a, b of .* such as .*/x/a"),
}


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(tmp_path, case, policy):
    """It isn't a bad document, which may be skipped."""
    make, text = DAMAGED[case]
    with pytest.raises(UserError, match=rf"(?s)training.dataset_path: .*{text}"):
        read(make(tmp_path), on_bad_document=policy)


def test_sound_arrays_in_small_blocks(monkeypatch):
    monkeypatch.setattr("torchtitan.data.json_records.BLOCK", 5)
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
    """As `json` decodes them, from every position, wherever blocks end; among strings that look like their end."""
    monkeypatch.setattr("torchtitan.data.texts.BLOCK", 16)
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
    monkeypatch.setattr("torchtitan.data.records.LONG", 20)
    monkeypatch.setattr("torchtitan.data.texts.BLOCK", 16)
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
    """A byte-order mark, Windows' newlines, blank lines, one column, and what is wrong with one row alone."""
    assert read(write(tmp_path / "a.csv", '\ufeff"text"\r\n\r\none\r\n""\r\n"a\r\nb"\r\n')) == ["one", "", "a\r\nb"]
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
    monkeypatch.setattr("torchtitan.data.tables.LONG", 100)
    monkeypatch.setattr("torchtitan.data.tables._BATCH", 300)
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
    assert [type(text) for text in contents] == [HeldBytes, type(None), bytes, bytes, HeldBytes, bytes]
    with pytest.raises(BadDocument, match="0xff, invalid start byte at byte 151"):
        str(contents[4])


@pytest.mark.parametrize(("suffix", "most"), [("parquet", 0.3), ("arrow", 1.2)])
def test_python_holds_no_copy_of_a_long_document(tmp_path, suffix, most):
    """Of 60 MiB among short ones, beside what Arrow reads; a string with one emoji would take 240 MiB."""
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


def write_megatron(folder, name="corpus", dtype=np.uint16, code=8, sentences=1):
    """As Megatron's builder does, each text a document of sequences, with end-of-text at its end."""
    documents = [[TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id] for text in TEXTS]
    parts = [part for ids in documents for part in np.array_split(ids, sentences)]
    lengths = np.array([len(part) for part in parts], np.int32)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    bounds = np.arange(len(documents) + 1, dtype=np.int64) * sentences
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(bounds))
    (folder / f"{name}.idx").write_bytes(header + lengths.tobytes() + starts.tobytes() + bounds.tobytes())
    (folder / f"{name}.bin").write_bytes(np.concatenate(parts).astype(dtype).tobytes())
    return folder / f"{name}.bin"


@pytest.mark.parametrize(("dtype", "code", "sentences"), [(np.uint16, 8, 1), (np.int32, 4, 2), (np.int64, 5, 1)])
@pytest.mark.parametrize("named", ["folder", "bin", "idx", "above"])
def test_rows_of_megatron_are_those_of_token_files(tmp_path, dtype, code, sentences, named):
    lines = write_json_lines(tmp_path / "x.jsonl")
    tokenize.main(["--input", str(lines), "--output", str(tmp_path / "tokens"), "--workers", "1"])
    folder = tmp_path / "corpora/megatron"
    folder.mkdir(parents=True)
    file = write_megatron(folder, dtype=dtype, code=code, sentences=sentences)
    path = {"folder": folder, "bin": file, "idx": file.with_suffix(".idx"), "above": tmp_path / "corpora"}[named]
    expected = take(loader(tmp_path / "tokens"), 9)
    whole = take(loader(path), 5)
    resumed = loader(path)
    resumed.seek(resumed.state([whole[-1].position]))
    for step, other in zip([*whole, *take(resumed, 4)], expected, strict=True):
        assert torch.equal(step.tokens, other.tokens)
        assert torch.equal(step.labels, other.labels)


def changed(place, content, suffix=".idx"):
    """Changes bytes of a pair; None cuts the file there."""

    def change(file):
        path = file.with_suffix(suffix)
        data = bytearray(path.read_bytes())
        if content is None:
            del data[place:]
        else:
            data[place : place + len(content)] = content
        path.write_bytes(data)

    return change


N = len(TEXTS)
BAD_PAIRS = {
    "another file": (changed(0, b"NOTANIDX"), "corpus.idx is no index of a Megatron token file"),
    "the older kind": (changed(0, b"TNTIDX\0\0"), "older kind; .*--dataset-impl mmap"),
    "another version": (changed(9, b"\2"), "has version 2; only version 1"),
    "floats": (changed(17, b"\7"), "values are of type 7 .float32., which are no token ids"),
    "doubles": (changed(17, b"\6"), "values are of type 6 .float64."),
    "an unknown type": (changed(17, b"\x09"), "type 9 .unknown."),
    "a header that is cut": (changed(20, None), "no index of a Megatron token file .cut off"),
    "a cut index": (changed(-3, None), r"corpus.idx has .* bytes instead of the"),
    "too many sequences": (changed(18, b"\xff" * 7), r"corpus.idx has .* bytes instead of the"),
    "modes": (lambda f: f.with_suffix(".idx").open("ab").write(bytes(N)), "multimodal"),
    "a length": (changed(34 + 4, b"\x01"), "sequence 2 doesn't begin where"),
    "a negative length": (changed(34 + 4 * (N - 1) + 3, b"\xff"), f"sequence {N - 1} doesn't begin where"),
    "a place": (changed(34 + 4 * N + 8 * 5, b"\x01"), "sequence 5 doesn't begin where"),
    "a boundary": (changed(34 + 12 * N + 8 * 3, b"\xff"), "boundaries of its documents aren't in order"),
    "the last boundary": (changed(34 + 12 * N + 8 * N, b"\xff"), f"documents end at sequence 255 of {N}"),
    "cut ids": (changed(-2, None, ".bin"), "corpus.bin has .* bytes instead of the .* of corpus.idx"),
    "an id beyond the vocabulary": (changed(0, b"\xff\xff", ".bin"), "has id 65535 at token 0, but the tokenizer"),
    "a pipe": (lambda f: (f.with_suffix(".idx").unlink(), os.mkfifo(f.with_suffix(".idx"))), "not a regular file"),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_bad_pairs_of_megatron_are_named(tmp_path, case):
    change, text = BAD_PAIRS[case]
    file = write_megatron(tmp_path)
    change(file)
    with pytest.raises(UserError, match=rf"training.dataset_path: .*{text}"):
        take(loader(tmp_path), 200)


def test_megatron_says_what_cannot_be_checked(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    with caplog.at_level("INFO", "torchtitan"):
        loader(write_megatron(tmp_path).parent)
    assert "1 Megatron token file of a tokenizer that can't be checked" in caplog.text


def test_config_refuses_what_it_can_see(tmp_path):
    """An unknown format and a saved data set that can't be read, also as one of several sources."""
    split = saved_splits(tmp_path / "saved", "a", "b")
    unknown = write(tmp_path / "x.pdf", "x")
    source = '[[training.sources]]\nname = "{}"\ndataset_path = "{}"\n'
    both = write(tmp_path / "both.toml", source.format("one", split) + source.format("two", unknown))
    for argv, problems in {
        f"--training.dataset_path={split}": ["training.dataset_path: .* holds the splits a, b"],
        f"--training.dataset_path={unknown}": ["training.dataset_path: .*x.pdf has an unknown format"],
        f"--job.config_file={both}": ["sources.one.dataset_path: .* the splits", "sources.two.dataset_path: .*x.pdf"],
    }.items():
        with pytest.raises(ConfigError) as error:
            preflight(resolve([argv], 1).config, output=False)
        assert len(error.value.problems) == len(problems)
        assert all(re.search(*pair) for pair in zip(problems, error.value.problems, strict=True))
    for path in (split / "a", write_megatron(tmp_path), tmp_path / "corpus.idx", FORMS["tsv"](tmp_path)):
        preflight(resolve([f"--training.dataset_path={path}"], 1).config, output=False)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["documents", "tokens"])
def test_a_resumed_run_has_the_losses_of_another_format(tmp_path, ranks, kind):
    lines = write_json_lines(tmp_path / "x.jsonl")
    if kind == "documents":
        paths = [lines, saved_splits(tmp_path / "saved", "train", "test")]
    else:
        tokenize.main(["--input", str(lines), "--output", str(tmp_path / "tokens"), "--workers", "1"])
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
