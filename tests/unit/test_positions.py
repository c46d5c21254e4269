"""Every position that a reader can be in goes through a checkpoint's manifest and gives the same
rows.
"""

import gzip
import itertools
import json
import pickle
import random
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.checkpoints import ABOUT, train_state
from tests.positions import MINIMAL, manifest_bytes
from torchtitan.checkpoint.format.manifest import Manifest, parse, validate
from torchtitan.config.sections.data import DataLoader, DataStage, Source
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.loader import build_loader
from torchtitan.data.read.documents import LocalDocuments
from torchtitan.data.read.positions import SourcePosition, complete_state, merge_positions
from torchtitan.data.reader import StepReader
from torchtitan.data.spec import DataSpec
from torchtitan.data.tokens.token_files import write_token_file
from torchtitan.utils.errors import FormatBugError, UserError

TOKENIZER = build_tokenizer("./tests/assets/tokenizer")
SEQ = 16
STEPS = 12
RANDOM = random.Random(7)
WORDS = ["some", "words,", "grün", "1234", "日本", "a\r\nline"]
SHORT = [" ".join(RANDOM.choices(WORDS, k=RANDOM.randrange(1, 30))) for _ in range(19)]
LONG = [" ".join(RANDOM.choices(WORDS, k=300)) for _ in range(4)]
BAD = [b'{"text": null}', b'{"text": 5}', b"7", b'{"text": "cut', b'{"text": "caf\xe9"}']


def lines(texts, *bad):
    found = [json.dumps({"text": text}).encode() for text in texts]
    for i, line in enumerate(bad):
        found.insert(2 * i + 1, line)
    return b"\n".join(found)


@pytest.fixture(scope="module", autouse=True)
def short_pieces():
    """Let the documents of some hundred characters be long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan.data.encode.base.LONG", 500)
        patch.setattr("torchtitan.data.encode.base.PIECE", 60)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("positions")
    for name in ("text", "long", "json", "parquet", "bad", "shards", "bad_shards", "rows"):
        (root / name).mkdir()
    for i, text in enumerate(SHORT[:6]):
        (root / f"text/{i}.txt").write_text(text)
    (root / "long/a.txt").write_bytes(b"\xef\xbb\xbf" + LONG[0].encode())
    (root / "long/b.txt.gz").write_bytes(gzip.compress(LONG[1].encode()))
    (root / "long/c.jsonl").write_bytes(lines([LONG[2], *SHORT[:2]]))
    (root / "json/a.jsonl").write_bytes(lines(SHORT[:9]))
    (root / "json/b.json").write_text(json.dumps([{"text": text} for text in SHORT[9:]]))
    for name, texts in {
        "parquet/a": SHORT,
        "rows/a": [*SHORT[:9], LONG[3]],
        "rows/b": SHORT[9:],
    }.items():
        pq.write_table(pa.table({"text": texts}), root / f"{name}.parquet", row_group_size=4)
    (root / "bad/a.jsonl").write_bytes(lines([*SHORT, LONG[0]], *BAD))
    for i in range(4):
        (root / f"shards/{i}.jsonl").write_bytes(lines([*SHORT[i::4], LONG[i]]))
        rows = [text for text in SHORT[i::4] for text in (text, None)]
        pq.write_table(pa.table({"text": rows}), root / f"bad_shards/{i}.parquet")
    ids = [TOKENIZER.encode_document(text) for text in SHORT + LONG]
    write_token_file(root / "a.bin", ids, TOKENIZER, {})
    documents = LocalDocuments(str(root / "long"), "key")
    assert [len(documents[i]) > 500 for i in range(5)] == [True, True, True, False, False]
    return root


class Numbered(list):
    fingerprint = "numbered"


def numbered(dataset_path):
    return Numbered(SHORT + LONG)


def generated(dataset_path):
    import datasets

    return datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"shards": [0, 1, 2, 3]})


def interleaved(dataset_path):
    """Its state has the generator's, integers of 128 bits."""
    import datasets

    return datasets.interleave_datasets(
        [generated(None), generated(None)], probabilities=[0.3, 0.7], seed=5
    )


def rows_of(shards):
    for shard in shards:
        for text in [*SHORT[shard::4], LONG[shard]]:
            yield {"text": text}


FILES = {
    "text": "text",
    "long": "long",
    "json": "json",
    "parquet": "parquet",
    "bad": "bad",
    "tokens": "a.bin",
}
STREAMS = {"stream": "shards", "skipping": "bad_shards", "columns": "rows"}
CUSTOM = {"numbered": numbered, "generated": generated, "interleaved": interleaved}
KINDS = [*FILES, *STREAMS, *CUSTOM]
NEED_SKIP = {"bad", "skipping"}


