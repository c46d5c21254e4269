"""Texts that are encoded in pieces get the ids of the whole text."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_tokenizer import SHIPPED, llama_folder  # noqa: F401 - a fixture
from torchtitan.data.text import pieces as module
from torchtitan.data.text.pieces import LLAMA3_PATTERN, pieces
from torchtitan.data.text.tokenizer import build_tokenizer
from torchtitan.utils.assets import find_asset
from torchtitan.utils.errors import UserError

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
QWEN = {
    "type": "Split",
    "pattern": {"Regex": LLAMA3_PATTERN.replace("{1,3}", "")},
    "behavior": "Isolated",
}
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
WHOLE = {
    "metaspace": {
        "pre_tokenizer": [{"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}]
    },
    "prefix": {"pre_tokenizer": [BYTES | {"use_regex": True, "add_prefix_space": True}]},
    "other expression": {
        "pre_tokenizer": [QWEN | {"invert": False, "pattern": {"Regex": r"\w+ \w+"}}, BYTES]
    },
    "none": {"pre_tokenizer": [BYTES]},
    "normalizer": {"normalizer": {"type": "Prepend", "prepend": "_"}},
    "token with a blank": {"token": {"content": "a b"}},
    "token that takes blanks": {"token": {"content": "<x>", "rstrip": True}},
}


def variant(folder, pre_tokenizer=None, normalizer=None, token=None):
    """The shipped tokenizer with other words."""
    content = json.loads((find_asset(SHIPPED) / "tokenizer.json").read_text())
    if pre_tokenizer:
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizer}
    if token:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        content["added_tokens"].append(flags | {"id": 2048} | token)
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
def test_no_word_crosses_a_cut(words, cases, tmp_path, llama_folder):  # noqa: F811
    """Cut wherever a cut is allowed, which is far more often than long texts are."""
    tokenizer = (
        build_tokenizer(str(llama_folder))
        if words == "tiktoken"
        else variant(tmp_path, **WORDS[words])
    )
    assert tokenizer.separable
    bounded = settings(max_examples=cases, derandomize=True, database=None, deadline=None)
    bounded(given(TEXTS)(lambda text: check(tokenizer, text)))()


@pytest.mark.parametrize("words", WHOLE)
def test_tokenizers_of_other_words_get_whole_texts_up_to_a_limit(words, tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.data.text.tokenizer.WHOLE_TEXT_CHARACTERS", 5_000)
    monkeypatch.setattr(module, "PIECE", 10)
    tokenizer = variant(tmp_path, **WHOLE[words])
    text = "a b, c\n" * 100
    assert tokenizer.encode(text) == tokenizer._ids(text)
    with pytest.raises(UserError, match=r"one has 7,000 characters \(5,000 at most\); split it"):
        tokenizer.encode(text * 10)


@given(TEXTS)
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
def test_pieces_are_short_and_make_up_the_text(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 3)
        parts = list(pieces(text))
    assert "".join(parts) == text
    assert all(len(part) <= 6 for part in parts)


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
def test_a_run_without_a_cut_is_encoded(run, which, llama_folder, monkeypatch):  # noqa: F811
    """The expression of `tiktoken` overflows its stack on a million blanks."""
    monkeypatch.setattr(module, "PIECE", 20_000)
    tokenizer = build_tokenizer(SHIPPED if which == "hf" else str(llama_folder))
    text = f"x{RUNS[run] * (60_000 // len(RUNS[run]))}y"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(map(len, re.findall(".+", "\n".join(pieces(text))))) <= 40_000
