"""Mixtures: exact shares at every step, one order under every layout, and positions that survive
any change.
"""

import itertools
import json
import logging
import random
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.chats import CHATS, write_chats, write_tokenizer
from tests.data_kinds import SEQ, TOKENIZER, take
from tests.positions import saved
from tests.runs import write_corpus
from torchtitan.config.sections.data import DataLoader, DataStage, Source
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.loader import build_loader
from torchtitan.data.order.rows import Shares, divide, permute, scatter
from torchtitan.data.read.positions import merge_positions
from torchtitan.data.spec import DataSpec
from torchtitan.data.tokens.token_files import write_token_file
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.utils.errors import UserError

STAGES = [
    DataStage(from_step=4, weights={"tokens": 0.25, "stream": 2}),
    DataStage(from_step=6, global_batch_size=12),
    DataStage(from_step=9, weights={"text": 0}, global_batch_size=4),
]


@pytest.fixture(scope="module")
def mixture(corpora):
    return [
        Source(name="text", dataset_path=str(corpora["jsonl"]), weight=3),
        Source(name="tokens", dataset_path=str(corpora["tokens"]), weight=1.5),
        Source(name="stream", dataset=str(corpora["shards"])),
    ]


def loader(sources, rank=0, degree=1, *, stages=STAGES, rows=8, tokenizer=TOKENIZER, **options):
    spec = DataSpec(
        sources=sources,
        stages=stages,
        tokenizer=tokenizer,
        seq_len=SEQ,
        rows_per_step=rows,
        seed=3,
        infinite=True,
        options=DataLoader(**options),
    )
    return build_loader(spec, dp_rank=rank, dp_degree=degree)


def batches(loader, count):
    try:
        return list(itertools.islice(iter(loader), count))
    finally:
        loader.close()


def resumed(sources, before, position, *args, **options):
    """A loader that continues from where one of the sources `before` was."""
    out = loader(sources, *args, **options)
    out.seek(saved(loader(before, stages=[]), position))
    return out


def test_shares_are_met_within_a_row_at_every_step():
    draw = random.Random(0)
    for _ in range(300):
        weights = {
            str(i): Fraction(str(draw.choice([draw.random(), draw.random() ** 6, 1, 0.001, 5])))
            for i in range(draw.randint(1, 9))
        }
        total = sum(weights.values())
        rows = 0
        shares = Shares()
        counts = dict.fromkeys(weights, 0)
        for _ in range(40):
            size = draw.choice([1, 1, 2, 3, 8, 64])
            rows += size
            taken = divide(shares, weights, size, {})
            assert sum(taken.values()) == size
            for name, count in taken.items():
                assert count >= 0
                counts[name] += count
                assert abs(counts[name] - rows * weights[name] / total) < 1


def test_places_are_scattered():
    """All places are taken once, both halves of the batch get some of each source, and no place
    keeps its source.
    """
    rare = []
    for step in range(50):
        slots = scatter({"a": 60, "b": 30, "c": 10}, seed=0, step=step)
        assert sorted(np.concatenate(list(slots.values())).tolist()) == list(range(100))
        assert all(0.2 < (part < 50).mean() < 0.8 for part in list(slots.values())[:2])
        rare += slots["c"].tolist()
    often = np.bincount(rare, minlength=100)  # binomial: 5 of 50 steps, with a deviation of 2.1
    assert 1 <= np.percentile(often, 5) <= np.percentile(often, 95) <= 10


