"""The global order of rows: against a naive packer, for any number of ranks and workers, across
resumes.
"""

import json
import logging

import numpy as np
import pytest
import torch

from tests.data_kinds import ROWS, SEQ, TOKENIZER, loader, open_kind, take
from tests.positions import saved
from tests.runs import write_corpus
from torchtitan.commands import tokenize
from torchtitan.data.order.rows import IGNORE_INDEX, permute
from torchtitan.data.read.documents import DemoDocuments, LocalDocuments
from torchtitan.data.tokens.token_files import write_token_file
from torchtitan.utils.errors import UserError


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


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param("jsonl", 3, marks=pytest.mark.slow),
        ("tokens", 2),
        pytest.param("stream", 2, marks=pytest.mark.slow),
    ],
)
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
    sequences = {"tokens": 3, "jsonl": 8, "stream": 4}[kind]
    assert len(expected) - len(seen) == sequences, (
        "only the very first token of each lane (of each token file) has nothing before it"
    )
    missing = list(expected)
    for i in seen:
        missing.remove(i)
    assert set(missing) <= {TOKENIZER.bos_id}


def rows_of_pass(kind, corpora, degree, rows):
    """The predicted rows of one pass, in no order."""
    steps = [
        step
        for rank in range(degree)
        for step in take(open_kind(kind, corpora, rank, degree, infinite=False, rows=rows), 10_000)
    ]
    rows = [row.tolist() for _, labels, _ in steps for row in labels]
    return sorted(row for row in rows if set(row) != {IGNORE_INDEX})


@pytest.mark.parametrize(("documents", "lanes"), [(1, 1), (7, 4), (23, 8)])
def test_a_pass_over_text_has_the_rows_of_a_naive_packer(tmp_path, documents, lanes):
    """Documents end to end, in lanes of every `lanes`-th one."""
    corpora = {"jsonl": write_corpus(tmp_path / "corpus.jsonl", documents=documents)}
    lines = corpora["jsonl"].read_text().splitlines()
    expected = []
    for lane in range(lanes):
        ids = []
        for line in lines[lane::lanes]:
            text = json.loads(line)["text"]
            ids += [TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id]
        rows = [ids[i : i + SEQ] for i in range(1, len(ids), SEQ)]
        expected += [row + [IGNORE_INDEX] * (SEQ - len(row)) for row in rows]
    for degree, rows in ((1, 1), (1, 3), (2, 8)):
        assert rows_of_pass("jsonl", corpora, degree, rows) == sorted(expected)


@pytest.mark.parametrize(("documents", "lanes"), [(4095, 8), (4096, 16), (100_000, 256)])
def test_a_pass_over_much_text_has_more_lanes(tmp_path, documents, lanes):
    (tmp_path / "many.jsonl").write_text('{"text": "x"}\n' * documents)
    assert loader(tmp_path / "many.jsonl", infinite=False).sources["data"].lanes == lanes


@pytest.mark.parametrize("kind", ["tokens", "stream"])
def test_the_rows_of_a_pass_depend_on_no_batch(corpora, kind):
    """Batches of 1 and 3 rows are filled from the stream's four lanes in turn."""
    expected = rows_of_pass(kind, corpora, 1, 8)
    for degree, rows in ((1, 1), (1, 3), (3, 6)):
        assert rows_of_pass(kind, corpora, degree, rows) == expected


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
    assert len(contents) == 2 * 5 + 1
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


@pytest.mark.parametrize(
    ("change", "key"), [({"seed": 9}, "debug.seed"), ({"path": "other"}, "training.dataset")]
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
        (["--output", "/dev/null/x"], "--output: can't write to /dev/null/x"),
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
