"""Documents that cannot be read: named, or skipped and counted, the same ones in every layout."""

import gzip
import json
import logging
import os
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data_kinds import SEQ, TOKENIZER, loader, read, take, token_file_ids
from tests.positions import saved
from tests.runs import SAVE, arguments, train
from torchtitan.commands import tokenize
from torchtitan.data.read.documents import LocalDocuments
from torchtitan.utils.errors import UserError

BAD_LINES = {
    b'{"text": null}': "null text",
    b'{"x": 1}': "no column text",
    b'{"text": 5}': "not a string",
    b'{"text": ["a"]}': "not a string",
    b'{"text": "caf\xe9"}': "not UTF-8",
    b'{"text": "cut': "not JSON",
    b'{"text": "\\ud800"}': "lone surrogate",
    b"7": "not an object",
    b"[" * 100_000: "not JSON",
}


def write_bad(path, compress=gzip.compress):
    """Good lines, with every kind of bad one between; the good texts."""
    good = [f"document {i} of words" for i in range(40)]
    lines = [json.dumps({"text": text}).encode() for text in good]
    for i, line in enumerate(BAD_LINES):
        lines.insert(3 * i + 2, line)
    path.mkdir()
    (path / "0.jsonl").write_bytes(b"\n".join(lines[:25]))
    (path / "1.json.gz").write_bytes(compress(b"\n".join(lines[25:])))
    return good


def write_bad_rows(path):
    """Two Parquet files, which a stream reads; every third text is null."""
    good = [f"document {i} of words" for i in range(40)]
    path.mkdir()
    for name, part in (("0", good[:20]), ("1", good[20:])):
        rows = [row for i in range(0, 20, 2) for row in (*part[i : i + 2], None)]
        pq.write_table(pa.table({"text": rows}), path / f"{name}.parquet")
    return good


def test_bad_documents_are_skipped_and_counted(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    good = write_bad(tmp_path / "data")
    for cache in (None, "again"):
        documents = LocalDocuments(str(tmp_path / "data"), "key", on_bad_document="skip")
        assert read(documents) == good, cache
        assert documents.skip_counts == Counter(BAD_LINES.values())
    assert "skipping 9 bad documents" in caplog.text
    assert "0.jsonl: line 3: column 'text' is null" in caplog.text
    with pytest.raises(
        UserError, match=r"0.jsonl: line 3: column 'text' is null. on_bad_document = .skip."
    ):
        LocalDocuments(str(tmp_path / "data"), "key")  # also from the index of those who skipped


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, line):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=r"x.jsonl: line 3: "):
        LocalDocuments(str(tmp_path), "key", on_bad_document="stop")


def test_bad_rows_entries_and_texts(tmp_path):
    texts = pa.array(["a", None, "b"])
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.int32([0, 1, 3])), pa.py_buffer(b"c\xff\xfe")]
    )
    pq.write_table(pa.table({"text": pa.chunked_array([texts, bad])}), tmp_path / "0.parquet")
    (tmp_path / "1.json").write_bytes(
        b'[{"text": "d"}, {"text": "\\ud800"}, "e", {"text": 2}, {"text": "f"}]'
    )
    (tmp_path / "2.txt").write_bytes(b"sound\n" * 10 + b"caf\xe9")
    (tmp_path / "3.txt.gz").write_bytes(gzip.compress(os.urandom(3000).hex().encode())[:-500])
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "4.parquet")
    documents = LocalDocuments(str(tmp_path), "key", on_bad_document="skip")
    assert read(documents) == ["a", "b", "c", "d", "e", "f"]
    kinds = {
        "null text": 1,
        "not UTF-8": 2,
        "lone surrogate": 1,
        "not a string": 3,
        "damaged compression": 1,
    }
    assert documents.skip_counts == kinds
    for name, place in {
        "0.parquet": "row 2: column 'text' is null",
        "1.json": "entry 2: half a surrogate pair",
        "2.txt": "line 11: not UTF-8: 0xe9, .* at byte 64",
        "3.txt.gz": "can't be decompressed from here on",
        "4.parquet": "row 1: column 'text' holds int, not text",
    }.items():
        with pytest.raises(UserError, match=rf"{name}: {place}"):
            LocalDocuments(str(tmp_path / name), "key")


