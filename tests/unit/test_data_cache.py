"""The cache of indexes: damage is found and repaired, and a sound cache is never made again."""

import fcntl
import gzip
import json
import os
import shutil
import signal

import numpy as np
import pytest

from torchtitan.data.read import index_cache as caches
from torchtitan.data.read.documents import LocalDocuments
from torchtitan.data.read.opening import SAMPLED_BYTES, full_hash, sample_hash
from torchtitan.utils import signals
from torchtitan.utils.signals import StopRequest
from torchtitan.utils.wording import show_size

TEXTS = [f"document {i} of words" for i in range(40)]


@pytest.fixture
def corpus(tmp_path):
    """A file that is copied, one that is read in place, and their cache."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines[:20]).encode()))
    (folder / "b.jsonl").write_text("".join(lines[20:]))
    return folder


def read(folder):
    documents = LocalDocuments(str(folder), "key", cache_folder=str(folder.with_name("cache")))
    return [str(documents[i]) for i in range(len(documents))]


def shifted(file):
    """Positions that are as plausible as the right ones."""
    ranges = np.fromfile(file, "int64").reshape(-1, 2)
    np.roll(ranges, 1, axis=0).tofile(file)


DAMAGES = {
    "texts deleted": ("*.texts", os.unlink),
    "texts cut": ("*.texts", lambda file: os.truncate(file, 10)),
    "texts of others": ("*.texts", lambda file: file.write_bytes(b"x" * file.stat().st_size)),
    "ranges deleted": ("*.ranges", os.unlink),
    "ranges cut": ("*.ranges", lambda file: os.truncate(file, 16)),
    "other ranges": ("*.ranges", shifted),
    "a pipe": ("*.ranges", lambda file: (file.unlink(), os.mkfifo(file))),
    "empty records": ("*.json", lambda file: file.write_text("{}")),
    "nested records": ("*.json", lambda file: file.write_text("[" * 100_000)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(corpus, caplog, monkeypatch, damage):
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    assert read(corpus) == TEXTS
    pattern, change = DAMAGES[damage]
    files = list(corpus.with_name("cache").glob(pattern))
    assert files
    for file in files:
        change(file)
    caplog.clear()
    assert read(corpus) == TEXTS
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "was changed or deleted; indexing again: " in warnings[0]
    monkeypatch.setattr(caches, "find_documents", lambda *_: pytest.fail("indexed again"))
    assert read(corpus) == TEXTS


def test_what_killed_processes_left_is_removed(corpus):
    """Unless another process holds the lock."""
    cache = corpus.with_name("cache")
    cache.mkdir()
    for key in "ab":
        for ending in ("texts.tmp", "ranges.tmp", "lock"):
            (cache / f"{key * 32}.{ending}").write_text("x")
    with (cache / f"{'b' * 32}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read(corpus) == TEXTS
    names = {file.name for file in cache.iterdir() if ".tmp" in file.name or ".lock" in file.name}
    assert names == {f"{'b' * 32}.{ending}" for ending in ("texts.tmp", "ranges.tmp", "lock")}


def test_a_request_to_stop_ends_indexing_and_keeps_whole_files(corpus, caplog, monkeypatch):
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    caplog.set_level("INFO")
    stop = StopRequest()
    stop.defer()
    monkeypatch.setattr(signals, "_listening", [stop])
    find = caches.find_documents

    def stopped_in_the_second(index, *arguments, **options):
        if index.path.endswith("b.jsonl"):
            stop.ask(signal.SIGTERM)
        return find(index, *arguments, **options)

    monkeypatch.setattr(caches, "find_documents", stopped_in_the_second)
    with pytest.raises(signals.Stopped):
        read(corpus)
    assert caplog.messages[-1] == (
        f"Stopped while indexing {corpus / 'b.jsonl'}, which the next start reads again; indexes "
        "of whole files are kept"
    )
    cache = corpus.with_name("cache")
    assert sorted(file.suffix for file in cache.iterdir()) == [".json", ".ranges", ".texts"]
    monkeypatch.setattr(signals, "_listening", [])
    kept = []
    monkeypatch.setattr(
        caches, "find_documents", lambda index, *a, **o: kept.append(index) or find(index, *a, **o)
    )
    assert read(corpus) == TEXTS
    assert [index.path for index in kept] == [str(corpus / "b.jsonl")]


@pytest.mark.parametrize("size", [1, 100_000])
def test_the_announced_size_is_measured(tmp_path, caplog, monkeypatch, size):
    """A text that compresses by far more than others."""
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    caplog.set_level("INFO")
    text = "text\n" + f"{'a' * size}\n" * 50
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert len(read(tmp_path)) == 50
    assert f"about {show_size(len(text))} of " in caplog.text


def test_a_cache_that_changes_in_mid_run_is_an_error(corpus):
    documents = LocalDocuments(str(corpus), "key", cache_folder=str(corpus.with_name("cache")))
    for file in corpus.with_name("cache").glob("*.texts"):
        file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(
        ValueError, match=r"\.texts has changed since the run indexed it; start the run again"
    ):
        documents[0]


def test_a_copied_cache_is_used(corpus, monkeypatch):
    """Its files have other times and inodes, but the same contents."""
    assert read(corpus) == TEXTS
    cache = corpus.with_name("cache")
    cache.rename(cache.with_name("old"))
    shutil.copytree(cache.with_name("old"), cache, copy_function=shutil.copyfile)
    monkeypatch.setattr(caches, "find_documents", lambda *_: pytest.fail("indexed again"))
    assert read(corpus) == TEXTS


@pytest.mark.parametrize("same", [True, False])
def test_another_inode_is_not_another_file(corpus, monkeypatch, same):
    """File systems in user space may number files anew; but a file may also be replaced by one with
    the same time.
    """
    assert read(corpus) == TEXTS
    file = corpus / "b.jsonl"
    status = file.stat()
    content = file.read_bytes()
    new = file.with_name(".new")
    new.write_bytes(content if same else content.replace(b"words", b"WORDS"))
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(file)
    assert file.stat().st_ino != status.st_ino
    if same:
        monkeypatch.setattr(caches, "find_documents", lambda *_: pytest.fail("indexed again"))
    assert read(corpus) == TEXTS[:20] + [
        text if same else text.replace("words", "WORDS") for text in TEXTS[20:]
    ]


def hashes(path):
    with path.open("rb") as file:
        return sample_hash(file.fileno()), full_hash(file.fileno())


@pytest.mark.parametrize("size", [0, 1, SAMPLED_BYTES, SAMPLED_BYTES + 1, 100 * SAMPLED_BYTES])
def test_samples(tmp_path, size):
    """Every byte of a small file counts; of a large one the first, the last, some between them, and
    the size.
    """
    content = bytearray(np.random.default_rng(size).bytes(size))
    file = tmp_path / "x"
    file.write_bytes(content)
    first = hashes(file)
    assert hashes(file) == first
    for at in {0, size // 3, 2**14 * (size // 2**15), size - 1} if size else ():
        content[at] ^= 1
        file.write_bytes(content)
        changed = hashes(file)
        assert changed[1] != first[1]
        if size <= SAMPLED_BYTES or at in (0, size - 1):
            assert changed[0] != first[0]
        content[at] ^= 1
    file.write_bytes(content + b"\0")
    assert hashes(file)[0] != first[0]