def source(folder, kind, weight=1.0, max_epochs=None):
    if kind in FILES:
        return Source(
            name=kind, dataset_path=str(folder / FILES[kind]), weight=weight, max_epochs=max_epochs
        )
    dataset = str(folder / STREAMS[kind]) if kind in STREAMS else kind
    return Source(name=kind, dataset=dataset, weight=weight)


def loader(sources, stages=(), *, rows=6, seed=3, skip=True, **options):
    spec = DataSpec(
        sources=sources,
        stages=stages,
        tokenizer=TOKENIZER,
        seq_len=SEQ,
        rows_per_step=rows,
        seed=seed,
        infinite=True,
        on_bad_document="skip" if skip else "stop",
        options=DataLoader(**options),
        custom=CUSTOM,
    )
    return build_loader(spec)


def read(loader, start, ranks, workers, steps):
    """Rows and position of each step, as the workers of several ranks read them."""
    shares = [
        ((rank, ranks), (worker, workers)) for rank in range(ranks) for worker in range(workers)
    ]
    readers = [StepReader(loader.spec, loader.sources, share, start).steps() for share in shares]
    for _ in range(steps):
        found = pickle.loads(pickle.dumps([next(reader) for reader in readers]))
        of_ranks = [
            merge_positions([part.position for part in found[i : i + workers]])
            for i in range(0, len(found), workers)
        ]
        yield (
            [row for part in found for row in part.rows],
            complete_state(loader.local_state(of_ranks[0]), of_ranks),
        )


@st.composite
def mixtures(draw, kind):
    """A source of this kind, alone or with others."""
    others = st.sampled_from([other for other in KINDS if other != kind])
    kinds = [kind, *draw(st.lists(others, max_size=2, unique=True))]
    weights = st.sampled_from([0.5, 1.0, 3.0])
    sources = [(kind, draw(weights)) for kind in kinds]
    stages = []
    for step in draw(st.lists(st.integers(2, STEPS), max_size=2, unique=True).map(sorted)):
        changed = draw(
            st.dictionaries(st.sampled_from(kinds[1:] or kinds), weights | st.just(0.0), max_size=1)
        )
        size = draw(st.sampled_from([None, 4, 8]))
        stages.append(
            DataStage(
                from_step=step, weights=changed if len(kinds) > 1 else {}, global_batch_size=size
            )
        )
    skip = bool(NEED_SKIP & set(kinds)) or draw(st.booleans())
    epochs = draw(st.sampled_from([None, 1])) if len(kinds) > 1 else None
    return sources, stages, skip, epochs


LAYOUTS = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))


def counts_of(state):
    """What two positions have in common that give the same rows."""
    return (
        state.step,
        state.shares,
        {name: (source.rows, source.skip_counts) for name, source in state.sources.items()},
    )


