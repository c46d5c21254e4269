"""Local files and streams as people have them, against a plain reading of the same files."""

import bz2
import errno
import gzip
import json
import logging
import lzma
import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data_kinds import SEQ, TOKENIZER, loader, read, take, token_file_ids
from tests.positions import saved
from torchtitan.commands import tokenize
from torchtitan.config.sections.data import DataLoader
from torchtitan.data.encode import base as tokenizer_module
from torchtitan.data.read import index
from torchtitan.data.read.documents import LocalDocuments
from torchtitan.data.read.index_cache import IndexCache
from torchtitan.data.read.opening import Retry
from torchtitan.utils.errors import UserError

RANDOM = random.Random(5)
TEXTS = ["", "plain", "two\nlines\r\n", "ä日本🚀", '"quoted" \\ \u2028', "x" * 5000] + [
    " ".join(RANDOM.choices(["some", "words,", "grün", "1234"], k=40)) for _ in range(30)
]
"""In several files, of every format."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of all formats and compressions, with what usually lies beside data; its texts in
    order of the files.
    """
    folder = tmp_path_factory.mktemp("corpus")
    lines = [
        "\n".join(json.dumps({"body": text, "id": i, "text": 5}) for text in part)
        for i, part in parts()
    ]
    content = [line.encode() for line in lines]
    (folder / "0.jsonl").write_bytes(b"\xef\xbb\xbf" + content[0])
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(content[1]))
    (folder / "2.jsonl.bz2").write_bytes(bz2.compress(content[2]) + bz2.compress(b"\n"))
    (folder / "3.json.xz").write_bytes(lzma.compress(content[3]))
    with pa.CompressedOutputStream(str(folder / "4.jsonl.zst"), "zstd") as file:
        file.write(content[4])
    table = pa.table({"body": dict(parts())[5], "id": range(5)})
    pq.write_table(table, folder / "5.parquet", row_group_size=4)
    (folder / "6.json").write_text(
        json.dumps([{"body": text} for text in dict(parts())[6]], indent=1)
    )
    (folder / "7").mkdir()
    (folder / "7/a.txt").write_bytes("a text\r\nof lines ä".encode())
    (folder / "7/b.md.gz").write_bytes(gzip.compress(b"another"))
    for name in (
        "README.md",
        "LICENSE",
        "LICENSE.txt",
        "dataset_infos.json",
        ".hidden.jsonl",
        "image.png",
    ):
        (folder / name).write_text("{ nothing")
    (folder / ".git").mkdir()
    (folder / ".git/x.json").write_text("{ nothing")
    texts = [text for _, part in parts() for text in part] + ["a text\r\nof lines ä", "another"]
    return folder, texts


def parts():
    return [(i, [*part]) for i, part in enumerate(np.array_split(np.array(TEXTS[:36], object), 7))][
        :7
    ]


