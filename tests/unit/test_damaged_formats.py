"""Damage to files of each format is named, with its place."""

import gzip
import io
import json
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from tests.corpora import loader, take
from tests.text_forms import FORMS, read, saved, saved_splits, write
from torchtitan.data.text.documents import LocalDocuments
from torchtitan.data.text.json_records import records_of, without_long_strings
from torchtitan.utils.errors import UserError


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
