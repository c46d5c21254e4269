"""Files of tiktoken and SentencePiece, and tekken.json: read by the folder's rules, or refused.

References: `tiktoken` and `tokenizers` with patterns written out here, the library `sentencepiece`,
and transformers' conversion of its models.
"""

import base64
import json
import unicodedata

import pytest

from tests.hf_folders import SHIPPED
from torchtitan.checkpoint.hf.check import _tokenizer_note
from torchtitan.checkpoint.hf.tokenizer import file_problem, write_tokenizer
from torchtitan.data.encode import tiktoken_files
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.read.documents import DemoDocuments
from torchtitan.utils.errors import UserError

TEXTS = [
    "Hello CamelCase world's DON'T 12345678 o'clock",
    "def f(x):\n    return x ** 2  # cafe\u0301 naïve\r\n\r\n",
    "日本語 text, 中文カタカナ und Größe 🚀 a/b//c\n/d",
    "  blanks   and\ttabs  ",
    "<s> </s> <|endoftext|> <|im_end|> [BOS]",
]
WORD = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{WORD}?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*{WORD}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + f"{WORD}?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + f"{WORD}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
QWEN = WORD + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def ranks(llama_folder):
    """The shipped vocabulary as tokens and ranks."""
    lines = (llama_folder / "original/tokenizer.model").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def write_ranks(file, ranks, **beside):
    file.parent.mkdir(exist_ok=True)
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    file.write_bytes(b"".join(lines))
    for name, content in beside.items():
        (file.parent / f"{name}.json").write_text(json.dumps(content))
    return str(file.parent)


def kimi(count):
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>"}
    listed = {str(count + i): {"content": name, "special": True} for i, name in names.items()}
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": listed,
    }


