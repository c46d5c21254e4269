"""Best-fit packing: against brute force, and that nothing is lost, on any layout and on resume."""

import itertools
import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chats import write_chats, write_tokenizer
from tests.corpora import write_megatron
from tests.data_kinds import ROWS, TOKENIZER, write_kinds
from torchtitan.commands import tokenize
from torchtitan.config.sections.data import DataLoader, DataStage, Source
from torchtitan.data.encode.tokenizer import PLAIN, UNPREDICTED, build_tokenizer
from torchtitan.data.loader import build_loader
from torchtitan.data.order.lanes import DocumentCursor, PackedLane
from torchtitan.data.order.packing import Packer, best_fit, pack
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.data.read.positions import StreamPosition, complete_state
from torchtitan.data.spec import DataSpec
from torchtitan.utils.errors import UserError

SEQ = 48
BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id


def fewest_bins(sizes, capacity):
    """By trying all ways to fill one bin with the first item and any others."""
    if not sizes:
        return 0
    first, *rest = sizes
    best = len(sizes)
    for count in range(len(rest) + 1):
        for chosen in itertools.combinations(range(len(rest)), count):
            if first + sum(rest[i] for i in chosen) <= capacity:
                left = [size for i, size in enumerate(rest) if i not in chosen]
                best = min(best, 1 + fewest_bins(left, capacity))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10), max_size=6))
def test_bins_are_as_few_as_best_fit_decreasing_promises(sizes):
    """At most 11/9 of the fewest and one (Johnson, 1973), and every item once."""
    bins = best_fit(sizes, 10)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert all(sum(sizes[item] for item in items) <= 10 for items in bins)
    assert len(bins) <= 11 / 9 * fewest_bins(sizes, 10) + 1


def test_items_go_where_they_fit_best():
    """7 and 6 begin bins; 3 fills that of 7, not of 6, and 4 that of 6."""
    assert best_fit([4, 7, 3, 6], 10) == [[0, 3], [1, 2]]


def predictions(documents):
    """(input, label) of each prediction within the documents."""
    return Counter((int(a), int(b)) for ids in documents for a, b in itertools.pairwise(ids))