@pytest.mark.parametrize("name", ["", "*", "**/*"])
def test_a_folder_of_everything(corpus, tmp_path, name, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    folder, texts = corpus
    with caplog.at_level("INFO", "torchtitan"):
        documents = LocalDocuments(
            f"{folder}/{name}", "key", text_column="body", cache_folder=str(tmp_path)
        )
    expected = texts[:-2] if name == "*" else texts
    found = read(documents)
    assert sorted(found) == sorted(expected)
    if not name:
        assert found == expected
    assert documents.text_bytes == sum(len(text.encode()) for text in expected)
    assert not documents.skip_counts
    assert "ignoring 5 files without documents (" in caplog.text
    assert "README.md" in caplog.text
    assert f"go to {tmp_path}, about" in caplog.text


def test_a_second_start_reads_only_the_index(corpus, tmp_path, monkeypatch):
    folder, texts = corpus
    LocalDocuments(str(folder), "key", text_column="body", cache_folder=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(IndexCache, "_index", None)
        assert (
            read(LocalDocuments(str(folder), "key", text_column="body", cache_folder=str(tmp_path)))
            == texts
        )
    for file in tmp_path.glob("*.ranges"):
        file.unlink()
    assert (
        read(LocalDocuments(str(folder), "key", text_column="body", cache_folder=str(tmp_path)))
        == texts
    )
    assert not list(tmp_path.glob("*.tmp"))
    assert not list(tmp_path.glob("*.lock"))


def test_processes_share_the_work_of_indexing(corpus, tmp_path, monkeypatch):
    """Threads stand for processes: each opens the lock files for itself."""
    folder, texts = corpus
    made = []
    find = index.find_documents
    module = "torchtitan.data.read.index_cache"
    monkeypatch.setattr(
        f"{module}.find_documents",
        lambda stamp, *rest, **options: made.append(stamp.path) or find(stamp, *rest, **options),
    )
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(
                LocalDocuments, str(folder), "key", text_column="body", cache_folder=str(tmp_path)
            )
            for _ in range(4)
        ]
        assert all(read(job.result()) == texts for job in jobs)
    assert len(made) == len(set(made)) == 9
    assert not list(tmp_path.glob("*.lock"))


def test_only_texts_that_cannot_be_read_at_any_place_are_copied(corpus, tmp_path):
    folder, _ = corpus
    LocalDocuments(
        [f"{folder}/0.jsonl", f"{folder}/7/a.txt"],
        "key",
        text_column="body",
        cache_folder=str(tmp_path),
    )
    assert not list(tmp_path.glob("*.texts"))


def test_without_a_cache(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path))
    folder, texts = corpus
    plain = [f"{folder}/0.jsonl", f"{folder}/7/a.txt"]
    documents = LocalDocuments(plain, "key", text_column="body", cache_folder="none")
    assert read(documents) == [*texts[:6], "a text\r\nof lines ä"]
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        UserError, match=r"1.jsonl.gz is compressed and .* name a folder, or tokenize ahead"
    ):
        LocalDocuments(str(folder), "key", text_column="body", cache_folder="none")


NO_CACHE = {
    "HOME below a file": {"HOME": "FILE"},
    "HOME that can't be made": {"HOME": "/proc/no-home"},
    "XDG_CACHE_HOME": {"XDG_CACHE_HOME": "FILE/x"},
    "TORCHTITAN_CACHE": {"TORCHTITAN_CACHE": "FILE"},
    "nobody's home": {"TORCHTITAN_CACHE": "~no-such-user/cache"},
}


@pytest.mark.parametrize("kind", [*NO_CACHE, "key"])
def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, kind):
    """Not the data are to blame, and another attempt wouldn't help."""
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("tried again"))
    (tmp_path / "file").write_text("")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for name in ("XDG_CACHE_HOME", "TORCHTITAN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in NO_CACHE.get(kind, {}).items():
        monkeypatch.setenv(name, value.replace("FILE", str(tmp_path / "file")))
    folder = str(tmp_path / "file/cache") if kind == "key" else None
    retry = Retry("training", "a.jsonl", DataLoader())
    with pytest.raises(UserError) as error:
        retry("it", lambda: LocalDocuments(str(tmp_path), "key", cache_folder=folder))
    text = str(error.value)
    assert text.startswith("training.dataloader.cache_folder: can't write to ")
    assert "environment variable TORCHTITAN_CACHE" in text


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_what_a_library_cannot_write_is_no_fault_of_the_data(code):
    attempts = []

    def read():
        attempts.append(1)
        raise OSError(code, os.strerror(code), "/home/me/.cache/huggingface")

    with pytest.raises(UserError, match=r"training\.dataset: .*This is not the data.* set HF_HOME"):
        Retry("training", "c4", DataLoader())("it", read)
    assert len(attempts) == 1


def test_a_file_that_changes_is_indexed_again_or_an_error(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "one"}\n')
    documents = LocalDocuments(str(file), "key")
    file.write_text('{"text": "another"}\n')
    with pytest.raises(ValueError, match=r"x.jsonl has changed since"):
        documents[0]
    assert read(LocalDocuments(str(file), "key")) == ["another"]


def test_streams_read_another_column(tmp_path):
    (tmp_path / "README.md").write_text(
        "---\ndataset_info:\n  features:\n  - {name: id, dtype: int64}\n  - {name: body, "
        "dtype: string}\n---\n"
    )
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"id": i, "body": f"text {i}"}) + "\n" for i in range(50))
    )
    (tmp_path / "rows").mkdir()
    pq.write_table(
        pa.table({"id": range(50), "body": [f"text {i}" for i in range(50)]}),
        tmp_path / "rows/t.parquet",
    )
    expected = [
        i
        for k in range(50)
        for i in [TOKENIZER.bos_id, *TOKENIZER.encode(f"text {k}"), TOKENIZER.eos_id]
    ]
    for folder in (tmp_path, tmp_path / "rows"):
        steps = take(loader(None, rows=1, dataset=str(folder), text_column="body"), 3)
        assert torch.cat([tokens[0] for tokens, *_ in steps]).tolist() == expected[: 3 * SEQ]
    with pytest.raises(UserError, match=r"training.dataset: .* no column 'text'; it has id, body"):
        take(loader(None, rows=1, dataset=str(tmp_path)), 1)


