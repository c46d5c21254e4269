"""Texts that are encoded in pieces get the ids of the whole text."""

import itertools
import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.data.encode import base as module
from torchtitan.data.encode.base import pieces
from torchtitan.data.encode.tiktoken_files import ENCODINGS
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.order.lanes import DocumentCursor, LaneReader, StreamLane
from torchtitan.utils.assets import find_asset

SHIPPED = "./tests/assets/tokenizer"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
QWEN = {"type": "Split", "pattern": {"Regex": ENCODINGS["Qwen"].pattern}, "behavior": "Isolated"}
WORDS = {
    "llama": {},
    "qwen": {"pre_tokenizer": [QWEN | {"invert": False}, BYTES], "normalizer": {"type": "NFC"}},
    "gpt2": {"pre_tokenizer": [BYTES | {"use_regex": True}]},
    "smollm": {
        "pre_tokenizer": [
            {"type": "Digits", "individual_digits": True},
            BYTES | {"use_regex": True},
        ]
    },
}


def variant(folder, pre_tokenizer=None, normalizer=None):
    """The shipped tokenizer with other words."""
    content = json.loads((find_asset(SHIPPED) / "tokenizer.json").read_text())
    if pre_tokenizer:
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizer}
    (folder / "tokenizer.json").write_text(json.dumps(content | {"normalizer": normalizer}))
    return build_tokenizer(str(folder))


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                " ",
                "  ",
                "\n",
                "\r\n",
                "\t",
                "'s",
                "'",
                "\u2019ll",
                "12345",
                "abc",
                "DON'T",
                ".",
                ");",
            ]
        ),
        st.sampled_from(
            [
                "\u0301",
                "\u00a0",
                "\u2028",
                "\u0085",
                "\x1c",
                "日本",
                "。",
                "한글",
                "ß",
                "Ⅷ",
                "½",
                "🚀",
                "_",
            ]
        ),
        st.text(max_size=4),
    ),
    max_size=30,
).map("".join)


def check(tokenizer, text):
    cuts = [0, *(found.start() for found in module._CUT.finditer(text)), len(text)]
    parts = (tokenizer._ids(text[a:b]) for a, b in itertools.pairwise(cuts))
    assert list(itertools.chain(*parts)) == tokenizer._ids(text)


@pytest.mark.parametrize("cases", [300, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [*WORDS, "tiktoken"])
def test_no_word_crosses_a_cut(words, cases, tmp_path, llama_folder):
    """Cut wherever a cut is allowed, which is far more often than long texts are."""
    tokenizer = (
        build_tokenizer(str(llama_folder))
        if words == "tiktoken"
        else variant(tmp_path, **WORDS[words])
    )
    bounded = settings(max_examples=cases, derandomize=True, database=None, deadline=None)
    bounded(given(TEXTS)(lambda text: check(tokenizer, text)))()


@given(TEXTS)
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
def test_pieces_are_short_and_make_up_the_text(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 3)
        parts = list(pieces(text))
    assert "".join(parts) == text
    assert all(len(part) <= 6 for part in parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 3)
        starts = [0, *itertools.accumulate(map(len, parts))][:-1]
        assert all(list(pieces(text, start)) == parts[i:] for i, start in enumerate(starts))


RUNS = {
    "letters": "a",
    "blanks": " ",
    "newlines": "\n",
    "digits": "7",
    "marks": ".",
    "kanji": "日本語",
    "lines": " \n",
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("which", ["hf", "tiktoken"])
def test_a_run_without_a_cut_is_encoded(run, which, llama_folder, monkeypatch):
    """The expression of `tiktoken` overflows its stack on a million blanks."""
    monkeypatch.setattr(module, "PIECE", 20_000)
    tokenizer = build_tokenizer(SHIPPED if which == "hf" else str(llama_folder))
    text = f"x{RUNS[run] * (60_000 // len(RUNS[run]))}y"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(map(len, re.findall(".+", "\n".join(pieces(text))))) <= 40_000


def test_a_resume_of_a_resume_within_a_long_document(monkeypatch):
    """And of that: each continues from the position of the one before it."""
    monkeypatch.setattr(module, "LONG", 1000)
    monkeypatch.setattr(module, "PIECE", 300)
    tokenizer = build_tokenizer(SHIPPED)
    texts = [" ".join(f"{letter}{i}" for i in range(900)) for letter in "abc"]

    def lane():
        return StreamLane(DocumentCursor(texts, 0, 1, None, lambda _, read: read()), tokenizer)

    whole, resumed = lane(), lane()
    expected = [whole.row(64) for _ in range(60)]
    for row in expected:
        position = resumed.position()
        resumed = lane()
        resumed.seek(position)
        assert resumed.position() == position
        assert resumed.row(64).tolist() == row.tolist()
    assert position.cursor.position == 1, "it is in the second document"


def test_the_epochs_of_lanes_are_averaged():
    lanes = {i: SimpleNamespace(cursor=SimpleNamespace(epochs=x)) for i, x in ((0, 0.5), (3, 1.0))}
    assert LaneReader("", (0, 1), lanes, 4).epochs == 0.75
