"""Stages whose rows have another length: every id is predicted once, in the order of the text."""

import itertools
import random

import numpy as np
import pytest
import torch

from tests.data_kinds import TOKENIZER, open_kind
from tests.positions import saved
from tests.runs import TINY
from torchtitan.config import resolve
from torchtitan.config.sections.data import DataLoader, DataStage, Source
from torchtitan.data.loader import build_loader
from torchtitan.data.order.windows import WindowOrder
from torchtitan.data.read.positions import merge_positions
from torchtitan.data.spec import DataSpec
from torchtitan.data.tokens.token_files import write_token_file
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError


def longer(*lengths, every=3, **changes):
    """Stages of `every` steps with rows of these lengths."""
    return [
        DataStage(from_step=1 + every * i, seq_len=length, **changes)
        for i, length in enumerate(lengths, 1)
    ]


def loader(sources, stages, rank=0, degree=1, *, seq_len=8, rows=4, **options):
    spec = DataSpec(
        sources=sources,
        stages=stages,
        tokenizer=TOKENIZER,
        seq_len=seq_len,
        rows_per_step=rows,
        seed=5,
        infinite=True,
        options=DataLoader(**options),
    )
    return build_loader(spec, dp_rank=rank, dp_degree=degree)


def batches(reading, count):
    try:
        return list(itertools.islice(iter(reading), count))
    finally:
        reading.close()


def ids_of(batch):
    """Each row's predicted ids, and the id before them."""
    return [
        (int(tokens[0]), labels[labels >= 0].tolist())
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True)
    ]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Two token files whose ids count up, so that an id names its place."""
    folder = tmp_path_factory.mktemp("numbered")
    write_token_file(folder / "a.bin", [np.arange(3, 3 + 385)], TOKENIZER, {})
    write_token_file(folder / "b.bin", [np.arange(500, 500 + 190)], TOKENIZER, {})
    return [Source(name="data", dataset_path=str(folder))]


EPOCH = [*range(4, 388), *range(501, 690)]
"""The predicted ids."""


@pytest.mark.parametrize(
    ("lengths", "seq_len"),
    [((32,), 8), ((32, 16, 32), 8), ((16, 4), 32), ((24,), 16), ((5, 12), 8)],
)
def test_an_epoch_predicts_every_id_once(numbered, lengths, seq_len):
    """Whatever the lengths, and where they change."""
    for every in (1, 2, 5):
        found = []
        reading = loader(numbered, longer(*lengths, every=every), seq_len=seq_len)
        for batch in iter(reading):
            for before, ids in ids_of(batch):
                if ids:
                    assert before == ids[0] - 1
                    found += ids
            if batch.epochs[0] >= 1:
                break
        reading.close()
        assert sorted(found[: len(EPOCH)]) == EPOCH


def test_every_epoch_has_an_order(numbered):
    """The same windows, differently shuffled."""
    windows = len(EPOCH) // 4 + 1
    rows = [
        ids
        for batch in batches(loader(numbered, [], seq_len=4, rows=windows), 3)
        for ids in ids_of(batch)
    ]
    epochs = [rows[i * windows : (i + 1) * windows] for i in range(3)]
    assert [sorted(epoch) for epoch in epochs] == 3 * [sorted(epochs[0])]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_long_rows_are_whole_windows_of_text(numbered):
    """After the windows that short rows have begun."""
    reading = loader(numbered, longer(32), rows=4)
    *_, last = batches(reading, 8)
    for _, ids in ids_of(last):
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        assert (ids[0] - 4) % 32 == 0 or (ids[0] - 501) % 32 == 0
    short = [ids for batch in batches(loader(numbered, longer(32)), 1) for _, ids in ids_of(batch)]
    assert len({(ids[0] - 4) // 32 for ids in short}) == 4, "rows of a step come from four windows"


def test_a_run_without_lengths_reads_whole_shuffled_windows(numbered):
    """As a run whose rows have one length always did."""
    order = WindowOrder(width=8, side=4, count=72, limit=None)
    found = order.take(200, 8, range(200))
    assert [[tuple(piece) for piece in found[i]] for i in range(200)] == [
        [(i, 0, 8)] for i in range(200)
    ]


def test_random_lengths_cover_all_windows():
    """Against a list of every place, read in any steps, with positions saved in between."""
    draw = random.Random(1)
    for _ in range(60):
        width = draw.choice([4, 6, 8, 12])
        count = draw.randint(1, 9)
        epochs = draw.randint(1, 3)
        order = WindowOrder(width, draw.randint(1, 6), count, epochs * count)
        seen = []
        while not order.ended:
            length = draw.choice([2, 3, 4, 6, 8, 12, 5])
            rows = draw.randint(1, 7)
            left = order.remaining_rows(length)
            taken = order.take(rows, length, range(rows))
            assert len(taken) == min(rows, left)
            for pieces in taken.values():
                assert sum(piece.after - piece.first for piece in pieces) <= length
                seen += [(p.window, i) for p in pieces for i in range(p.first, p.after)]
            assert order.read == len(seen)
            resumed = WindowOrder(width, 99, count, epochs * count)
            resumed.seek(order.position())
            order = resumed
        assert sorted(seen) == list(itertools.product(range(epochs * count), range(width)))


@pytest.mark.parametrize("kind", ["jsonl", "stream"])
def test_text_goes_on_at_the_next_token(corpora, kind):
    """The ids that rows of another length predict are those that rows of one length would have
    predicted next, lane by lane.
    """
    sources = open_kind(kind, corpora).spec.sources
    stages = longer(16, 4, every=2)
    steps = batches(loader(sources, stages, rows=4), 8)
    assert [batch.tokens.shape[1] for batch in steps] == [8, 8, 16, 16, 4, 4, 4, 4]
    assert [batch.stage for batch in steps] == [0, 0, 1, 1, 2, 2, 2, 2]
    single = batches(loader(sources, [], rows=4), 8)
    lanes = 4 if kind == "jsonl" else len(steps[0].position.sources["data"].lanes)
    for lane in range(lanes):
        own = slice(lane * 4 // lanes, (lane + 1) * 4 // lanes)
        expected = torch.cat([batch.labels[own].flatten() for batch in single])
        found = torch.cat([batch.labels[own].flatten() for batch in steps])
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["jsonl", "tokens", "stream"])
def test_batches_depend_neither_on_ranks_nor_on_resumes(corpora, kind):
    """Stopped before, at and after the change, and resumed on another number of ranks."""
    sources = open_kind(kind, corpora).spec.sources
    stages = [DataStage(from_step=4, seq_len=32, global_batch_size=2), *longer(16, every=6)]
    whole = batches(loader(sources, stages, rows=4), 8)
    for stop in (2, 3, 4):
        early = [batches(loader(sources, stages, r, 2, rows=4), stop)[-1] for r in range(2)]
        state = saved(loader(sources, stages, rows=4), *(batch.position for batch in early))
        position = state.sources["data"]
        assert position.tokens == sum(b.labels.numel() for b in whole[:stop])
        reading = loader(sources, stages, rows=4)
        reading.seek(state)
        for ours, theirs in zip(batches(reading, 8 - stop), whole[stop:], strict=True):
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.labels, theirs.labels)
    # Stopped, and continued by a configuration that names only the new length.
    state = saved(loader(sources, stages, rows=4), merge_positions([whole[2].position]))
    edited = loader(sources, [], seq_len=32, rows=2)
    edited.seek(state)
    for ours, theirs in zip(batches(edited, 3), whole[3:6], strict=True):
        assert torch.equal(ours.labels, theirs.labels)


def test_a_length_that_was_not_planned_joins_windows(numbered, caplog):
    """Windows of another width can't be cut from what is left of a shuffled epoch."""
    before = batches(loader(numbered, []), 5)
    reading = loader(numbered, [], seq_len=32)
    assert "joined" not in caplog.text
    reading.seek(saved(loader(numbered, []), before[-1].position))
    assert "rows of 32 tokens of data are joined from parts of windows of 8" in caplog.text
    found = [i for batch in before for _, row in ids_of(batch) for i in row]
    for batch in batches(reading, 3):
        found += [i for _, row in ids_of(batch) for i in row]
    assert len(set(found)) == len(found)