def predicted(rows):
    """Those of packed rows, without what follows their ends."""
    found = Counter()
    for row in np.asarray(rows, np.int64):
        for a, b in itertools.pairwise(row):
            if b < UNPREDICTED:
                found[int(a) & PLAIN, int(b)] += 1
    return found


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=12), st.integers(2, 24))
def test_every_token_is_predicted_once_from_its_own_document(sizes, length):
    starts = np.cumsum([0, *sizes])
    documents = [np.arange(a, b) for a, b in itertools.pairwise(starts)]  # all ids differ
    rows, packed = pack(documents, length, pad=9999)
    assert predicted(rows) == predictions(documents)
    assert (rows[:, 0] >= UNPREDICTED).all()
    plain = rows & PLAIN
    assert packed.padding == (plain == 9999).sum()
    assert packed.ids == rows.size
    assert packed.cut == sum(size > length for size in sizes)
    for document in documents:
        holding = [(row[:, None] == document).any() for row in plain]
        assert sum(holding) == max(1, -(-(len(document) - 1) // (length - 1)))
    of_stream = [len({i // length for i in range(a, b)}) for a, b in itertools.pairwise(starts)]
    assert packed.cut_by_stream == sum(rows > 1 for rows in of_stream)


def test_the_pool_of_a_file_is_counted_in_rows(monkeypatch):
    """More documents in a pool leave less padding."""
    monkeypatch.setattr("torchtitan.data.order.packing._FILE_POOL_ROWS", 4)
    packer = Packer(8, 0)
    documents = [np.full(5, 1, np.uint32), np.full(3, 2, np.uint32)] * 10
    pools = [len(ids) // 8 for ids in packer.add(documents)]
    assert pools == [4, 4]
    assert len(packer.finish()) == 2 * 8
    assert packer.stats.padding == 0


def test_waste_of_a_known_case():
    """Two thirds of a row each: a stream has no padding and cuts every second document."""
    _, packed = pack([np.arange(8)] * 30, 12, pad=1)
    assert (packed.rows, packed.padding, packed.cut, packed.cut_by_stream) == (30, 120, 0, 10)
    assert str(packed) == (
        "30 documents in 30 packed rows: 33.33% is padding, 0.0% of the documents are cut; "
        "a stream would cut 33.3%"
    )


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packing")
    kinds = write_kinds(folder)
    flags = ["--input", str(kinds["jsonl"]), "--part", "10", "--workers", "1"]
    tokenize.main([*flags, "--best-fit", str(SEQ), "--output", str(folder / "packed")])
    return kinds | {"packed": folder / "packed"}


def loader(corpora, kind, rank=0, degree=1, **more):
    path = None if kind == "stream" else str(corpora[kind])
    source = Source(
        name="data",
        dataset=str(corpora["shards"]) if kind == "stream" else "files",
        dataset_path=path,
        messages_column=more.pop("messages_column", None),
    )
    spec = DataSpec(
        sources=[source],
        tokenizer=more.pop("tokenizer", TOKENIZER),
        seq_len=more.pop("seq_len", SEQ),
        rows_per_step=more.pop("rows", ROWS),
        seed=3,
        infinite=more.pop("infinite", True),
        packing=more.pop("packing", "best_fit"),
        stages=more.pop("stages", ()),
        options=DataLoader(**more),
    )
    return build_loader(spec, dp_rank=rank, dp_degree=degree)


def take(loader, count=10_000):
    try:
        return list(itertools.islice(iter(loader), count))
    finally:
        loader.close()


KINDS = ["jsonl", "stream", "packed"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_predicts_every_token_once(corpora, kind):
    texts = [json.loads(line)["text"] for line in corpora["jsonl"].read_text().splitlines()]
    found = Counter()
    for step in take(loader(corpora, kind, infinite=False, rows=4)):
        kept = step.labels != IGNORE_INDEX
        found.update(zip(step.tokens[kept].tolist(), step.labels[kept].tolist(), strict=True))
    assert found == predictions([TOKENIZER.encode_document(text) for text in texts])
    assert (EOS, BOS) not in found


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_resumes_change_nothing(corpora, kind, monkeypatch):
    """Within a pool and between two, on other ranks, again and again."""
    monkeypatch.setattr("torchtitan.data.order.lanes.POOL_ROWS", 8)
    whole = take(loader(corpora, kind), 12)
    got = []
    state = None
    for degree, steps in ((1, 1), (2, 1), (4, 2), (8, 3), (1, 5)):
        ranks = [loader(corpora, kind, rank, degree) for rank in range(degree)]
        if state is not None:
            for one in ranks:
                one.seek(state)
        parts = [take(one, steps) for one in ranks]
        got += [
            (
                torch.cat([part[i].tokens for part in parts]),
                torch.cat([part[i].labels for part in parts]),
            )
            for i in range(steps)
        ]
        last = [part[-1].position for part in parts]
        state = complete_state(ranks[0].local_state(last[0]), last)
        expected = whole[len(got) - 1].position
        assert state.sources == expected.sources
    for (tokens, labels), expected in zip(got, whole, strict=True):
        assert torch.equal(tokens, expected.tokens)
        assert torch.equal(labels, expected.labels)


@pytest.mark.e2e
def test_workers_change_nothing(corpora, caplog, monkeypatch):
    """Not even the log."""
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    caplog.set_level("INFO", "torchtitan")
    whole = take(loader(corpora, "jsonl"), 80)
    steps = take(loader(corpora, "jsonl", num_workers=2), 80)
    for step, expected in zip(steps, whole, strict=True):
        assert torch.equal(step.labels, expected.labels)
    one, other = [text for text in caplog.messages if "padding" in text]
    assert one == other


def test_the_waste_is_logged(corpora, caplog, monkeypatch):
    """That of pools of full size."""
    monkeypatch.setattr("torchtitan.data.order.lanes.POOL_ROWS", 8)
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    with caplog.at_level("INFO", "torchtitan"):
        take(loader(corpora, "jsonl"), 8)
    (line,) = [text for text in caplog.messages if "padding" in text]
    assert re.fullmatch(r"training: so far, \d+ documents in \d+ packed rows: .*", line)


def test_token_files_say_how_they_are_packed(corpora):
    about = json.loads((corpora["packed"] / "tokens-00000.json").read_text())
    ids = np.fromfile(corpora["packed"] / "tokens-00000.bin", np.uint32).reshape(-1, SEQ)
    assert (about["packed"], about["dtype"]) == (SEQ, "uint32-flagged")
    assert about["packing"]["rows"] == len(ids)
    assert about["predicted"] == (ids < UNPREDICTED).sum()
    report = json.loads((corpora["packed"] / "tokens-report.json").read_text())
    assert report["packing"]["documents"] == 23


def refuses(words, *args, **more):
    with pytest.raises(UserError, match=words):
        loader(*args, **more)


def test_what_is_not_packed_is_refused(corpora, tmp_path):
    longer = [DataStage(from_step=3, seq_len=96)]
    write_megatron(tmp_path)
    refuses(r"are not packed; write them .*--best-fit 48", corpora, "tokens")
    refuses(r"are not packed", corpora | {"m": tmp_path}, "m")
    refuses(r"rows of 48 tokens; set training\.seq_len = 48", corpora, "packed", seq_len=24)
    refuses(r"also in all stages", corpora, "packed", stages=longer)
    loader(corpora, "packed", packing="stream")
    both = tmp_path / "both"
    both.mkdir()
    for kind in ("packed", "tokens"):
        (both / kind).symlink_to(corpora[kind])
    refuses(r"different lengths can't be mixed", corpora | {"both": both}, "both")


@pytest.mark.parametrize("lie", [{"packed": SEQ - 1}, {"packed": SEQ, "dtype": "uint32"}])
def test_a_description_that_does_not_fit_is_refused(corpora, tmp_path, lie):
    folder = shutil.copytree(corpora["packed"], tmp_path / "lie")
    about = folder / "tokens-00000.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | lie))
    refuses(r"tokens-00000\.json names packed rows of", {"lie": folder}, "lie")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"packing": "stream"}, r"training\.packing: .* is for packing best_fit, .* has stream"),
        ({"seq_len": 24}, r"training\.seq_len: .* is for packed rows of 48, .* has 24"),
    ],
)
def test_a_resume_in_another_packing_is_refused(corpora, change, words):
    first = loader(corpora, "jsonl")
    (step,) = take(first, 1)
    state = complete_state(first.local_state(step.position), [step.position])
    with pytest.raises(UserError, match=words):
        loader(corpora, "jsonl", **change).seek(state)


def test_a_resume_between_pools_of_different_sizes(monkeypatch):
    """After every row: the next pool has the size that it would have had."""
    monkeypatch.setattr("torchtitan.data.order.lanes.FIRST_POOL_ROWS", 2)
    monkeypatch.setattr("torchtitan.data.order.lanes.POOL_ROWS", 8)
    texts = [f"{i} " * (7 * i % 60 + 3) for i in range(400)]

    def lane():
        cursor = DocumentCursor(texts, 0, 1, None, lambda _, read: read())
        return PackedLane(cursor, TOKENIZER, SEQ, EOS)

    whole, resumed = lane(), lane()
    for _ in range(40):
        row = whole.row(SEQ)
        position = resumed.position()
        resumed = lane()
        resumed.seek(position)
        assert resumed.row(SEQ).tolist() == row.tolist()
        assert resumed.position() == whole.position()


def test_a_stream_that_lost_documents_unnoticed():
    """The contents of a registered stream can't be compared; its position may be beyond them."""

    class Texts:
        def __init__(self, count):
            self.texts = iter(["word " * 400] * count)

        def next(self):
            return next(self.texts, None)

        def position(self):
            return StreamPosition(epoch=0, stream=None, skipped={})

        def seek(self, position):
            pass

    before = PackedLane(Texts(20), TOKENIZER, SEQ, EOS)
    while before.position().rows < 60:  # a document has fewer; pools grow to 64 rows
        before.row(SEQ)
    after = PackedLane(Texts(1), TOKENIZER, SEQ, EOS)
    after.seek(before.position())
    assert after.row(SEQ) is None


def test_conversations_are_packed(tmp_path):
    """Only the assistant's tokens are predicted, as in a stream."""
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = build_tokenizer(str(tmp_path / "tokenizer"))
    chats = {"chats": write_chats(tmp_path / "chats.jsonl")}
    found = {}
    for packing in ("best_fit", "stream"):
        more = {"packing": packing, "messages_column": "messages", "tokenizer": tokenizer}
        steps = take(loader(chats, "chats", infinite=False, rows=1, **more))
        found[packing] = Counter()
        for step in steps:
            kept = step.labels != IGNORE_INDEX
            pairs = zip(step.tokens[kept].tolist(), step.labels[kept].tolist(), strict=True)
            found[packing].update(pairs)
    assert found["best_fit"] == found["stream"]


def test_tokenize_packs_what_is_kept(tmp_path):
    """After --held-out; the held-out documents follow one another."""
    lines = [json.dumps({"text": f"{i} " * i}) for i in range(30)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    flags = ["--input", str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "out")]
    flags += ["--held-out", "30%", "--part", "20", "--workers", "1"]
    tokenize.main([*flags, "--best-fit", "64"])
    reports = {}
    found = Counter()
    for name in ("out", "out-held-out"):
        reports[name] = json.loads((tmp_path / name / "tokens-report.json").read_text())
        for file in (tmp_path / name).glob("*.bin"):
            about = json.loads(file.with_suffix(".json").read_text())
            packed = about.get("packed")
            ids = np.fromfile(file, np.uint32 if packed else np.uint16)
            texts = [ids] if packed is None else ids.reshape(-1, packed)
            found.update(predicted(texts))
    kept = reports["out"]["documents"]
    assert kept + reports["out-held-out"]["documents"] == 30
    assert reports["out"]["packing"]["documents"] == kept
    expected = predictions([TOKENIZER.encode_document(json.loads(line)["text"]) for line in lines])
    # In the stream of the held-out part, documents' ends predict the next one's begin.
    del found[EOS, BOS]
    assert found == expected
