"""The global order of rows: against a naive packer, for any number of ranks and workers, across
resumes.
"""

import gzip
import itertools
import json
import logging
import math
import multiprocessing

import numpy as np
import pytest
import torch

from tests.positions import saved
from tests.runs import write_corpus
from torchtitan.commands import tokenize
from torchtitan.config.sections.data import DataLoader, Source
from torchtitan.data.loader import build_loader
from torchtitan.data.order.mixture import permute
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.data.sources import DataSpec
from torchtitan.data.text.documents import DemoDocuments, LocalDocuments
from torchtitan.data.text.tokenizer import build_tokenizer
from torchtitan.data.tokens.token_files import write_token_file
from torchtitan.utils.errors import UserError

TOKENIZER = build_tokenizer("./tests/assets/tokenizer")
SEQ = 24
ROWS = 8


def loader(path, rank=0, degree=1, *, infinite=True, rows=ROWS, dataset="files", **options):
    text_column = options.pop("text_column", "text")
    path = None if path is None else str(path)
    spec = DataSpec(
        sources=[Source(name="data", dataset=dataset, dataset_path=path, text_column=text_column)],
        tokenizer=TOKENIZER,
        seq_len=options.pop("seq_len", SEQ),
        rows_per_step=rows,
        seed=options.pop("seed", 3),
        infinite=infinite,
        on_bad_document=options.pop("on_bad_document", "stop"),
        options=DataLoader(**options),
    )
    return build_loader(spec, dp_rank=rank, dp_degree=degree)