@pytest.mark.parametrize("kind", ["files", "stream"])
@pytest.mark.parametrize("degree", [2, 4])
def test_the_same_documents_are_skipped_in_every_layout(tmp_path, kind, degree):
    """Rows equal those of a folder without the bad lines, also after a resume; a stream counts what
    it passed over.
    """
    good = (write_bad_rows if kind == "stream" else write_bad)(tmp_path / "data")
    path = None if kind == "stream" else tmp_path / "data"
    rows = 2 if kind == "stream" else 4
    options = {"dataset": str(tmp_path / "data"), "on_bad_document": "skip"}
    whole = take(loader(path, rows=rows, **options), 8)
    ids = [[TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id] for text in good]
    if kind == "files":
        (tmp_path / "good").mkdir()
        (tmp_path / "good/x.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in good)
        )
        expected = take(loader(tmp_path / "good", rows=rows), 8)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, expected, strict=True))
    else:
        for lane, part in enumerate((ids[:20], ids[20:])):
            flat = [i for document in part for i in document]
            steps = min(8, len(flat) // SEQ)
            assert (
                torch.cat([tokens[lane] for tokens, *_ in whole[:steps]]).tolist()
                == flat[: steps * SEQ]
            )
    degree = min(degree, rows)
    ranks = [take(loader(path, rank, degree, rows=rows, **options), 5) for rank in range(degree)]
    assert all(torch.equal(torch.cat([r[i][0] for r in ranks]), whole[i][0]) for i in range(5))
    resumed = loader(path, rows=rows, **options)
    resumed.seek(saved(resumed, *(rank[-1][2] for rank in ranks)))
    later = take(resumed, 3)
    assert all(torch.equal(later[i][0], whole[5 + i][0]) for i in range(3))
    assert later[-1][2] == whole[-1][2]
    assert resumed.skip_counts(later[-1][2]) == (
        Counter(BAD_LINES.values()) if kind == "files" else stream_tally(later)
    )


def stream_tally(steps):
    lanes = steps[-1][2].sources["data"].lanes.values()
    counts = sum((Counter(lane.cursor.skipped) for lane in lanes), Counter())
    assert counts.total() >= 5
    return counts


def test_tokenize_skips_and_counts(tmp_path, capsys):
    good = write_bad(tmp_path / "data")
    (tmp_path / "data/2.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in good[:7])
    )
    argv = [
        "--input",
        str(tmp_path / "data"),
        "--output",
        str(tmp_path / "out"),
        "--workers",
        "1",
        "--part",
        "20",
    ]
    with pytest.raises(
        UserError,
        match=r"--input: .*0.jsonl: line 3: column 'text' is null. --on-bad-document skip",
    ):
        tokenize.main(argv)
    tokenize.main([*argv, "--on-bad-document", "skip"])
    report = json.loads((tmp_path / "out/tokens-report.json").read_text())
    assert report["documents"] == 47
    assert report["skipped"] == Counter(BAD_LINES.values())
    assert report["first_skipped"][0].endswith("0.jsonl: line 3: column 'text' is null")
    assert "Skipped 9 bad documents (2 not a string, 2 not JSON, " in capsys.readouterr().out
    assert len(token_file_ids(tmp_path / "out")) == report["tokens"]


@pytest.mark.parametrize("kind", ["files", pytest.param("stream", marks=pytest.mark.slow)])
def test_a_run_records_what_it_skipped(tmp_path, ranks, kind):
    """In `run.json`, alike on one rank and two, where each reads a lane of its own of the stream,
    after a resume.
    """
    (write_bad_rows if kind == "stream" else write_bad)(tmp_path / "data")
    source = [f"--training.dataset={tmp_path / 'data'}"]
    if kind == "files":
        source.append(f"--training.dataset_path={tmp_path / 'data'}")
    found = []
    for world in (1, 2):
        out = tmp_path / f"out{world}"
        argv = [
            a for a in arguments(tmp_path, steps=6) if "dataset" not in a and "dump_folder" not in a
        ]
        argv += [*source, *SAVE, f"--job.dump_folder={out}", "--training.on_bad_document=skip"]
        if world == 2:
            ranks(1, train, [*argv, "--training.steps=3"])
        ranks(world, train, argv)
        found.append(json.loads((out / "run.json").read_text())["starts"][-1]["skipped_documents"])
    assert found[0] == found[1]
    assert sum(found[0].values()) >= 9