@pytest.mark.parametrize(
    ("degree", "workers"), [(2, 0), (4, 0), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_the_batch_depends_neither_on_ranks_nor_on_resumes(mixture, degree, workers):
    """Through changes of weights and batch size: read by one rank, and by several that resume on
    another number.
    """
    whole = batches(loader(mixture), 12)
    assert [len(batch.tokens) for batch in whole] == [8] * 5 + [12] * 3 + [4] * 4
    position = None
    ranks = degree
    at = 0
    for steps in (2, 4, 3, 3):
        readers = [loader(mixture, rank, ranks, num_workers=workers) for rank in range(ranks)]
        if position is not None:
            readers = [
                resumed(mixture, mixture, position, rank, ranks, num_workers=workers)
                for rank in range(ranks)
            ]
        parts = [batches(reader, steps) for reader in readers]
        for i, batch in enumerate(zip(*parts, strict=True)):
            for field in ("tokens", "labels", "sources"):
                together = torch.cat([getattr(part, field) for part in batch])
                assert torch.equal(together, getattr(whole[at + i], field)), field
        position = merge_positions([part[-1].position for part in parts])
        assert position == whole[at + steps - 1].position
        at = at + steps
        ranks = {degree: 1, 1: degree}[ranks]


def test_each_stage_has_its_weights(mixture):
    counts = [
        torch.bincount(batch.sources, minlength=3).tolist()
        for batch in batches(loader(mixture), 14)
    ]
    for first, last, weights in ((0, 3, (3, 1.5, 1)), (3, 8, (3, 0.25, 2)), (8, 14, (0, 0.25, 2))):
        rows = np.sum(counts[first:last], axis=0)
        share = np.array(weights) / sum(weights)
        assert np.abs(rows - share * rows.sum()).max() < 1


def test_a_source_is_read_exactly_as_often_as_it_may_be(mixture, caplog, monkeypatch):
    """Its windows come in the order of its own epochs; then the others share its weight. The end is
    foretold.
    """
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    text, tokens, _ = mixture
    twice = tokens.model_copy(update={"max_epochs": 2, "weight": 9.0})
    reading = loader([text, twice], stages=[])
    files = reading.sources["tokens"].files
    found = batches(reading, 60)
    rows = [
        (ids, step) for step, b in enumerate(found) for ids in b.tokens[b.sources == 1].tolist()
    ]
    order = [permute(k, len(files), 3, epoch) for epoch in (0, 1) for k in range(len(files))]
    windows = [files.window(index)[:SEQ].tolist() for index in order]
    assert [ids[: len(window)] for (ids, _), window in zip(rows, windows, strict=True)] == windows
    last = rows[-1][1]
    assert all((batch.sources == 0).all() for batch in found[last + 1 :])
    with caplog.at_level("WARNING", "torchtitan"):
        reading.check_enough(60)
    assert f"tokens reaches max_epochs in step {last + 1} of 60" in caplog.text

    alone = loader([twice], stages=[])
    enough = 2 * len(files) // 8
    with caplog.at_level("INFO", "torchtitan"):
        alone.check_enough(enough)
        loader([text], stages=[]).check_enough(10**4)
    often, very_often = (line for line in caplog.messages if "read the text" in line)
    assert often.endswith("tokens read the text about 2.0 times")
    bytes_ = loader([text], stages=[]).sources["text"].documents.text_bytes
    times = float(re.search(r"about ([\d,]+) times; beyond 4, rep", very_often)[1].replace(",", ""))
    assert times == pytest.approx(10**4 * 8 * SEQ / (bytes_ / 2), rel=0.5)
    with pytest.raises(
        UserError, match=rf"training.steps: the data runs out .* set training.steps = {enough},"
    ):
        alone.check_enough(enough + 1)
    # The guard went back from step 8 to step 5: three steps of data are left out.
    after = {"step": 5, "position": batches(loader([twice], stages=[]), 8)[-1].position}
    alone.check_enough(enough - 3, **after)
    with pytest.raises(UserError, match=f"after step {enough - 3} of {enough - 2} "):
        alone.check_enough(enough - 2, **after)
    with pytest.raises(UserError, match="all have been read max_epochs times"):
        batches(alone, 60)


def test_a_mixture_foretells_how_often_each_source_is_read(tmp_path, caplog, monkeypatch):
    """By documents spread over the source: the first one has other tokens per byte."""
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    texts = ["\x00" * 500, *(f"{i}: one line of plain text\n" * 9 for i in range(40))]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    text = Source(name="text", dataset_path=str(path), weight=3)
    chats = Source(
        name="chats",
        dataset_path=str(write_chats(tmp_path / "chats.jsonl", CHATS * 9)),
        messages_column="messages",
        weight=1,
    )
    tokenizer = build_tokenizer(str(write_tokenizer(tmp_path / "tokenizer")))
    stages = [DataStage(from_step=101, weights={"text": 1}, global_batch_size=16)]
    reading = loader([text, chats], stages=stages, tokenizer=tokenizer)
    chat = reading.sources["chats"].chat
    sizes = {
        "text": sum(len(tokenizer.encode_document(text)) for text in texts),
        "chats": 9 * sum(len(chat.encode(chat.document(messages))) for messages in CHATS),
    }
    with caplog.at_level("INFO", "torchtitan"):
        reading.check_enough(200)
    planned = {
        "text": SEQ * (100 * 8 * 3 / 4 + 100 * 16 / 2),
        "chats": SEQ * (100 * 8 / 4 + 100 * 16 / 2),
    }
    for name, tokens in planned.items():
        (line,) = (line for line in caplog.messages if f"sources.{name}: " in line)
        times = float(re.search(r"about ([\d.]+) times", line)[1])
        assert times == pytest.approx(tokens / sizes[name], rel=0.15)


def test_only_token_files_can_end(mixture):
    with pytest.raises(UserError, match=r"training.sources.text.max_epochs: .*torchtitan tokenize"):
        loader([mixture[0].model_copy(update={"max_epochs": 1}), mixture[1]])


def test_a_resumed_run_may_add_and_drop_sources(mixture, tmp_path, caplog, monkeypatch):
    """Every source goes on where it was, and one that comes back too."""
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    text, tokens, stream = mixture

    def rows_of(name, found, sources):
        index = [source.name for source in sources].index(name)
        return [row for batch in found for row in batch.tokens[batch.sources == index].tolist()]

    alone = rows_of("tokens", batches(loader([tokens], stages=[]), 12), [tokens])
    first = [text, tokens]
    second = [tokens.model_copy(update={"weight": 5}), stream]
    third = [stream, tokens, text]
    a = batches(loader(first, stages=[]), 3)
    with caplog.at_level("INFO", "torchtitan"):
        b = batches(resumed(second, first, a[-1].position, stages=[]), 3)
    assert "new from this step: stream" in caplog.text
    assert "no longer text; their positions are kept" in caplog.text
    counts = torch.bincount(torch.cat([batch.sources for batch in b]), minlength=2).tolist()
    assert abs(counts[0] - 24 * 5 / 6) < 1, "weights take effect from this step"
    c = batches(resumed(third, second, b[-1].position, stages=[]), 3)
    found = [
        row
        for part, sources in ((a, first), (b, second), (c, third))
        for row in rows_of("tokens", part, sources)
    ]
    assert found == alone[: len(found)]
    assert a[-1].position.sources["text"] == b[-1].position.sources["text"]
    assert c[-1].position.sources["text"].rows > a[-1].position.sources["text"].rows
    other = text.model_copy(
        update={"dataset_path": str(write_corpus(tmp_path / "other.jsonl", seed=8))}
    )
    with pytest.raises(
        UserError, match=r"training.sources.text.dataset_path: the data has changed"
    ):
        resumed([stream, other], second, b[-1].position)


@pytest.mark.parametrize("sizes", [(8, 12, 4), (6, 4, 9), (8, 3, 16)])
def test_text_keeps_its_position_under_another_batch_size(corpora, sizes):
    """Each lane of a naive packer is read from its beginning without a gap, evenly."""
    texts = [json.loads(line)["text"] for line in corpora["jsonl"].read_text().splitlines()]
    lanes = []
    for lane in range(sizes[0]):
        chosen = [divmod(k, len(texts)) for k in range(lane, 60 * sizes[0], sizes[0])]
        documents = [
            TOKENIZER.encode_document(texts[permute(slot, len(texts), 3, epoch)])
            for epoch, slot in chosen
        ]
        ids = list(itertools.chain(*documents))
        lanes.append([ids[i : i + SEQ] for i in range(0, len(ids), SEQ)])
    source = [Source(name="data", dataset_path=str(corpora["jsonl"]))]
    position = None
    read = [0] * sizes[0]
    for size in sizes:
        for count in (sizes[0], sizes[0]):  # a turn of all lanes
            reading = loader(source, stages=[], rows=size)
            if position is not None:
                reading = resumed(source, source, position, stages=[], rows=size)
            found = batches(reading, count)
            position = found[-1].position
            for batch in found:
                for row in batch.tokens.tolist():
                    read[next(i for i, lane in enumerate(lanes) if lane[read[i]] == row)] += 1
        assert max(read) - min(read) <= 1, "evenly"
    assert sum(read) == 2 * sizes[0] * sum(sizes)


def test_fewer_documents_than_rows_are_each_read_once_an_epoch(tmp_path):
    path = write_corpus(tmp_path / "few.jsonl", documents=3)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    ids = [i for text in texts for i in TOKENIZER.encode_document(text)[1:]]
    ids = sorted([*ids, TOKENIZER.bos_id])  # of the third document, which shares a lane
    spec = DataSpec(
        sources=[Source(name="data", dataset_path=str(path))],
        tokenizer=TOKENIZER,
        seq_len=SEQ,
        rows_per_step=8,
        seed=3,
        infinite=False,
        options=DataLoader(),
    )
    labels = torch.cat([labels for _, labels, _ in take(build_loader(spec), 10_000)])
    assert sorted(labels[labels >= 0].tolist()) == ids


def test_a_stage_scales_the_learning_rate():
    from torchtitan.config.sections.schema import LRScheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    optimizer.param_groups[0]["lr_scale"] = 1.0
    stages = [
        DataStage(from_step=3, lr_scale=0.5),
        DataStage(from_step=4, global_batch_size=8),
        DataStage(from_step=5, lr_scale=2),
    ]
    schedule = LRSchedule(
        optimizer, 0.1, LRScheduler(warmup_steps=0, total_steps=6, decay_ratio=0.0), stages=stages
    )
    rates = []
    for stage in (0, 0, 1, 2, 3, 3):
        rates.append(schedule.apply(stage))
        schedule.advance()
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.2, 0.2])


def test_huge_files_are_opened_by_their_description(tmp_path):
    """A sparse file of a terabyte; a window of it is read, not the file."""
    path = tmp_path / "huge.bin"
    meta = write_token_file(path, [[1, 5, 6]], TOKENIZER, {})
    tokens = 500_000_000_000
    with path.open("r+b") as file:
        file.truncate(2 * tokens)
    path.with_suffix(".json").write_text(json.dumps(meta | {"tokens": tokens}))
    reading = loader([Source(name="huge", dataset_path=str(path))], stages=[])
    assert batches(reading, 2)[-1].position.sources["huge"].rows == 16
