"""`torchtitan tokenizer`: byte-pair merges, samples, Hugging Face files, and what is refused."""

import gzip
import hashlib
import json
import re
from collections import Counter
from itertools import pairwise

import pytest

from torchtitan.commands import tokenizer as command
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.encode.tokenizer_training import (
    Sample,
    TokenizerSummary,
    _sampled,
    train_tokenizer,
)
from torchtitan.data.read.corpus import Corpus
from torchtitan.utils.errors import UserError

WORDS = [
    *("the", "cat", "sat", "on", "the", "mat", "while", "the", "other", "cat"),
    *("at", "the", "bat", "ran", "thin", "then", "than", "that"),
]
TEXTS = [" ".join(WORDS[i:] + WORDS[: i // 2]) + f" {i * 137}\n" for i in range(len(WORDS))]
BYTES = 256


def write(folder, texts=TEXTS):
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_text(text)
    return str(folder)


def merges(folder):
    return [
        tuple(pair)
        for pair in json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    ]


def naive_merges(texts, count):
    """The most frequent pair of neighbours within words, again and again; of several, the one whose
    parts came first.
    """
    words = Counter(
        tuple(word.replace(" ", "Ġ").replace("\n", "Ċ"))
        for text in texts
        for word in re.findall(r" ?[a-z]+|\d{1,3}| (?=\d)|\n", text)
    )
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = sorted(
        {chr(i) for i in printable} | {chr(256 + i) for i in range(256 - len(printable))}
    )
    place = {character: i for i, character in enumerate(alphabet)}
    made = []
    for _ in range(count):
        pairs = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], place[pair[0]], place[pair[1]]))
        made.append(best)
        place.setdefault("".join(best), len(place))
        joined = Counter()
        for word, times in words.items():
            parts, i = [], 0
            while i < len(word):
                step = 2 if word[i : i + 2] == best else 1
                parts.append("".join(word[i : i + step]))
                i += step
            joined[tuple(parts)] += times
        words = joined
    return made


def test_merges_are_those_of_the_definition(tmp_path):
    command.main(
        [write(tmp_path / "text"), "--vocab-size", "288", "--output", str(tmp_path / "made")]
    )
    assert merges(tmp_path / "made") == naive_merges(TEXTS, 288 - BYTES - 2)
    made = build_tokenizer(str(tmp_path / "made"))
    assert (made.vocab_size, made.bos_id, made.eos_id) == (288, 0, 1)
    for text in (*TEXTS, "naïve 日本 🙂 \t\r\n", "<|end_of_text|>"):
        assert made.decode(made.encode(text)) == text
        assert not {0, 1} & set(made.encode(text))


@pytest.mark.parametrize("pattern", ["llama3", "qwen2", "gpt2"])
def test_any_order_and_format_give_the_same_files(tmp_path, pattern):
    options = ["--vocab-size", "290", "--pattern", pattern]
    folder = write(tmp_path / "text")
    lines = tmp_path / "lines.jsonl.gz"
    with gzip.open(lines, "wt") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in reversed(TEXTS))
    command.main([folder, *options, "--output", str(tmp_path / "a")])
    command.main([str(lines), *options, "--text-column", "body", "--output", str(tmp_path / "b")])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    made = build_tokenizer(str(tmp_path / "a"))
    digits = [made.decode([id]) for id in made.encode("x 1234")][-4:]
    assert (digits == ["1", "2", "3", "4"]) or pattern != "qwen2"


def uniform(text, seed):
    """As documented: by a hash of the text."""
    hash = hashlib.blake2b(text.encode(), digest_size=8).digest()
    person = f"seed {seed}".encode()
    rank = hashlib.blake2b(hash, digest_size=6, person=person).digest()
    return int.from_bytes(rank, "little") / 2**48


@pytest.mark.parametrize("seed", [0, 10**9])
def test_a_share_is_chosen_by_hash(tmp_path, seed):
    corpus = Corpus(write(tmp_path / "text"), "PATH")
    trained = TokenizerSummary()
    chosen = set(_sampled(corpus.texts(lambda size: None), Sample(0.3, seed=seed), trained))
    assert chosen == {text for text in TEXTS if uniform(text, seed) < 0.3}
    assert (trained.documents, trained.sampled_documents) == (len(TEXTS), len(chosen))