RARE = {
    "long": lambda lane: lane.position > 0,
    "generated": lambda lane: lane.position > 0,
    "skipping": lambda lane: lane.cursor.skipped,
}
"""What at least one of the positions must have."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_keeps_every_position(folder, kind):
    """A run that is saved and resumed twice, each time in another layout, reads what an
    uninterrupted one does.
    """
    lanes = []

    @given(
        mixtures(kind),
        st.tuples(st.integers(1, 8), st.integers(1, 3)),
        st.lists(LAYOUTS, min_size=3, max_size=3),
    )
    @settings(
        max_examples=4,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        phases=[Phase.generate, Phase.shrink],
    )
    def check(mixture, counts, layouts):
        sources, stages, skip, epochs = mixture
        tables = [
            source(folder, kind, weight, epochs if kind == "tokens" else None)
            for kind, weight in sources
        ]
        reading = loader(tables, stages, skip=skip)
        whole = list(read(reading, reading.start, 1, 1, STEPS))
        done = 0
        for steps, layout in zip((*counts, STEPS - sum(counts)), layouts, strict=True):
            found = list(read(reading, reading.start, *layout, steps))
            for rows, state in found:
                note(f"step {done}")
                assert np.array_equal(rows, whole[done][0])
                assert counts_of(state) == counts_of(whole[done][1])
                done += 1
            state = found[-1][1]
            kept = parse(manifest_bytes(state)).state()["data"]
            assert kept == state
            lanes.extend((kept.sources[kind].lanes or {}).values())
            reading.seek(kept)
        assert done == STEPS

    check()
    assert kind not in RARE or any(map(RARE[kind], lanes))


@pytest.mark.e2e
def test_worker_processes_hand_positions_over(folder):
    """Into them and out of them; their documents are none that this module calls long."""
    tables = [source(folder, kind) for kind in ("text", "skipping", "generated", "tokens")]
    plain = loader(tables)
    whole = list(read(plain, plain.start, 1, 1, 8))
    working = loader(tables, num_workers=2)
    working.seek(whole[2][1])
    batches = list(itertools.islice(iter(working), 3))
    working.close()
    position = batches[-1].position
    share = complete_state(working.local_state(position), [position])
    state = parse(manifest_bytes(share)).state()["data"]
    assert state == whole[5][1]
    plain.seek(state)
    for (rows, _), (expected, _) in zip(read(plain, plain.start, 1, 1, 2), whole[6:], strict=True):
        assert np.array_equal(rows, expected)


def odd_stream(value, after):
    """A stream whose state has `value` once `after` documents were read."""
    import datasets
    from datasets.iterable_dataset import ExamplesIterable

    class Odd(ExamplesIterable):
        def shard_data_sources(self, *args, **kwargs):
            return Odd(self.generate_examples_fn, self.kwargs)

        def __iter__(self):
            for count, row in enumerate(super().__iter__(), 1):
                if count > after:
                    self._state_dict["mine"] = [{"seen": value}]
                yield row

    return datasets.IterableDataset(Odd(numbered_rows, {}))


def numbered_rows():
    for index, text in enumerate(SHORT):
        yield index, {"text": text}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            torch.ones(1),
            r"a value of type torch\.Tensor at \.examples_iterable\.mine\[0\]\.seen, which a checkpoint",  # noqa: E501
        ),
        (np.int64(3), r"a value of type numpy\.int64 at .*\.seen,"),
        (np.float64(3), r"a value of type numpy\.float64 at .*\.seen,"),
        (float("nan"), r"the number nan at .*\.seen,"),
        (b"x", r"a value of type bytes at .*\.seen,"),
        ((1, 2), r"a value of type tuple at .*\.seen,"),
        ({1: 2}, r"a key of type int at .*\.seen,"),
        ("\ud800", r"a string with a lone surrogate at .*\.seen,"),
        ({"\ud800": 1}, r"as a key, a string with a lone surrogate at .*\.seen,"),
        (
            reduce(lambda inner, _: [inner], range(200), 0),
            r"more than 100 levels of lists and dicts at .*\.seen",
        ),
    ],
    ids=lambda value: str(value)[:10] if isinstance(value, str) else type(value).__name__,
)
def test_a_state_that_is_no_json_is_refused_at_start(monkeypatch, value, text):
    monkeypatch.setitem(CUSTOM, "odd", lambda dataset_path: odd_stream(value, 0))
    with pytest.raises(
        UserError, match=r"training\.dataset: the state_dict\(\) of 'odd' has " + text
    ):
        loader([Source(name="data", dataset="odd")])


def test_a_state_that_is_no_json_later_is_the_sources_fault(monkeypatch):
    monkeypatch.setitem(CUSTOM, "odd", lambda dataset_path: odd_stream({1, 2}, 5))
    reading = loader([Source(name="data", dataset="odd")], rows=1)
    with pytest.raises(UserError, match=r"the state_dict\(\) of 'odd' has a value of type set"):
        list(itertools.islice(iter(reading), 40))
    reading.close()


def test_any_json_is_a_state(monkeypatch):
    value = {"a": [None, True, -1.5, 2**200, "\u0000 ä 🚀", {}], "": []}
    monkeypatch.setitem(CUSTOM, "odd", lambda dataset_path: odd_stream(value, 0))
    reading = loader([Source(name="data", dataset="odd")], rows=1)
    state = list(read(reading, reading.start, 1, 1, 8))[-1][1]
    kept = parse(manifest_bytes(state)).state()["data"]
    assert kept.sources["data"].lanes["0"].cursor.stream["examples_iterable"]["mine"] == [
        {"seen": value}
    ]


def test_a_position_of_an_earlier_version_is_refused():
    old = {"contents": "x", "rows": 9, "lane_count": 0, "lanes": {}}
    assert SourcePosition.model_validate_json(json.dumps(old | {"tokens": 90})).tokens == 90
    with pytest.raises(ValueError, match=r"of an earlier version, .* the version that wrote it"):
        SourcePosition.model_validate_json(json.dumps(old))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data": {"more": 1}}, r"train_state\.data\.more: Extra inputs are not permitted"),
        (
            {"guard": {"calm": -1}},
            r"train_state\.guard\.calm: Input should be greater than or equal to 0",
        ),
        (
            {"progress": {"tokens": np.int64(3)}},
            r"train_state\.progress\.tokens: Input should be a valid integer",
        ),
    ],
)
def test_what_a_manifest_cannot_hold_is_called_a_bug(change, text):
    content = train_state(2)
    for part, entries in change.items():
        content[part] |= entries
    with pytest.raises(
        FormatBugError,
        match=rf"{text} \(manifest\.json\): this is a bug in torchtitan, please report",
    ):
        validate(Manifest, {**ABOUT, **MINIMAL, "step": 2, "train_state": content})