def take(loader, count):
    """The next `count` steps, as (tokens, labels, position)."""
    try:
        return [(b.tokens, b.labels, b.position) for b in itertools.islice(iter(loader), count)]
    finally:
        loader.close()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The same text in every format."""
    folder = tmp_path_factory.mktemp("corpora")
    jsonl = write_corpus(folder / "corpus.jsonl", documents=23)
    (folder / "shards").mkdir()
    for i, lines in enumerate(np.array_split(jsonl.read_text().splitlines(), 4)):
        with gzip.open(folder / f"shards/{i}.json.gz", "wt") as file:
            file.write("\n".join(lines))
    tokenize.main(
        [
            "--input",
            str(jsonl),
            "--output",
            str(folder / "tokens"),
            "--part",
            "10",
            "--workers",
            "1",
        ]
    )
    return {
        "jsonl": jsonl,
        "shards": folder / "shards",
        "tokens": folder / "tokens",
        "stream": None,
    }


def open_kind(kind, corpora, *args, **kwargs):
    """`stream` reads the compressed shards as `datasets` streams a hub dataset."""
    return loader(
        corpora[kind],
        *args,
        dataset=str(corpora["shards"]) if kind == "stream" else "files",
        **kwargs,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_permutation_is_a_bijection_and_differs_by_epoch(size):
    orders = [[permute(i, size, 5, epoch) for i in range(size)] for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(size))
    if size > 3:
        assert orders[0] != orders[1]
        assert orders[0] != [permute(i, size, 6, 0) for i in range(size)]


def test_permutation_has_no_trend():
    order = np.array([permute(i, 20_000, 1, 0) for i in range(20_000)], float)
    assert abs(np.corrcoef(np.arange(20_000), order)[0, 1]) < 0.03


def test_text_rows_equal_a_naive_packer(corpora):
    """Lane l reads documents l, l + 8, ... of the shuffled epochs; rows are cut from their
    concatenation.
    """
    texts = [json.loads(line)["text"] for line in corpora["jsonl"].read_text().splitlines()]
    lanes = []
    for lane in range(ROWS):
        ids = []
        for k in range(lane, 40 * ROWS, ROWS):
            epoch, slot = divmod(k, len(texts))
            text = texts[permute(slot, len(texts), 3, epoch)]
            ids += [TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id]
        lanes.append(ids)
    for step, (tokens, labels, _) in enumerate(take(loader(corpora["jsonl"]), 12)):
        for lane, ids in enumerate(lanes):
            row = ids[step * SEQ : (step + 1) * SEQ + 1]
            assert tokens[lane].tolist() == row[:-1]
            assert labels[lane].tolist() == row[1:]


def test_an_epoch_holds_every_document_once(corpora):
    texts = sorted(json.loads(line)["text"] for line in corpora["jsonl"].read_text().splitlines())
    documents = LocalDocuments(str(corpora["jsonl"]), "key")
    for epoch in (0, 1):
        assert sorted(documents[permute(i, 23, 3, epoch)] for i in range(23)) == texts


@pytest.mark.parametrize("kind", ["jsonl", "tokens", "stream"])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_global_batch_does_not_depend_on_the_ranks(corpora, kind, degree):
    whole = take(open_kind(kind, corpora), 9)
    ranks = [take(open_kind(kind, corpora, rank, degree), 9) for rank in range(degree)]
    for step, (tokens, labels, _) in enumerate(whole):
        assert torch.equal(torch.cat([rank[step][0] for rank in ranks]), tokens)
        assert torch.equal(torch.cat([rank[step][1] for rank in ranks]), labels)


@pytest.mark.parametrize("kind", ["jsonl", "tokens", "stream"])
@pytest.mark.parametrize(("before", "after", "at"), [(1, 4, 1), (4, 2, 5), (2, 8, 7), (8, 1, 3)])
def test_resume_at_any_step_under_another_degree(corpora, kind, before, after, at):
    whole = take(open_kind(kind, corpora), at + 4)
    ranks = [take(open_kind(kind, corpora, rank, before), at) for rank in range(before)]
    state = saved(open_kind(kind, corpora), *(rank[-1][2] for rank in ranks))
    parts = []
    for rank in range(after):
        resumed = open_kind(kind, corpora, rank, after)
        resumed.seek(state)
        parts.append(take(resumed, 4))
    for i in range(4):
        assert torch.equal(torch.cat([part[i][0] for part in parts]), whole[at + i][0])


@pytest.mark.parametrize("kind", ["jsonl", "tokens", "stream"])
@pytest.mark.parametrize("chain", [[1, 1, 1, 1, 1, 1, 1, 1], [3, 4, 2, 5]])
def test_resuming_again_and_again_changes_nothing(corpora, kind, chain):
    """Positions may be saved soon after a resume, inside its first document."""
    whole = take(open_kind(kind, corpora), sum(chain))
    state = None
    got = []
    for steps in chain:
        resumed = open_kind(kind, corpora)
        if state is not None:
            resumed.seek(state)
        got += take(resumed, steps)
        state = saved(resumed, got[-1][2])
    for (tokens, *_, one), (expected, *_, other) in zip(got, whole, strict=True):
        assert torch.equal(tokens, expected)
        assert one == other


@pytest.mark.parametrize(("kind", "workers"), [("jsonl", 3), ("tokens", 2), ("stream", 2)])
@pytest.mark.e2e
def test_workers_change_nothing(corpora, kind, workers):
    ranks = [take(open_kind(kind, corpora, rank, 2), 6) for rank in (0, 1)]
    plain = ranks[1]
    resumed = open_kind(kind, corpora, 1, 2, num_workers=workers, prefetch_factor=3)
    resumed.seek(saved(resumed, *(rank[1][2] for rank in ranks)))
    assert [s for *_, s in take(resumed, 4)] == [s for *_, s in plain[2:]]
    for (tokens, labels, _), (t, lab, _) in zip(take(resumed, 4), plain[2:], strict=True):
        assert torch.equal(tokens, t)
        assert torch.equal(labels, lab)


@pytest.mark.parametrize("kind", ["jsonl", "tokens", "stream"])
@pytest.mark.parametrize(
    ("degree", "rows", "workers"),
    [(1, 1, 0), (2, 4, 0), (4, 4, 0), pytest.param(1, 6, 2, marks=pytest.mark.e2e)],
)
def test_a_finite_pass_predicts_every_token_once(corpora, kind, degree, rows, workers):
    texts = [json.loads(line)["text"] for line in corpora["jsonl"].read_text().splitlines()]
    expected = sorted(
        i for text in texts for i in [TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id]
    )
    seen = []
    for rank in range(degree):
        one = open_kind(kind, corpora, rank, degree, infinite=False, rows=rows, num_workers=workers)
        steps = take(one, 10_000)
        again = take(one, 10_000)
        assert [t.tolist() for t, *_ in again] == [t.tolist() for t, *_ in steps], (
            "a second pass is the same"
        )
        seen += [i for _, labels, _ in steps for i in labels[labels != IGNORE_INDEX].tolist()]
    sequences = {"tokens": 3, "jsonl": rows, "stream": math.gcd(rows, 4)}[kind]
    assert len(expected) - len(seen) == sequences, (
        "only the very first token of each lane (of each token file) has nothing before it"
    )
    missing = list(expected)
    for i in seen:
        missing.remove(i)
    assert set(missing) <= {TOKENIZER.bos_id}


def test_padding_is_never_a_label(corpora):
    *_, last = take(loader(corpora["jsonl"], infinite=False, rows=1), 10_000)
    tokens, labels, _ = last
    assert (labels == IGNORE_INDEX).any()
    assert tokens.min() >= 0


def test_demo_is_real_text_with_held_out_files():
    train = DemoDocuments(validation=False)
    held_out = DemoDocuments(validation=True)
    assert not set(train.files) & set(held_out.files)
    assert len(held_out) == pytest.approx(len(train) / 19, rel=0.02)
    total = sum(path.stat().st_size for path in train.files)
    assert 5e6 < total < 2e7
    assert any("import" in train[i] for i in range(20))


def test_c4_test_is_a_logged_alias_of_the_demo(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    with caplog.at_level("INFO", "torchtitan"):
        alias = loader(None, dataset="c4_test")
    assert "c4_test" in caplog.text
    assert torch.equal(take(alias, 1)[0][0], take(loader(None, dataset="demo"), 1)[0][0])


def test_text_and_parquet_files(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.txt").write_text("one document\n\nwith two paragraphs")
    documents = LocalDocuments(str(tmp_path / "*.txt"), "key")
    assert [documents[0]] == ["one document\n\nwith two paragraphs"]
    pq.write_table(pa.table({"text": ["x", "y"], "id": [1, 2]}), tmp_path / "b.parquet")
    documents = LocalDocuments(str(tmp_path / "b.parquet"), "key")
    assert [documents[i] for i in range(len(documents))] == ["x", "y"]


def test_tokenize_resumes_and_refuses_another_input(corpora, tmp_path, capsys):
    argv = [
        "--input",
        str(corpora["jsonl"]),
        "--output",
        str(tmp_path),
        "--part",
        "5",
        "--workers",
        "1",
    ]
    tokenize.main(argv)
    contents = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert len(contents) == 3 * 5 + 1
    assert not any(name.startswith(".") for name in contents)
    (tmp_path / "tokens-00002.json").unlink()
    tokenize.main(argv)
    assert "4 parts already done" in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == contents
    with pytest.raises(UserError, match="was made from another input"):
        tokenize.main([*argv[:1], "demo", *argv[2:]])
    changed = corpora["jsonl"].read_bytes().replace(b"e", b"i", 1)
    (tmp_path / corpora["jsonl"].name).write_bytes(changed)
    with pytest.raises(UserError, match="was made from another input"):
        tokenize.main([*argv[:1], str(tmp_path / corpora["jsonl"].name), *argv[2:]])


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
    "deep text": (
        lines(SOUND, f'{{"text": {DEEP}{"]" * 100_000}}}'),
        "x.jsonl: line 2: nested too deeply",
    ),
    "deep array": (lines(DEEP, SOUND), "x.jsonl: line 1: nested too deeply"),
    "deep key": (lines('{"a":' * 100_000), "x.jsonl: line 1: nested too deeply"),
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
    "tokens that are objects": (
        token_file(dtype="O"),
        "x.json: dtype: got 'O', must be 'uint16', ",
    ),
    "number of tokens": (token_file(tokens=-1), "x.json: tokens: got -1"),
    "number of tokens, text": (
        token_file(tokens="100"),
        "x.json: tokens: got '100', must be an integer",
    ),
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


def test_brackets_beside_the_text_are_skipped(tmp_path):
    """The reader of `datasets` would overflow its stack."""
    deep = f'{{"text": "a", "x": {"[" * 100_000}{"]" * 100_000}, "y": {{"text": 5}}}}'
    documents = LocalDocuments(str(lines(deep, SOUND)(tmp_path, None)), "--input")
    assert [documents[i] for i in range(len(documents))] == ["a", "a"]


def test_forms_of_json(tmp_path, monkeypatch):
    """Batches cut at newlines, a line longer than a batch, an array, strings, a byte-order mark,
    Windows' newlines.
    """
    monkeypatch.setattr("torchtitan.data.text.json_records.BLOCK", 50)
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


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seq_len": 48}, "training.seq_len"),
        ({"seed": 9}, "debug.seed"),
        ({"path": "other"}, "training.dataset"),
    ],
)
def test_position_in_other_data_is_refused(tmp_path, corpora, change, key):
    whole = loader(corpora["jsonl"])
    state = saved(whole, take(whole, 2)[-1][2])
    path = (
        write_corpus(tmp_path / "corpus.jsonl", seed=8)
        if change.pop("path", None)
        else corpora["jsonl"]
    )
    with pytest.raises(UserError, match=key) as error:
        loader(path, **change).seek(state)
    assert "exclude_from_loading" in str(error.value)


def test_token_files_resume_under_another_batch_size(corpora):
    whole = torch.cat([tokens for tokens, *_ in take(loader(corpora["tokens"], rows=4), 12)])
    resumed = loader(corpora["tokens"], rows=8)
    resumed.seek(saved(resumed, take(loader(corpora["tokens"], rows=4), 4)[-1][2]))
    assert torch.equal(torch.cat([tokens for tokens, *_ in take(resumed, 4)]), whole[16:])


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
    with pytest.raises(UserError, match=r"training.dataset: reading failed: "):
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


def test_a_failed_write_leaves_no_file(tmp_path):
    def documents():
        yield [1, 2, 3]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_token_file(tmp_path / "x.bin", documents(), TOKENIZER, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (["--output", "/dev/null/x"], "--output: can't create the folder"),
        (["--input", "nothing"], "--input: no file"),
    ],
)
def test_tokenize_names_the_argument(corpora, tmp_path, change, text):
    with pytest.raises(UserError, match=text):
        tokenize.main(["--input", str(corpora["jsonl"]), "--output", str(tmp_path), *change])


def test_tokenize_takes_several_files(corpora, tmp_path):
    shards = sorted(map(str, corpora["shards"].iterdir()))
    tokenize.main(["--input", *shards, "--output", str(tmp_path / "several"), "--workers", "1"])
    tokenize.main(
        ["--input", f"{corpora['shards']}/*", "--output", str(tmp_path / "glob"), "--workers", "1"]
    )
    assert (tmp_path / "several/tokens-00000.bin").read_bytes() == (
        tmp_path / "glob/tokens-00000.bin"
    ).read_bytes()