@pytest.mark.parametrize("order", [1, -1])
def test_bytes_are_those_of_the_lowest_ranks(tmp_path, order):
    corpus = Corpus(write(tmp_path / "text", TEXTS[::order]), "PATH")
    trained = TokenizerSummary()
    chosen = list(_sampled(corpus.texts(lambda size: None), Sample(bytes=400), trained))
    expected = []
    for text in sorted(TEXTS, key=lambda text: uniform(text, 0)):
        if sum(map(len, expected)) < 400:
            expected.append(text)
    assert chosen == expected
    assert trained.bytes == sum(map(len, TEXTS))
    assert trained.sampled_bytes == sum(map(len, expected))


def test_the_report_names_the_sample_and_a_short_vocabulary(tmp_path, capsys):
    folder = write(tmp_path / "text")
    options = ["--vocab-size", "32000", "--output", str(tmp_path / "made"), "--sample", "400 MB"]
    command.main([folder, *options])
    out = capsys.readouterr().out
    whole = sum(map(len, TEXTS))
    assert f"Read {len(TEXTS)} documents, {whole:,} bytes" in out
    assert f"Trained on {len(TEXTS)} documents of them, {whole:,} bytes" in out
    made = build_tokenizer(str(tmp_path / "made")).vocab_size
    assert f"{made} entries" in out
    assert "fewer than --vocab-size 32,000: the text has no further pairs" in out


