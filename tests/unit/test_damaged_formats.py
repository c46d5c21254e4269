"""Damage to files of each format is named, with its place."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from tests.corpora import loader, take
from tests.text_forms import FORMS, read, saved, saved_splits, write
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
        r"x.json: the array is not JSON .*: Extra data at character 17",
    ),
    "cut array": (
        lambda d: write(d / "x.json", '[{"text": "a"}, {"te'),
        r"x.json: the array is not JSON \(cut off\?\)",
    ),
    "array that isn't UTF-8": (
        lambda d: write(d / "x.json", b'["a", "caf\xe9"]'),
        "x.json: the array is not UTF-8: 0xe9",
    ),
    "a quote that isn't closed": (
        lambda d: write(d / "x.csv", 'text\na\n"b\nc\n'),
        "x.csv: not a CSV file .*EOF inside string",
    ),
    "CSV that isn't UTF-8": (
        lambda d: write(d / "x.csv", b"id,text\n1,caf\xe9\n"),
        "x.csv: not a CSV file .*can't decode byte 0xe9",
    ),
    "Excel's separator": (
        lambda d: write(d / "x.csv", '\ufeff"id";"text"\r\n1;"a, b, c"\r\n'),
        "x.csv: its fields are separated by ';', not ','; write it with that",
    ),
    "tabs": (lambda d: write(d / "x.csv", "id\ttext\n"), r"separated by '\\t', not ','"),
    "Excel's Unicode": (
        lambda d: write(d / "x.csv", "id,text\n1,é\n".encode("utf-16")),
        r"x.csv: UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW",
    ),
    "Lines in UTF-16": (
        lambda d: write(d / "x.jsonl", '{"text": "a"}'.encode("utf-16")),
        "x.jsonl: UTF-16, not UTF-8",
    ),
    "too many fields": (
        lambda d: write(d / "x.csv", "id,text\n1,a\n2,b,c\n"),
        "x.csv: not a CSV file .*Expected 2 fields in line 3, saw 3",
    ),
    "two columns, Arrow": (two_texts, "x.arrow: has 2 columns 'text'; the one of the text must"),
    "cut Arrow file": (
        cut(FORMS["Arrow file"], -30),
        "x.arrow: not an Arrow file .damaged or cut off",
    ),
    "no Arrow at all": (
        lambda d: write(d / "x.arrow", "text\n" * 50),
        "x.arrow: not an Arrow file",
    ),
    "places beyond the bytes": (offsets_beyond, "x.arrow: not an Arrow file .*[Oo]ffset"),
    "Feather of version 1": (
        lambda d: write(d / "x.feather", b"FEA1" + bytes(50)),
        "x.feather: not an Arrow file",
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
        "without its file ../y.arrow",
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
    with pytest.raises(UserError, match=r"^training.dataset: lane 0, .*Trailing data"):
        take(loader(tmp_path, stream=True), 2)