def test_long_documents_in_pieces(tmp_path, monkeypatch):
    """The same rows and, from every position, the same after a resume, while a piece at a time is
    tokenized.
    """
    text = " ".join(RANDOM.choices(TEXTS[2:4] + TEXTS[6:], k=400))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + '\n{"text": "short"}')
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode()))
    expected = take(loader(tmp_path, rows=2), 400)
    monkeypatch.setattr(tokenizer_module, "LONG", 1000)
    monkeypatch.setattr(tokenizer_module, "PIECE", 500)
    documents = LocalDocuments(str(tmp_path), "key")
    assert [len(documents[i]) > 1000 for i in range(4)] == [True, True, False, True]
    longest = []
    encode = TOKENIZER.encode
    monkeypatch.setattr(
        TOKENIZER, "encode", lambda text, **k: longest.append(len(text)) or encode(text, **k)
    )
    reading = loader(tmp_path, rows=2)
    got = take(reading, 400)
    assert max(longest) <= 1000
    assert all(torch.equal(a[1], b[1]) for a, b in zip(got, expected, strict=True))
    for at in (3, 50, 181, 300):
        resumed = loader(tmp_path, rows=2)
        longest.clear()
        resumed.seek(saved(resumed, got[at][2]))
        (step,) = take(resumed, 1)
        assert torch.equal(step[0], expected[at + 1][0])
        assert sum(longest) < 20_000, "a resume encodes from the piece on, not the whole document"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.e2e)])
def test_tokenize_anything(corpus, tmp_path, capsys, workers, monkeypatch):
    monkeypatch.setattr("torchtitan.data.tokens.tokenizing._BATCH", 3000)
    folder, texts = corpus
    argv = [
        "--output",
        str(tmp_path),
        "--part",
        "10",
        "--workers",
        str(workers),
        "--text-column",
        "body",
    ]
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    tokenize.main(["--input", str(folder), *argv])
    expected = [
        i for text in texts for i in [TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id]
    ]
    assert token_file_ids(tmp_path) == expected
    assert not (tmp_path / "cache").exists()
    report = json.loads((tmp_path / "tokens-report.json").read_text())
    assert report.pop("input_files") == 9
    assert report.pop("ignored").startswith("ignoring 5 files without documents (")
    size = sum(len(text.encode()) for text in texts)
    assert report == {
        "documents": len(texts),
        "tokens": len(expected),
        "bytes": size,
        "bytes_per_token": round(size / len(expected), 4),
        "skipped": {},
        "first_skipped": [],
        "files": 4,
    }
    assert f"{len(expected):,} tokens of {len(texts)} documents" in capsys.readouterr().out


def test_tokenize_long_documents(tmp_path, monkeypatch):
    text = " ".join(RANDOM.choices(TEXTS, k=300))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + '\n{"text": "short"}')
    monkeypatch.setattr(tokenizer_module, "LONG", 1000)
    monkeypatch.setattr(tokenizer_module, "PIECE", 500)
    monkeypatch.setattr("torchtitan.data.tokens.encoding.PIECE", 500)
    tokenize.main(["--input", str(tmp_path), "--output", str(tmp_path / "out"), "--workers", "1"])
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id]
    assert token_file_ids(tmp_path / "out") == [
        *ids,
        *ids,
        TOKENIZER.bos_id,
        *TOKENIZER.encode("short"),
        TOKENIZER.eos_id,
    ]


def test_sizes_of_texts_are_known(tmp_path, corpus):
    folder, texts = corpus
    tokenize.main(
        [
            "--input",
            str(folder),
            "--text-column",
            "body",
            "--output",
            str(tmp_path),
            "--workers",
            "1",
        ]
    )
    about = json.loads((tmp_path / "tokens-00000.json").read_text())
    assert about["bytes"] == sum(len(text.encode()) for text in texts)