CASES = {
    # name: (file, files beside it, pattern, begin, end), places counted from the last rank
    "qwen by name": ("qwen.tiktoken", lambda n: {}, QWEN, None, 0),
    "qwen by class": (
        "vocab.tiktoken",
        lambda n: {"tokenizer_config": {"tokenizer_class": "QWenTokenizer"}},
        QWEN,
        None,
        0,
    ),
    "kimi": ("tiktoken.model", lambda n: {"tokenizer_config": kimi(n)}, KIMI, 0, 1),
    "gpt-4o": ("o200k_base.tiktoken", lambda n: {}, O200K, None, 1),
    "gpt-oss": (
        "o200k_base.tiktoken",
        lambda n: {"config": {"model_type": "gpt_oss"}},
        O200K,
        0,
        4,
    ),
    "gpt-2": ("r50k_base.tiktoken", lambda n: {}, GPT2, None, 0),
    "llama 3's end of turn": (
        "tokenizer.model",
        lambda n: {"tokenizer_config": {"eos_token": "<|eot_id|>"}},
        tiktoken_files.ENCODINGS["Llama 3"].pattern,
        0,
        9,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_tiktoken_file_has_the_rules_of_its_folder(case, ranks, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    name, beside, pattern, begin, end = CASES[case]
    count = len(ranks)
    folder = write_ranks(tmp_path / "a" / name, ranks, **beside(count))
    tokenizer = build_tokenizer(folder)
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    if pattern is not GPT2:  # a small vocabulary has few tokens across all differences
        assert tokenizer.spec.pattern == pattern
    normal = "NFC" if pattern is QWEN else None
    for text in TEXTS:
        expected = unicodedata.normalize(normal, text) if normal else text
        assert tokenizer.encode(text) == theirs.encode(expected, disallowed_special=())
        assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert tokenizer.bos_id == (None if begin is None else count + begin)
    assert tokenizer.eos_id == count + end
    (tmp_path / "b").mkdir()
    write_tokenizer(tokenizer, tmp_path / "b", 128)
    assert file_problem(tokenizer, tmp_path / "b") is None
    again = build_tokenizer(str(tmp_path / "b"))
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    for text in TEXTS[:4]:
        assert again.encode(text) == tokenizer.encode(text)


def test_published_special_tokens():
    assert tiktoken_files.ENCODINGS["gpt-oss"].special_ids(199_998) == {
        "<|startoftext|>": 199998,
        "<|endoftext|>": 199999,
        "<|return|>": 200002,
        "<|constrain|>": 200003,
        "<|channel|>": 200005,
        "<|start|>": 200006,
        "<|end|>": 200007,
        "<|message|>": 200008,
        "<|call|>": 200012,
        "<|endofprompt|>": 200018,
        **{f"<|reserved_{i}|>": i for i in (200000, 200001, 200004, *range(200009, 200012))},
        **{f"<|reserved_{i}|>": i for i in range(200013, 200018)},
    }
    qwen = tiktoken_files.ENCODINGS["Qwen"].special_ids(151_643)
    assert (qwen["<|endoftext|>"], qwen["<|im_end|>"]) == (151643, 151645)
    assert (qwen["<|extra_0|>"], qwen["<|extra_204|>"], len(qwen)) == (151646, 151850, 208)
    assert tiktoken_files.ENCODINGS["GPT-4"].special_ids(100_256)["<|endofprompt|>"] == 100276


UNKNOWN = {
    "class": ("tokenizer.model", {"tokenizer_config": {"tokenizer_class": "MyTokenizer"}}),
    "tiktoken of another": (
        "tokenizer.model",
        {"tokenizer_config": {"tokenizer_class": "TikTokenTokenizer"}},
    ),
    "name": ("mine.tiktoken", {}),
    "model": ("tokenizer.model", {"config": {"model_type": "dbrx"}}),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_tiktoken_file_of_unknown_rules_is_refused(case, ranks, tmp_path):
    name, beside = UNKNOWN[case]
    folder = write_ranks(tmp_path / name, ranks, **beside)
    with pytest.raises(UserError, match=r"make a tokenizer.json of it: .*convert_tiktoken_to_fast"):
        build_tokenizer(folder)


def test_a_rank_that_is_there_twice_is_named(ranks, tmp_path):
    double = ranks | {b"doubled token": 7}
    with pytest.raises(UserError, match="a token or a rank is there twice"):
        build_tokenizer(write_ranks(tmp_path / "tokenizer.model", double))


def tekken(ranks, first=10):
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    extra = {"rank": len(ranks), "token_bytes": base64.b64encode(b"unused tail").decode()}
    return {
        "config": {
            "pattern": O200K,
            "num_vocab_tokens": len(ranks) + 1,
            "default_vocab_size": len(ranks) + first,
            "default_num_special_tokens": first,
            "version": "v3",
        },
        "vocab": [*vocab, extra],
        "special_tokens": [{"rank": 3, "token_str": "[INST]", "is_control": True}],
    }


def test_tekken_is_read_by_its_own_pattern(ranks, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(ranks)))
    tokenizer = build_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.vocab_size == len(ranks) + 10
    theirs = tiktoken.Encoding("x", pat_str=O200K, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        expected = [10 + id for id in theirs.encode(text, disallowed_special=())]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text
        assert tokenizer.byte_lengths()[expected].sum() == len(text.encode())
    assert tokenizer.decode([3]) == "[INST]"
    (tmp_path / "b").mkdir()
    write_tokenizer(tokenizer, tmp_path / "b", 128)
    assert file_problem(tokenizer, tmp_path / "b") is None
    (tmp_path / "tekken.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(UserError, match=r"is not Mistral's tekken.json"):
        build_tokenizer(str(tmp_path))


def of_bytes(first=10, special=(), **config):
    """A `tekken.json` of the 256 bytes."""
    content = tekken({bytes([i]): i for i in range(256)}, first)
    content["config"] |= config
    return {"tekken.json": json.dumps(content | {"special_tokens": special})}


def changed(**parts):
    """The shipped `tokenizer.json` with other parts."""
    content = json.loads((SHIPPED / "tokenizer.json").read_text())
    model = content["model"] | parts.pop("model", {})
    return {"tokenizer.json": json.dumps(content | {"model": model} | parts)}


def beside(entries, name="tokenizer_config.json"):
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    return {"tokenizer.model": "\n".join(lines), name: json.dumps(entries)}


def replaced(content, times=1):
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times, "decoders": [step] * times}


NO_TABLE = "the added tokens must be a table of ids below 16,777,216 and tokens$"
HOSTILE = {
    "2e9 special tokens": (of_bytes(2_000_000_000), "2000000000 is not between 0 and 65,536"),
    "1e7 special tokens": (of_bytes(10_000_000), "10000000 is not between 0 and 65,536"),
    "-5 special tokens": (of_bytes(-5), "-5 is not between 0 and 65,536"),
    "half a special token": (of_bytes(default_num_special_tokens=0.5), "'float' object"),
    "infinite vocabulary": (of_bytes(default_vocab_size=float("inf")), "'float' object"),
    "nan vocabulary": (of_bytes(default_vocab_size=float("nan")), "'float' object"),
    "no vocabulary": (of_bytes(default_vocab_size=4), "ranks are missing"),
    "special id": (of_bytes(special=[{"rank": 2**40, "token_str": "x"}]), "is not between 0 and"),
    "special surrogate": (of_bytes(special=[{"rank": 3, "token_str": "\ud800"}]), "half a surr"),
    "no special table": (of_bytes(special={"a": 1}), "is not Mistral's tekken.json"),
    "open group": (of_bytes(pattern="("), "can't be used: Parsing error"),
    "deep pattern": (of_bytes(pattern="(" * 9999 + "a" + ")" * 9999), "can't be used: Parsing"),
    "empty pattern": (of_bytes(pattern=""), "can't be used: "),
    "pattern of one letter": (of_bytes(pattern="b"), "texts drops a part of them$"),
    "pattern of words": (of_bytes(pattern=r"\w+|\s"), "texts drops a part of them$"),
    "pattern that backtracks": (of_bytes(pattern=r"(?:(?=(a+))\1?)+b"), "drops a part of them$"),
    "class": (beside({"tokenizer_class": {"a": 1}}), "of the class {'a': 1}"),
    "class of a list": (beside({"tokenizer_class": []}), None),
    "added id": (beside({"<x>": 2**32}, "added_tokens.json"), NO_TABLE),
    "added below 0": (beside({"added_tokens_decoder": {"-3": {"content": "x"}}}), NO_TABLE),
    "added fraction": (beside({"<x>": 300.5}, "added_tokens.json"), NO_TABLE),
    "added list": (beside({"added_tokens_decoder": [1]}), NO_TABLE),
    "end": (changed() | {"special_tokens_map.json": '{"eos_token": "\\ud800"}'}, "half a surr"),
    "prepended": (changed(normalizer={"type": "Prepend", "prepend": "a" * 10**5}), "100,001 times"),
    "replaced": (changed(normalizer=replaced("a" * 40, 5)), "102,400,000 times as long"),
    "decoded": (changed(decoder=replaced("a" * 10**5)), "100,000 times as long"),
    "suffix": (changed(model={"end_of_word_suffix": "a" * 10**5}), "100,000 times as long"),
    "prefix": (changed(model={"continuing_subword_prefix": "a" * 10**5}), "is not a tokenizer"),
    "charsmap": (
        changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////wAA"}),
        "is not a tokenizer",
    ),
    "far id": (
        changed(added_tokens=[{"id": 2**32, "content": "<far>", "special": True}]),
        "is not a tokenizer",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tokenizer_is_one_sentence_at_once(case, tmp_path):
    """Numbers and texts of a file are limited before they become sizes."""
    files, message = HOSTILE[case]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    if message is None:
        assert build_tokenizer(str(tmp_path)).encode("a b") == [97, 32, 98]
        return
    with pytest.raises(UserError, match=message) as error:
        build_tokenizer(str(tmp_path))
    assert len(str(error.value)) < 500 + len(str(tmp_path))


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    """A SentencePiece model with the settings of Llama 2's."""
    folder = tmp_path_factory.mktemp("llama2")
    train_sentencepiece(folder)
    return folder


def train_sentencepiece(folder, **changes):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    documents = DemoDocuments(validation=True)
    (folder / "text").write_text("\n".join(documents[i] for i in range(10)))
    options = {
        "model_type": "bpe",
        "vocab_size": 500,
        "character_coverage": 0.99,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "max_sentence_length": 100_000,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), **options | changes
    )
    (folder / "text").unlink()
    (folder / "tokenizer.vocab").unlink()


def settings(folder, **entries):
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True} | entries
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_sentencepiece_model_has_the_ids_of_transformers(llama2):
    transformers = pytest.importorskip("transformers")
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    tokenizer = build_tokenizer(settings(llama2, **names))
    theirs = transformers.AutoTokenizer.from_pretrained(llama2)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    documents = DemoDocuments(validation=True)
    for text in (*TEXTS[:3], documents[3][:2000]):
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == [1, *ids]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([1, *ids, 2]) == f"<s>{text}</s>"
        assert tokenizer.byte_lengths()[ids].sum() == len(text.encode()) + 1
        assert list(tokenizer._batch_ids([text, text])) == [ids, ids]
    assert not {1, 2} & set(tokenizer.encode(TEXTS[4]))


def test_the_files_beside_a_sentencepiece_model_are_obeyed(llama2, tmp_path):
    tokenizer = build_tokenizer(settings(llama2, bos_token=None))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 2)
    assert build_tokenizer(settings(llama2, add_bos_token=False)).bos_id is None
    with pytest.raises(UserError, match=r"eos_token is '<end>', which .* doesn't have"):
        build_tokenizer(settings(llama2, eos_token="<end>"))
    with pytest.raises(UserError, match=r"of the class XLMRobertaTokenizer, whose ids may differ"):
        build_tokenizer(settings(llama2, tokenizer_class="XLMRobertaTokenizer"))
    with pytest.raises(UserError, match="puts a space before each text"):
        build_tokenizer(settings(llama2, add_prefix_space=False))
    listed = {"500": {"content": "<new>"}}
    with pytest.raises(UserError, match=r"add the token '<new>' \(500\)"):
        build_tokenizer(settings(llama2, added_tokens_decoder=listed))
    with pytest.raises(UserError, match=r"no end-of-text token; .* \(null if it has none at all"):
        build_tokenizer(settings(llama2, eos_token=None))  # the model has </s>
    tokenizer = build_tokenizer(settings(llama2, eos_token="</s>"), end_of_document="<s>")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (None, 1, (2,))
    write_tokenizer(tokenizer, tmp_path, 128)
    again = build_tokenizer(str(tmp_path))
    assert again.eos_id == 1
    assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


FORMS = {
    "bpe": {},
    "unigram, normalized": {
        "model_type": "unigram",
        "normalization_rule_name": "nmt_nfkc",
        "remove_extra_whitespaces": True,
        "num_threads": 1,
    },
    "no prefix, symbols": {"add_dummy_prefix": False, "user_defined_symbols": ["<sym>"]},
    "symbols": {"user_defined_symbols": ["<sym>"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_export_of_a_sentencepiece_model_has_its_ids(tmp_path, form):
    """Only a blank in front of the first text that isn't a symbol can't be expressed."""
    transformers = pytest.importorskip("transformers")
    train_sentencepiece(tmp_path, **FORMS[form])
    (tmp_path / "tokenizer.model").rename(tmp_path / "tokenizer.model.v7")
    tokenizer = build_tokenizer(str(tmp_path))
    (tmp_path / "hf").mkdir()
    write_tokenizer(tokenizer, tmp_path / "hf", 128)
    (tmp_path / "hf/config.json").write_text('{"model_type": "mistral"}')
    names = {file.name for file in (tmp_path / "hf").iterdir()}
    if form == "symbols":
        assert names == {"config.json", "tokenizer.model"}
        note = _tokenizer_note(tmp_path / "hf", "mistral", tokenizer)
        assert note.startswith("Warning: AutoTokenizer of transformers can't give the token ids of")
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = [
        " a▁b",
        "\n\n",
        "a<sym>  <sym> b",
        *TEXTS[:4],
        DemoDocuments(validation=True)[3][:2000],
    ]
    for text in texts:
        ids = tokenizer.encode(text, bos=True)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids[1:]) == tokenizer.decode(ids[1:])


def test_pieces_of_a_sentencepiece_model(llama2, monkeypatch):
    tokenizer = build_tokenizer(settings(llama2))
    documents = DemoDocuments(validation=True)
    text = " ".join(documents[i] for i in range(3))[:20_000]
    whole = tokenizer.encode(text)
    monkeypatch.setattr("torchtitan.data.encode.base._NEAR", 64)
    monkeypatch.setattr("torchtitan.data.encode.base.PIECE", 500)
    assert tokenizer.encode(text) == whole


def test_without_the_library_the_sentence_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(
        UserError, match=r"is a SentencePiece model, .*titan-pretrain.sentencepiece"
    ):
        build_tokenizer(str(tmp_path))


def test_a_text_from_nothing_begins_without_a_blank(llama2):
    """As transformers decodes it; after a prompt the blank stays."""
    from torchtitan.inference.generator import Continuation

    tokenizer = build_tokenizer(settings(llama2))
    once, upon = tokenizer.encode("the"), tokenizer.encode("code")
    nothing = Continuation([1])
    nothing.tokens += [*once, *upon]
    assert nothing.text(tokenizer) == "the code"
    prompted = Continuation([1, *once])
    prompted.tokens += upon
    assert prompted.text(tokenizer) == " code"
