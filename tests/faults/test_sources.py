"""Data sources that fail, hang or return something else than text."""

import gzip
import multiprocessing
import os
import shutil
import signal
import threading

import datasets
import pytest
import torch
import torch.distributed as dist

from tests.data_kinds import loader, open_kind, take
from tests.runs import arguments, train
from torchtitan.data.read.documents import LocalDocuments
from torchtitan.utils.errors import UserError

QUICK = {"retry_pause_seconds": 0.01}


def failing(real, times, after):
    """`real`, but calls `after` + 1 to `after` + `times` fail."""
    calls = 0

    def read(*args):
        nonlocal calls
        calls += 1
        if after < calls <= after + times:
            raise OSError(5, "Input/output error")
        return real(*args)

    return read


def breaking(times, after):
    """Make streams fail `times` times in a row, first after `after` rows."""
    real = datasets.IterableDataset.__iter__
    left = [times]

    def rows(self):
        for i, row in enumerate(real(self)):
            if left[0] and (i == after or left[0] < times):
                left[0] -= 1
                raise ConnectionError("reset by peer")
            yield row

    return rows


def break_reads(kind, monkeypatch, times, after=5):
    if kind == "tokens":
        monkeypatch.setattr(os, "pread", failing(os.pread, times, after))
    elif kind == "jsonl":
        monkeypatch.setattr(
            LocalDocuments, "__getitem__", failing(LocalDocuments.__getitem__, times, after)
        )
    else:
        monkeypatch.setattr(datasets.IterableDataset, "__iter__", breaking(times, after))


@pytest.mark.parametrize("kind", ["jsonl", "tokens", "stream"])
def test_a_few_failed_reads_change_nothing(corpora, monkeypatch, kind):
    sound = take(open_kind(kind, corpora), 12)
    break_reads(kind, monkeypatch, times=3)
    for (tokens, labels, state), expected in zip(
        take(open_kind(kind, corpora, **QUICK), 12), sound, strict=True
    ):
        assert torch.equal(tokens, expected[0])
        assert torch.equal(labels, expected[1])
        assert state == expected[2]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("jsonl", r"document \d+ of .*corpus.jsonl"),
        ("tokens", r"window \d+ of .*tokens"),
        ("stream", r"lane \d, epoch 0, .*shard 0"),
    ],
)
def test_reads_that_keep_failing_name_the_place(corpora, monkeypatch, kind, place):
    break_reads(kind, monkeypatch, times=100)
    with pytest.raises(UserError, match=place) as error:
        take(open_kind(kind, corpora, retries=2, **QUICK), 12)
    assert "training.dataset: reading failed: " in str(error.value)
    assert "(3 attempts)" in str(error.value)
    assert "training.dataloader.retries" in str(error.value)


def test_token_files_truncated_or_overwritten_during_training(corpora, tmp_path):
    folder = shutil.copytree(corpora["tokens"], tmp_path / "tokens")
    reading = loader(folder, retries=0)
    for file in folder.glob("*.bin"):
        os.truncate(file, 100)
    with pytest.raises(UserError, match=r"tokens-0000\d.bin ends before token \d+ \(truncated\?\)"):
        take(reading, 12)
    folder = shutil.copytree(corpora["tokens"], tmp_path / "others")
    for file in folder.glob("*.bin"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(
        UserError, match=r"has id 65535 at token \d+, but the tokenizer has only 2048"
    ):
        take(loader(folder, retries=0), 1)


STREAMS = {
    "numbers": ('{"text": 1}', r"column 'text' holds int, not text"),
    "brackets": ("[" * 100_000, r"ValueError: .*depth"),
    "other columns": ('{"body": "a"}', r"no column 'text'; it has body"),
    "no text": ('{"text": ""}', r"lane \d of the dataset has no text"),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_of_something_else_is_an_error_at_once(tmp_path, case, caplog):
    """What can't be decoded is not read again."""
    line, message = STREAMS[case]
    for i in range(2):
        with gzip.open(tmp_path / f"{i}.json.gz", "wt") as file:
            file.write(f"{line}\n" * 5)
    with pytest.raises(UserError, match=rf"training.dataset: .*{message}"):
        take(loader(None, dataset=str(tmp_path), retries=1, **QUICK), 1)
    assert "trying again" not in caplog.text


def stalled(argv):
    """Train while reads on rank 1 hang after 30 documents."""
    real = LocalDocuments.__getitem__
    calls = 0

    def hang(self, index):
        nonlocal calls
        calls += 1
        if calls > 30:
            threading.Event().wait()
        return real(self, index)

    if dist.get_rank() == 1:
        LocalDocuments.__getitem__ = hang
    train(argv)


@pytest.mark.slow
def test_a_stall_is_an_error_of_its_rank_before_any_collective_times_out(ranks, tmp_path):
    argv = arguments(
        tmp_path,
        "--training.dataloader.timeout_seconds=2",
        "--comm.init_timeout_seconds=20",
        steps=500,
    )
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed") as error:
        ranks(2, stalled, argv)
    assert "UserError: training.dataset: no data for 2 s from " in str(error.value)
    assert "corpus.jsonl: still reading document " in str(error.value)
    assert "training.dataloader.timeout_seconds" in str(error.value)


def test_a_worker_that_hangs_is_an_error(corpora):
    others = set(multiprocessing.active_children())
    batches = iter(loader(corpora["jsonl"], num_workers=1, timeout_seconds=2.0))
    next(batches)
    workers = set(multiprocessing.active_children()) - others
    assert workers
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=r"no data for 2 s .* 1 worker processes don.t answer"):
            list(batches)
    finally:
        for worker in workers:
            worker.kill()
