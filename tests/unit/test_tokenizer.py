"""Both kinds of tokenizer: same ids from the same merges, special tokens, and errors for bad
folders.
"""

import base64
import json
import shutil

import pytest

from torchtitan.data.encode.tiktoken_files import ENCODINGS
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.read.documents import DemoDocuments
from torchtitan.utils.assets import find_asset
from torchtitan.utils.errors import UserError

SHIPPED = "./tests/assets/tokenizer"
TEXTS = [
    "def f(x):\n    return x + 1  # naïve 'quotes'\r\n\r\n",
    "1234567 don't DON'T\t\ttabs   spaces ",
    "日本語 und Größe 🚀",
    "",
]


def test_shipped_tokenizer():
    tokenizer = build_tokenizer(SHIPPED)
    assert tokenizer.vocab_size == 2048
    assert tokenizer.decode([tokenizer.bos_id]) == "<|begin_of_text|>"
    assert tokenizer.decode([tokenizer.eos_id]) == "<|end_of_text|>"
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        document = tokenizer.encode_document(text)
        assert document == [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]


def test_tiktoken_and_tokenizers_give_the_same_ids(llama_folder):
    """Two independent implementations of the split pattern and the merges agree; ids differ by the
    two specials.
    """
    hf = build_tokenizer(SHIPPED)
    tiktoken = build_tokenizer(str(llama_folder))
    documents = DemoDocuments(validation=True)
    for text in [*TEXTS, *(documents[i] for i in range(5))]:
        assert [i - 2 for i in hf.encode(text)] == tiktoken.encode(text)
        assert tiktoken.decode(tiktoken.encode(text)) == text


def test_llama3_special_tokens_have_their_ids(llama_folder):
    tokenizer = build_tokenizer(str(llama_folder))
    base = tokenizer.vocab_size - 256
    assert tokenizer.bos_id == base
    assert tokenizer.eos_id == base + 1
    for name, offset in ENCODINGS["Llama 3"].special.items():
        assert tokenizer.decode([base + offset]) == name
    # Published Llama 3 ids, from the end of the vocabulary: <|reserved_special_token_0|> is 128002
    # of 128000 + 256.
    assert tokenizer.decode([base + 2]) == "<|reserved_special_token_0|>"
    assert tokenizer.decode([base + 255]) == "<|reserved_special_token_246|>"


@pytest.mark.parametrize("which", ["hf", "tiktoken"])
def test_byte_lengths_sum_to_the_bytes_of_a_text(which, llama_folder):
    tokenizer = build_tokenizer(SHIPPED if which == "hf" else str(llama_folder))
    lengths = tokenizer.byte_lengths()
    documents = DemoDocuments(validation=True)
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[[tokenizer.bos_id, tokenizer.eos_id]].tolist() == [0, 0]
    for text in [*TEXTS, *(documents[i] for i in range(5))]:
        assert lengths[tokenizer.encode_document(text)].sum() == len(text.encode())


