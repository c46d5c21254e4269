"""Bad data, and reading that fails: named with the key or the argument, wherever it happens."""

import json
import logging
import multiprocessing

import pytest

from tests.data_kinds import TOKENIZER, loader, open_kind, take
from tests.positions import saved
from torchtitan.data.read.documents import DemoDocuments, LocalDocuments
from torchtitan.utils.errors import UserError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cut_tokens(folder, corpora):
    for file in corpora["tokens"].iterdir():
        content = file.read_bytes()
        write(folder / file.name, content[:-2] if file.name == "tokens-00001.bin" else content)
    return folder


def token_file(content=b"\0\0" * 100, **about):
    """Makes a token file that others wrote."""

    def make(folder, corpora):
        meta = {"dtype": "uint16", "tokens": 100, "tokenizer": TOKENIZER.fingerprint} | about
        write(folder / "x.json", json.dumps(meta) if about.get("json", True) else "[" * 100_000)
        return write(folder / "x.bin", content)

    return make


def lines(*lines, name="x.jsonl"):
    """Makes a file of JSON lines."""
    return lambda folder, corpora: write(folder / name, "".join(f"{line}\n" for line in lines))


SOUND = '{"text": "a"}'
DEEP = "[" * 100_000


def unequal_columns(folder, corpora):
    write(folder / "a.jsonl", '{"text": "a"}\n')
    write(folder / "b.jsonl", '{"body": "b"}\n')
    return folder


BAD = {
    "no such file": (lambda d, c: d / "nothing*.jsonl", "no file matches"),
    "empty file": (lambda d, c: write(d / "e.jsonl", ""), "e.jsonl"),
    "cut gzip": (
        lambda d, c: write(d / "c.jsonl.gz", (c["shards"] / "0.json.gz").read_bytes()[:-40]),
        "c.jsonl.gz",
    ),
    "cut parquet": (lambda d, c: write(d / "c.parquet", b"PAR1" + b"\0" * 50), "c.parquet"),
    "cut json": (
        lambda d, c: write(d / "c.jsonl", f'{SOUND}\n{{"text": "b'),
        "c.jsonl: line 2: not JSON .cut off",
    ),
    "wrong column": (
        lines('{"content": "a"}'),
        "line 1: no column 'text'; it has content. Name the column",
    ),
    "numbers for text": (
        lines(SOUND, "", '{"text": 1}'),
        "x.jsonl: line 3: column 'text' holds int, not text",
    ),
    "unequal columns": (unequal_columns, "b.jsonl: line 1: no column 'text'; it has body"),
    "deep line": (lines(SOUND, DEEP), "x.jsonl: line 2: nested too deeply"),
    "deep JSON array": (lines(DEEP, name="x.json"), "x.json: the array is nested too deeply"),
    "no object": (lines(SOUND, "5"), "x.jsonl: line 2: must be an object"),
    "array of numbers": (lines('["a", 5]', name="x.json"), "x.json: entry 2: must be an object"),
    "not UTF-8": (
        lambda d, c: write(d / "x.jsonl", b'{"text": "\xff\xfe"}\n'),
        "x.jsonl: line 1: not UTF-8: 0xff",
    ),
    "half a surrogate pair": (lines(r'{"text": "\ud800"}'), "x.jsonl.*surrogate"),
    "empty texts": (
        lines('{"text": ""}', '{"text": ""}'),
        "holds no text: all its documents are empty .2 of them",
    ),
    "unknown kind": (lambda d, c: write(d / "w.pdf", "x"), "w.pdf has an unknown format"),
    "cut token file": (cut_tokens, "tokens-00001.bin has .* bytes instead of"),
    "tokens of another tokenizer": (token_file(tokenizer="other"), "another tokenizer"),
    "tokens that are floats": (
        token_file(dtype="float16"),
        "x.json: dtype: got 'float16', must be 'uint16', ",
    ),
    "number of tokens": (token_file(tokens=-1), "x.json: tokens: got -1"),
    "negative tokens": (
        token_file(b"\1\0\xfe\xff" * 50, dtype="int16"),
        "id -2 at token 1, but the tokenizer has",
    ),
    "only special tokens": (token_file(), "holds no tokens but begin-of-text and end-of-text"),
    "deep description": (token_file(json=False), "x.json is nested too deeply"),
    "token file alone": (
        lambda d, c: write(d / "x.bin", b"\0\0"),
        "no complete description x.json",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_named_with_the_key(tmp_path, corpora, case):
    make, text = BAD[case]
    with pytest.raises(UserError, match=text) as error:
        take(loader(make(tmp_path, corpora)), 1)
    assert "training.dataset_path" in str(error.value)


def test_forms_of_json(tmp_path):
    """Lines, an array, strings, a byte-order mark, Windows' newlines."""
    texts = ["ä" * n for n in (0, 1, 30, 500, 7)]
    rows = [json.dumps({"n": [1.5, {}], "text": text}) for text in texts]
    forms = {
        "lines": "\n".join(rows),
        "windows": "\r\n".join(rows) + "\r\n",
        "array": f" [{', '.join(rows)}]\n",
        "strings": json.dumps(texts),
        "mark": "\ufeff" + "\n".join(rows),
    }
    for name, content in forms.items():
        documents = LocalDocuments(str(write(tmp_path / f"{name}.json", content)), "--input")
        assert [documents[i] for i in range(len(documents))] == texts, name


def test_unknown_dataset_lists_the_known_ones():
    with pytest.raises(UserError, match=r"training.dataset: no dataset 'wikitext'.*demo"):
        loader(None, dataset="wikitext")


def test_an_error_while_reading_reaches_the_trainer(monkeypatch):
    def fail(self, index):
        raise OSError(5, "Input/output error")

    reading = loader(None, dataset="demo", retry_pause_seconds=0.01)
    monkeypatch.setattr(DemoDocuments, "__getitem__", fail)
    with pytest.raises(
        UserError,
        match=r"training.dataset: reading failed: document .* of demo: OSError.*Input/output error",
    ):
        take(reading, 1)


@pytest.mark.e2e
def test_a_killed_worker_reaches_the_trainer(corpora):
    others = set(multiprocessing.active_children())  # the ranks of other tests
    killed = loader(corpora["jsonl"], num_workers=1)
    batches = iter(killed)
    next(batches)
    for worker in set(multiprocessing.active_children()) - others:
        worker.kill()
    with pytest.raises(UserError, match=r"num_workers: worker process \d+ was killed by SIGKILL"):
        list(batches)


def test_position_in_another_stream_is_refused(corpora, tmp_path):
    whole = open_kind("stream", corpora)
    state = saved(whole, take(whole, 2)[-1][2])
    for shard in corpora["shards"].iterdir():
        write(tmp_path / shard.name, shard.read_bytes())
    with pytest.raises(UserError, match=r"training.dataset: .* stream of"):
        loader(None, dataset=str(tmp_path)).seek(state)


def test_too_few_documents_for_the_batch_are_reported(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    loader(write(tmp_path / "one.txt", "a long text"))
    assert "1 document for 8 rows per step" in caplog.text
