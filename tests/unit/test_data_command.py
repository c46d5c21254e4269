"""`torchtitan data`: the rows it prints against ids of the library itself."""

import json
import re

import pytest
from tokenizers import Tokenizer as Backend

from tests.chats import CHATML, say, write_chats, write_tokenizer
from torchtitan.commands import data as command
from torchtitan.commands import tokenize
from torchtitan.utils.errors import UserError

TEXTS = ["one two", "naïve 日本語 🚀", "<b>bold</b>\n" * 30]


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def run(capsys, *argv):
    assert command.main(list(map(str, argv))) == 0
    return capsys.readouterr().out


def spans(text):
    """First and last place, document, state and ids of each span of the rows; and its text."""
    pattern = r"\[(\d+)-(\d+), document (\d+), ([a-z ]+)\]([^\n]*)\n(.*?)\n(?=\[\d+-|\nRow|\Z)"
    return re.findall(pattern, text, re.S)


def ids(folder, text):
    backend = Backend.from_file(f"{folder}/tokenizer.json")
    return backend.encode(text, add_special_tokens=False).ids


def test_rows_are_documents_with_their_ends(lines, capsys):
    text = run(capsys, lines, "--rows", 1, "--training.seq_len=900", "--training.steps=1")
    assert re.search(r"^data +3 documents, \d+ bytes +\d+ ", text, re.M)
    begin, *documents, cut = spans(text)
    assert (*begin[:4], begin[5]) == ("0", "0", "1", "read only", "<|begin_of_text|>")
    assert len(documents) > 1
    place = 1
    for number, (first, last, document, state, printed, body) in enumerate(documents, 1):
        which = body.removeprefix("<|begin_of_text|>").removesuffix("<|end_of_text|>")
        assert which in TEXTS
        expected = [0, *ids("tests/assets/tokenizer", which), 1][number == 1 :]
        assert (int(first), int(last) + 1) == (place, place + len(expected))
        assert (document, state) == (str(number), "predicted")
        if len(expected) > 10:
            expected[8:-1] = ["..."]
        assert printed == f" {', '.join(map(str, expected))}"
        place = int(last) + 1
    assert (int(cut[0]), int(cut[1])) == (place, 900)


def test_bytes_per_token_and_bad_documents(lines, capsys):
    with lines.open("a") as file:
        file.write('{"text": null}\n')
    text = run(capsys, lines, "--training.on_bad_document=skip", "--training.seq_len=64")
    sizes = sum(len(text.encode()) for text in TEXTS)
    tokens = sum(len(ids("tests/assets/tokenizer", text)) + 2 for text in TEXTS)
    measured = float(re.search(r"^data .* (\S+)$", text, re.M)[1])
    assert measured == pytest.approx(sizes / tokens, rel=0.01)  # over whole epochs, but for one
    assert "Skipped: 1 bad document (1 null text)" in text


def test_only_the_assistant_is_predicted(tmp_path, capsys):
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    chats = write_chats(tmp_path / "a.jsonl", [say("2 + 2?", "4", "And 3 + 3?", "6")])
    argv = [f"--model.hf_assets_path={folder}", "--training.messages_column=messages"]
    argv += ["--training.seq_len=127", "--training.packing=best_fit"]
    shown = spans(run(capsys, chats, *argv, "--rows", 1))
    predicted = [span[5] for span in shown if span[3] == "predicted"]
    assert predicted[:2] == ["4<|im_end|>", "6<|im_end|>"]
    assert (
        shown[0][5]
        == "<|begin_of_text|><|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert {span[2] for span in shown[:5]} == {"1"}
    assert shown[-1][3:5] == ("padding", " 1, 1, 1, 1, 1")


def test_token_files_and_a_mixture(lines, tmp_path, capsys):
    argv = ["--input", str(lines), "--output", str(tmp_path / "tokens"), "--workers", "1"]
    assert tokenize.main(argv) == 0
    (tmp_path / "my.toml").write_text(
        f"""
[training]
seq_len = 32
[[training.sources]]
name = "text"
dataset_path = "{lines}"
[[training.sources]]
name = "tokens"
dataset_path = "{tmp_path}/tokens"
weight = 3
"""
    )
    capsys.readouterr()
    text = run(capsys, tmp_path / "my.toml", "--training.steps=10", "--rows", 80)
    assert re.search(r"^text +3 documents", text, re.M)
    assert re.search(r"^tokens +1 token file, \d+ tokens +60 ", text, re.M)
    assert text.count(", of tokens: 32 tokens") == 60
    assert text.count(", of text: 32 tokens") == 20


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["nowhere"], "training.dataset_path: no file matches 'nowhere'"),
        (
            ["demo", "--model.hf_assets_path=tests"],
            "model.hf_assets_path: tests holds no tokenizer",
        ),
        (["demo", "--training.messages_column=m"], "training.messages_column: "),
    ],
)
def test_mistakes_are_explained(argv, error):
    with pytest.raises(UserError) as raised:
        command.main(argv)
    assert error in str(raised.value)