def test_byte_lengths_of_tokens_that_are_not_bytes(tmp_path):
    """As SentencePiece does: a space before the text, bytes for unknown characters, and an added
    token.
    """
    names = [
        "<unk>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "\u2581",
        *"abcé",
        "\u2581ab",
        "ab",
        "<tool>",
    ]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    fallback = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    content = {
        "version": "1.0",
        "added_tokens": [
            added | {"id": 0, "content": "<unk>", "special": True},
            added | {"id": 1, "content": "</s>", "special": True},
            added | {"id": len(names) - 1, "content": "<tool>", "special": False},
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "decoder": {"type": "Sequence", "decoders": [*fallback, {"type": "Fuse"}, strip]},
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "unk_token": "<unk>",
            "vocab": {name: i for i, name in enumerate(names[:-1])},
            "merges": [["a", "b"], ["\u2581", "ab"]],
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = build_tokenizer(str(tmp_path))
    lengths = tokenizer.byte_lengths()
    assert lengths[tokenizer.eos_id] == 0
    for text in ("ab cab", "é 🚀  ab日", "ab<tool>"):
        ids = tokenizer.encode(text)
        assert 0 not in ids
        assert tokenizer.decode(ids) == text
        assert lengths[ids].sum() == len((" " + text).encode())


@pytest.mark.parametrize("which", ["hf", "tiktoken"])
def test_text_never_becomes_a_special_token(which, llama_folder):
    tokenizer = build_tokenizer(SHIPPED if which == "hf" else str(llama_folder))
    ids = tokenizer.encode("a<|end_of_text|>b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a<|end_of_text|>b"


def test_documents_are_never_truncated(tmp_path):
    """Some `tokenizer.json` files set a truncation for fine-tuning."""
    shutil.copytree(find_asset(SHIPPED), tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert build_tokenizer(str(tmp_path)).encode("hello " * 99) == build_tokenizer(SHIPPED).encode(
        "hello " * 99
    )


def test_a_changed_model_file_is_read_again(tmp_path):
    file = tmp_path / "tokenizer.model"
    for size in (256, 257):
        tokens = [bytes([i]) for i in range(256)] + [b"ab"]
        file.write_bytes(
            b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens[:size]))
        )
        assert build_tokenizer(str(file)).vocab_size == size + 256


def test_a_million_blanks_can_be_encoded(llama_folder):
    tokenizer = build_tokenizer(str(llama_folder))
    text = "a" + " " * 1_500_000 + "b"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_json_takes_precedence_over_model(tmp_path, llama_folder):
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    shutil.copy(find_asset(SHIPPED) / "tokenizer.json", tmp_path)
    assert build_tokenizer(str(tmp_path)).path.name == "tokenizer.json"
    assert build_tokenizer(str(tmp_path / "original/tokenizer.model")).vocab_size == 2046 + 256


def test_relative_path_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert build_tokenizer(SHIPPED).vocab_size == 2048


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (None, "does not exist"),
        ({}, "holds no tokenizer"),
        ({"tokenizer.json": "{"}, "is not a tokenizer"),
        ({"tokenizer.json": "{", "tokenizer_config.json": "[]"}, "is not a tokenizer"),
        ({"tokenizer.model": "no ranks here"}, "is not a tiktoken model"),
        ({"tokenizer.model": ""}, "ranks are missing"),
        ({"tokenizer.model": "YQ== 0\nYg== 1\nYw== 12\n"}, "ranks are missing"),
    ],
)
def test_bad_folders_are_named_with_the_key(tmp_path, files, text):
    folder = tmp_path / "assets"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    with pytest.raises(UserError, match=text) as error:
        build_tokenizer(str(folder))
    assert "model.hf_assets_path" in str(error.value)


def changed_json(folder, change):
    content = json.loads((find_asset(SHIPPED) / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return build_tokenizer(str(folder))


@pytest.mark.parametrize("id", [2**31 - 2, 2**24])
def test_an_id_beyond_any_vocabulary_is_refused(tmp_path, id):
    """Counts of all ids would take gigabytes."""

    def change(content):
        content["model"]["vocab"]["beyond"] = id

    with pytest.raises(UserError, match=f"has the id {id:,}; ids must be below 16,777,216"):
        changed_json(tmp_path, change)


@pytest.mark.parametrize("pattern", [{"String": "a"}, {"Regex": "a"}])
def test_normalizers_that_multiply_a_text_are_refused(tmp_path, pattern):
    def times(count):
        step = {"type": "Replace", "pattern": pattern, "content": "a" * 5}
        nested = {"type": "Sequence", "normalizers": [step] * (count - 1)}
        return lambda content: content.update(
            normalizer={"type": "Sequence", "normalizers": [step, nested]}
        )

    with pytest.raises(UserError, match="may make a text 3,125 times as long"):
        changed_json(tmp_path, times(5))
    assert changed_json(tmp_path, times(2)).backend.normalizer.normalize_str("ab") == "a" * 25 + "b"