def test_data_that_ends_is_counted_in_tokens(numbered):
    """`max_epochs` with rows of several lengths: the step after which nothing is left."""
    source = numbered[0].model_copy(update={"max_epochs": 1})
    for every in (2, 3):
        reading = loader([source], longer(32, every=every))
        with pytest.raises(UserError, match=r"set training.steps = (\d+)") as found:
            reading.check_enough(1000)
        enough = int(str(found.value).split("set training.steps = ")[1].split(",")[0])
        assert len(batches(loader([source], longer(32, every=every)), enough)) == enough
        with pytest.raises(UserError, match="all have been read max_epochs times"):
            batches(loader([source], longer(32, every=every)), enough + 2)


@pytest.mark.parametrize(
    "kinds",
    [
        {"layer_pattern": ("window", "full"), "window": 3, "window_rope_theta": 99.0},
        {"n_kv_heads": 4, "kv_lora_rank": 16, "rope_head_size": 8, "head_size": 24},
    ],
)
def test_changed_positions_are_those_of_a_model_built_with_them(kinds):
    """YaRN's factors on the tables and on the scores, on every kind of layer."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 8, "mscale_all_dim": 1.0}
    spec = get_spec("llama3")
    same = TINY | kinds
    args = spec.args("debugmodel", same, max_seq_len=16)
    changed = same | {"rope_theta": 777.0, "rope_scaling": yarn}
    other = spec.args("debugmodel", changed, max_seq_len=16)
    torch.manual_seed(0)
    model = spec.build(args, attention_backend("cpu"))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)
    built = spec.build(other, attention_backend("cpu"))
    built.load_state_dict(model.state_dict())
    tokens = torch.randint(0, args.vocab_size, (2, 16))
    before = model(tokens)
    model.change_positions(other)
    assert torch.equal(model(tokens), built(tokens))
    assert not torch.allclose(model(tokens), before)
    model.change_positions(args)
    assert torch.equal(model(tokens), before)


def test_positions_of_a_stage_are_checked(tmp_path):
    flags = ["--training.stages=[{from_step = 3, rope_scaling = {type = 'yarn', factor = 'x'}}]"]
    config = resolve([f"--job.dump_folder={tmp_path}", *flags], 1).config
    with pytest.raises(ConfigError) as error:
        preflight(config, output=False)
    assert "the stage from_step 3: model.overrides.rope_scaling" in str(error.value)