def test_transformers_reads_the_folder_alike(tmp_path):
    transformers = pytest.importorskip("transformers")
    command.main(
        [write(tmp_path / "text"), "--vocab-size", "290", "--output", str(tmp_path / "made")]
        + ["--special-token", "<|tool|>"]
    )
    ours = build_tokenizer(str(tmp_path / "made"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")
    theirs.save_pretrained(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in (*TEXTS, "Is n't it , 日本 ? \n"):
        for auto in (theirs, again):
            assert auto(text)["input_ids"] == ours.encode(text, bos=True)
            assert auto(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
            assert auto.decode(auto(text)["input_ids"], skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert theirs("<|tool|>x", add_special_tokens=False)["input_ids"][0] == 2
    assert theirs.decode([2, 0, 1], skip_special_tokens=True) == ""


def test_the_chat_template_marks_what_the_assistant_says(tmp_path):
    transformers = pytest.importorskip("transformers")
    command.main(
        [write(tmp_path / "text"), "--vocab-size", "290", "--output", str(tmp_path / "made")]
        + ["--chat-template", "chatml"]
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")
    messages = [
        {"role": "user", "content": "where is the cat?"},
        {"role": "assistant", "content": "on the mat"},
    ]
    found = theirs.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [
        id for id, mask in zip(found["input_ids"], found["assistant_masks"], strict=True) if mask
    ]
    assert theirs.decode(marked) == "on the mat<|im_end|>"
    assert theirs.decode(found["input_ids"]) == (
        "<|begin_of_text|><|im_start|>user\nwhere is the cat?<|im_end|>\n"
        "<|im_start|>assistant\non the mat<|im_end|>\n"
    )
    assert found["input_ids"][:2] == [0, 2]


def test_conversations_train_it_by_what_their_messages_say(tmp_path, capsys):
    says = [("where is the cat?", "on the mat"), ("and the hat?", "on the cat")]
    with (tmp_path / "chat.jsonl").open("w") as file:
        for question, answer in says:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"turns": messages}) + "\n")
    options = ["--vocab-size=290", f"--output={tmp_path / 'made'}", "--messages-column=turns"]
    command.main([str(tmp_path / "chat.jsonl"), *options])
    assert "made --training.messages_column turns" in capsys.readouterr().out
    text = [f"{question}\n{answer}" for question, answer in says]
    options = ["--vocab-size=290", f"--output={tmp_path / 'other'}", "--chat-template=chatml"]
    command.main([write(tmp_path / "text", text), *options])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        made = [(tmp_path / folder / name).read_bytes() for folder in ("made", "other")]
        assert made[0] == made[1]


def test_a_bad_document_is_named_or_left_out(tmp_path, capsys):
    file = tmp_path / "text.jsonl"
    good = json.dumps({"text": TEXTS[0]}).encode()
    file.write_bytes(good + b'\n{"text": "ab\xff"}\n' + good + b"\n")
    argv = [str(file), "--vocab-size", "258", "--output", str(tmp_path / "made")]
    with pytest.raises(UserError) as caught:
        command.main(argv)
    message = str(caught.value)
    assert message.startswith(f"PATH: {file}: line 2: not UTF-8: 0xff, invalid start byte at byte")
    assert "--on-bad-document skip" in message
    assert not (tmp_path / "made/tokenizer.json").exists()
    command.main([*argv, "--on-bad-document", "skip"])
    assert "Skipped 1 bad document (1 not UTF-8)" in capsys.readouterr().out


REFUSED = {
    "too small": (["--vocab-size", "257"], "256 bytes and 2 special tokens need 258"),
    "too small with marks": (
        ["--vocab-size", "259", "--chat-template", "chatml"],
        "4 special tokens need 260",
    ),
    "a word": (["--special-token", "ing"], "'ing' could be a word of a text"),
    "space": (["--special-token", " "], "' ' could be a word of a text"),
    "twice": (["--special-token", "<|end_of_text|>"], "is there twice"),
    "empty sample": (["--sample", "0.000001%"], "--sample: none of the"),
    "output is a file": (["--output", "/dev/null/x"], "--output: can't create the folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    options, message = REFUSED[case]
    made = tmp_path / "made"
    with pytest.raises(UserError, match=re.escape(message)):
        command.main(
            [write(tmp_path / "text"), "--vocab-size", "300", "--output", str(made), *options]
        )
    assert not list(made.glob("*"))


@pytest.mark.parametrize("text", ["", None])
def test_a_corpus_without_text_is_refused(tmp_path, text):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text("" if text is None else '{"text": ""}\n' * 3)
    with pytest.raises(UserError, match="holds no text: " + ("no" if text is None else "all 3")):
        train_tokenizer(Corpus(str(folder), "PATH"), tmp_path / "made", 300)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("text", ["0%", "100%", "5", "2 XB", "-1%", "0MB", "1e3MB"])
def test_a_sample_that_is_no_size(text, capsys):
    with pytest.raises(SystemExit):
        command.parser().parse_args(["x", "--vocab-size=300", "--output=y", f"--sample={text}"])
    assert "must be" in capsys.readouterr().err


def test_a_tokenizer_is_replaced_only_on_demand(tmp_path):
    argv = [write(tmp_path / "text"), "--output", str(tmp_path / "made"), "--vocab-size"]
    command.main([*argv, "270"])
    with pytest.raises(UserError, match="has a tokenizer, which token files and checkpoints may"):
        command.main([*argv, "280"])
    assert build_tokenizer(str(tmp_path / "made")).vocab_size == 270
    command.main([*argv, "280", "--force"])
    assert build_tokenizer(str(tmp_path / "made")).vocab_size == 280


SHAKESPEARE = "First Citizen:\nBefore we proceed any further, hear me speak.\r\n\tä 日🚀 e\u0301\n"


@pytest.mark.parametrize("ends", [False, True])
def test_characters_have_the_ids_of_nanogpt(tmp_path, capsys, ends):
    """`prepare.py` numbers sorted(set(text)) from 0."""
    text = SHAKESPEARE * 3000  # longer than a piece
    (tmp_path / "input.txt").write_bytes(text.encode())
    argv = [str(tmp_path / "input.txt"), "--characters", "--output", str(tmp_path / "made")]
    assert command.main(argv + ["--end-of-text"] * ends) == 0
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    expected = [stoi[c] for c in text]
    tokenizer = build_tokenizer(str(tmp_path / "made"))
    assert tokenizer.vocab_size == len(stoi) + ends
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, len(stoi) if ends else None)
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_document("e")[1:] == [len(stoi)] * ends
    assert tokenizer.decode(expected) == text
    lengths = tokenizer.byte_lengths()
    assert lengths[expected].sum() == len(text.encode())
    assert f"{len(stoi) + ends:,} entries in" in capsys.readouterr().out
    with pytest.raises(UserError, match="can't encode a text"):
        tokenizer.encode("Z")


@pytest.mark.parametrize(
    "extra", [[], ["--characters", "--vocab-size", "300"], ["--end-of-text", "--vocab-size", "300"]]
)
def test_a_size_or_characters(tmp_path, capsys, extra):
    with pytest.raises(SystemExit):
        command.main(["demo", "--output", str(tmp_path / "made"), *extra])
    assert "--characters" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
