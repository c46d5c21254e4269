"""Conversations from every kind of source: the same rows, on any layout and after a resume."""

import itertools
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.chats import CHATML, CHATML_MARKED, CHATS, LLAMA3, say, write_chats, write_tokenizer
from torchtitan.commands import tokenize
from torchtitan.config import resolve
from torchtitan.config.sections.data import DataLoader, Source
from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import PLAIN, UNPREDICTED, build_tokenizer
from torchtitan.data.loader import build_loader
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.data.read.positions import complete_state
from torchtitan.data.registered import RegisteredDocuments
from torchtitan.data.spec import DataSpec
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError

MANY = [say(f"What is {i}?" * (i % 7 + 1), f"It is {i}, " * (i % 5 + 1)) for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same conversations in every format, and a tokenizer."""
    folder = tmp_path_factory.mktemp("chats")
    write_tokenizer(folder / "tokenizer")
    write_chats(folder / "chats.jsonl", MANY)
    (folder / "array.json").write_text(json.dumps([{"n": 1, "messages": chat} for chat in MANY]))
    pq.write_table(pa.table({"messages": MANY, "n": range(40)}), folder / "chats.parquet")
    (folder / "shards").mkdir()
    for i in range(4):
        write_chats(folder / f"shards/{i}.jsonl", MANY[i::4])
    flags = ["--messages-column", "messages", "--part", "15", "--workers", "1"]
    flags += ["--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "tokens")]
    tokenize.main(["--input", str(folder / "chats.jsonl"), *flags])
    return folder


def loader(folder, name, rank=0, degree=1, *, sources=None, rows=4, infinite=True, **options):
    path = str(folder / name)
    where = {"dataset": path} if name == "shards" else {"dataset_path": path}
    column = None if name == "tokens" else "messages"
    spec = DataSpec(
        sources=sources or [Source(name="data", messages_column=column, **where)],
        tokenizer=build_tokenizer(str(folder / "tokenizer")),
        seq_len=24,
        rows_per_step=rows,
        seed=3,
        infinite=infinite,
        on_bad_document=options.pop("on_bad_document", "stop"),
        options=DataLoader(**options),
    )
    return build_loader(spec, dp_rank=rank, dp_degree=degree)


def take(loader, count=10_000):
    try:
        return list(itertools.islice(iter(loader), count))
    finally:
        loader.close()


def chat_end(folder):
    return build_tokenizer(str(folder / "tokenizer")).backend.token_to_id("<|im_end|>")


def ids_of(folder, chats=MANY):
    """Conversations, one after another."""
    chat = Chat(build_tokenizer(str(folder / "tokenizer")), "key")
    return np.concatenate([chat.encode(chat.document(one)) for one in chats])


@pytest.mark.parametrize("name", ["chats.jsonl", "array.json", "chats.parquet"])
def test_rows_are_cut_from_the_conversations(folder, name):
    """Across rows too: a label belongs to the assistant, and inputs are plain ids."""
    steps = take(loader(folder, name, rows=8, infinite=False))
    for lane in range(8):
        expected = ids_of(folder, MANY[lane::8])
        tokens = torch.cat([step.tokens[lane] for step in steps]).numpy()
        labels = torch.cat([step.labels[lane] for step in steps]).numpy()
        count = len(expected) - 1
        assert np.array_equal(tokens[:count], expected[:-1] & PLAIN)
        predicted = expected[1:] < UNPREDICTED
        assert np.array_equal(labels[:count], np.where(predicted, expected[1:], IGNORE_INDEX))
        assert 0.2 < predicted.mean() < 0.8


def test_token_files_hold_the_same(folder):
    """Each file begins a sequence of its own; flags are declared, so that no older reader errs."""
    expected = ids_of(folder)
    found = [np.fromfile(file, np.uint32) for file in sorted((folder / "tokens").glob("*.bin"))]
    assert np.array_equal(np.concatenate(found), expected)
    about = json.loads((folder / "tokens/tokens-00000.json").read_text())
    assert about["dtype"] == "uint32-flagged"
    assert about["predicted"] == (found[0] < UNPREDICTED).sum()
    report = json.loads((folder / "tokens/tokens-report.json").read_text())
    assert report["predicted"] == (expected < UNPREDICTED).sum()
    tokens = loader(folder, "tokens", rows=1, infinite=False)
    step, *_ = take(tokens)
    assert tokens.spec.tokenizer.all_ends == [1, chat_end(folder)], "of a turn, too"
    assert np.array_equal(step.tokens[0].numpy(), expected[:24] & PLAIN)
    assert (step.labels == IGNORE_INDEX).any()
    assert (step.labels >= 0).any()


@pytest.mark.parametrize("name", ["chats.jsonl", "shards", "tokens"])
def test_ranks_and_resumes_change_nothing(folder, name):
    whole = take(loader(folder, name), 9)
    ranks = [take(loader(folder, name, rank, 2), 5) for rank in range(2)]
    resumed = [loader(folder, name, rank, 4) for rank in range(4)]
    states = [rank[-1].position for rank in ranks]
    for one in resumed:
        one.seek(complete_state(one.local_state(states[0]), states))
    later = [take(one, 4) for one in resumed]
    for step, expected in enumerate(whole):
        parts = [rank[step] for rank in ranks] if step < 5 else [rank[step - 5] for rank in later]
        assert torch.equal(torch.cat([part.tokens for part in parts]), expected.tokens)
        assert torch.equal(torch.cat([part.labels for part in parts]), expected.labels)


@pytest.mark.e2e
def test_workers_change_nothing(folder):
    whole = take(loader(folder, "chats.jsonl"), 4)
    for step, expected in zip(
        take(loader(folder, "chats.jsonl", num_workers=2), 4), whole, strict=True
    ):
        assert torch.equal(step.labels, expected.labels)


def test_a_mixture_with_text_predicts_all_of_the_text(folder):
    sources = [
        Source(name="text", dataset="demo"),
        Source(name="chat", dataset_path=str(folder / "chats.jsonl"), messages_column="messages"),
    ]
    for step in take(loader(folder, "", sources=sources), 5):
        assert sorted(step.sources.tolist()) == [0, 0, 1, 1]
        assert (step.labels[step.sources == 0] >= 0).all()
        assert (step.labels[step.sources == 1] == IGNORE_INDEX).any()


def test_bad_conversations_are_counted_or_stop_the_run(folder, tmp_path):
    """Also those that the template refuses, which the index finds."""
    write_tokenizer(tmp_path / "tokenizer", LLAMA3)
    bad = [say("only a question"), [{"role": "judge", "content": "x"}, *say("a", "b")]]
    write_chats(tmp_path / "chats.jsonl", [*CHATS, *bad])
    with pytest.raises(UserError, match=r"line 5: no message has the role \"assistant\""):
        loader(tmp_path, "chats.jsonl", cache_folder="none")
    skipping = loader(tmp_path, "chats.jsonl", on_bad_document="skip")
    (step,) = take(skipping, 1)
    assert skipping.skip_counts(step.position) == {
        "no assistant turn": 1,
        "refused by the chat template": 1,
    }


def test_another_template_is_other_data(folder, tmp_path):
    """A resume would read other rows: it stops, as for files that have changed."""
    (tmp_path / "chats.jsonl").write_bytes((folder / "chats.jsonl").read_bytes())
    write_tokenizer(tmp_path / "tokenizer", CHATML)
    first = loader(tmp_path, "chats.jsonl")
    (step,) = take(first, 1)
    state = complete_state(first.local_state(step.position), [step.position])
    write_tokenizer(tmp_path / "tokenizer", CHATML_MARKED)
    with pytest.raises(UserError, match="the data has changed since the checkpoint was saved"):
        loader(tmp_path, "chats.jsonl").seek(state)


def test_token_files_take_no_column(folder):
    source = Source(name="d", dataset_path=str(folder / "tokens"), messages_column="messages")
    with pytest.raises(UserError, match=r"training\.messages_column: .*tokens holds token files"):
        loader(folder, "", sources=[source])


@pytest.mark.parametrize("name", ["chats.jsonl", "tokens"])
def test_ends_of_turns_do_not_end_documents(folder, tmp_path, name):
    """Where they are the same token: a document begins at each begin-of-text, and nowhere else."""
    write_tokenizer(tmp_path / "tokenizer", eos="<|im_end|>")
    flags = ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "tokens")]
    flags += ["--messages-column", "messages", "--workers", "1"]
    tokenize.main(["--input", str(folder / "chats.jsonl"), *flags])
    (tmp_path / "chats.jsonl").write_bytes((folder / "chats.jsonl").read_bytes())
    lanes = 1 if name == "tokens" else 8
    steps = take(loader(tmp_path, name, rows=lanes, infinite=False))
    tokenizer = build_tokenizer(str(tmp_path / "tokenizer"))
    for lane in range(lanes):
        chats = MANY[lane::lanes]
        tokens = torch.cat([step.tokens[lane] for step in steps])
        continues = torch.cat([step.continues[lane] for step in steps])
        kept = len(ids_of(tmp_path, chats)) - 1  # the rest is padding
        ends = (tokens == tokenizer.eos_id) & ~continues
        begins = tokens == tokenizer.bos_id
        assert begins[:kept].sum() == len(chats)
        assert torch.equal(begins[1:kept], ends[: kept - 1])
        assert continues.sum() == 2 * len(chats)


def problems(folder, *more):
    flags = [f"--training.dataset_path={folder / 'chats.jsonl'}", *more]
    flags += ["--training.messages_column=messages", "--training.document_mask"]
    with pytest.raises(ConfigError) as caught:
        preflight(resolve(flags, 1).config, output=False)
    return str(caught.value)


def test_preflight_refuses_a_tokenizer_that_does_not_fit(folder, tmp_path):
    assert "training.messages_column: the tokenizer of model.hf_assets_path has no chat" in (
        problems(folder)
    )
    write_tokenizer(tmp_path, "{% if %}")
    found = problems(folder, f"--model.hf_assets_path={tmp_path}")
    assert f"the chat template in {tmp_path}/chat_template.jinja can't be parsed" in found


def test_samples_of_conversations_are_asked_for_their_template(folder):
    name = f"dataset_path = '{folder / 'chats.jsonl'}', messages_column = 'messages'"
    text = f"{{name = 'b', dataset_path = '{folder / 'chats.jsonl'}'}}"
    for more, chat, warns in (
        ("", "false", True),
        ("", "true", False),
        (f", {text}", "false", False),
    ):
        flags = [f"--model.hf_assets_path={folder / 'tokenizer'}", "--sampling.prompts=Hi"]
        flags += [f"--training.sources=[{{name = 'a', {name}}}{more}]", f"--sampling.chat={chat}"]
        flags += ["--model.overrides.vocab_size=4096"]
        words = "".join(preflight(resolve(flags, 1).config, output=False).warnings)
        assert ("set sampling.chat = true" in words) == warns


def test_tokenize_completes_only_parts_of_the_same_template(folder, tmp_path):
    flags = ["--input", str(folder / "chats.jsonl"), "--output", str(tmp_path / "out")]
    flags += ["--tokenizer", str(tmp_path), "--workers", "1", "--messages-column", "messages"]
    write_tokenizer(tmp_path, CHATML)
    tokenize.main(flags)
    write_tokenizer(tmp_path, LLAMA3)
    with pytest.raises(UserError, match="made from another input or tokenizer"):
        tokenize.main(flags)


def test_workers_of_tokenize_write_the_same(folder, tmp_path):
    flags = ["--input", str(folder / "chats.parquet"), "--output", str(tmp_path)]
    flags += ["--tokenizer", str(folder / "tokenizer"), "--messages-column", "messages"]
    tokenize.main([*flags, "--workers", "2", "--part", "15"])
    for file in sorted(os.listdir(folder / "tokens")):
        if file.endswith(".bin"):
            assert (tmp_path / file).read_bytes() == (folder / "tokens" / file).read_bytes()


def test_registered_documents_may_be_conversations(folder):
    class Made:
        fingerprint = "made"

        def __len__(self):
            return len(MANY)

        def __getitem__(self, index):
            return MANY[index] if index < 39 else "text"

    chat = Chat(build_tokenizer(str(folder / "tokenizer")), "key")
    documents = RegisteredDocuments(Made(), 'training.dataset: "made"', chat)
    assert documents[3] == chat.document(MANY[3])
    with pytest.raises(UserError, match=r'"made": document 39: must be a list of messages'):
        documents[39]
