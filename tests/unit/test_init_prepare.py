"""`torchtitan init --prepare`: it makes what its file names, as the printed commands would."""

import json
import shlex
from pathlib import Path

import pytest

from tests.init_runs import H100, SMALL
from torchtitan.commands import init, tokenize, tokenizer
from torchtitan.data.read.corpus import Corpus
from torchtitan.tools.launch import ask
from torchtitan.utils.errors import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("init_folder", "one_core")

OWN = ["--data=texts", "--tokens=1M", "--seq-len=64", *H100, "--training.global_batch_size=2"]
DEBUG = [SMALL[0], *OWN]
MADE = ("tokenizer", "tokens", "tokens-held-out")


@pytest.fixture
def one_core(monkeypatch):
    """Documents are encoded in this process."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


@pytest.fixture
def texts():
    """60 documents, of which 12 are there twice."""
    Path("texts").mkdir()
    documents = [f"Document {i} of a few words, and {i * i} more. " * 9 for i in range(60)]
    for i, text in enumerate(documents[:40]):
        Path(f"texts/{i}.txt").write_text(text)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents[28:])
    Path("texts/more.jsonl").write_text(lines)


def next_commands(said: str) -> list[list[str]]:
    lines = said.partition("\nNext:\n")[2].splitlines()
    return [shlex.split(line, comments=True)[:2] for line in lines]


def contents(folder: str) -> dict[str, bytes]:
    files = (path for name in MADE for path in Path(folder, name).iterdir())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_it_makes_what_the_commands_make(texts, capsys, monkeypatch):
    """Byte for byte; and a second time, nothing is read or written again."""
    argv = ["a", "--model=llama3/30M", *OWN, "--prepare"]
    assert init.main(argv) == 0
    said = capsys.readouterr().out
    assert next_commands(said) == [["torchtitan", "train"]]
    assert "--training.dataset_path" not in said, "the file names it"
    assert "Dropped 12 exact duplicates" in said
    corpus = str(Path("texts").absolute())
    tokenizer.main([corpus, "--vocab-size=8192", "--output=b/tokenizer"])
    words = ["--input", corpus, "--output=b/tokens", "--tokenizer=b/tokenizer"]
    tokenize.main([*words, "--drop-duplicates", "--held-out=20%"])
    made = contents("a")
    assert made == contents("b")
    kept, held_out = (json.loads(made[f"{name}/tokens-report.json"]) for name in MADE[1:])
    assert kept["documents"] + held_out["documents"] == 60
    assert held_out["documents"] > 0

    def read(*_):
        pytest.fail("the corpus is read again")

    monkeypatch.setattr(Corpus, "items", read)
    before = {path: path.stat().st_mtime_ns for path in Path("a").rglob("tokens-0*")}
    assert init.main([*argv, "--force"]) == 0
    assert "1 part already done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path("a").rglob("tokens-0*")} == before
    assert contents("a") == made


def test_a_failure_leaves_the_file_and_the_commands(texts, capsys):
    Path("texts/bad.jsonl").write_text('{"text": "whole"}\n{"text": 3}\n')
    with pytest.raises(UserError, match=r"torchtitan tokenize: --input: .*bad.jsonl: line 2"):
        init.main(["a", *DEBUG, "--prepare"])
    assert Path("a/train.toml").is_file()
    left = [["torchtitan", "tokenize"], ["torchtitan", "train"]]
    assert next_commands(capsys.readouterr().out) == left


def test_an_interruption_leaves_the_file_and_the_commands(texts, capsys, monkeypatch):
    """The tokenizer is made, and the tokens are interrupted."""

    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenize, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        init.main(["a", "--model=llama3/30M", *OWN, "--prepare"])
    assert Path("a/train.toml").is_file()
    assert Path("a/tokenizer/tokenizer.json").is_file()
    left = [["torchtitan", "tokenize"], ["torchtitan", "train"]]
    assert next_commands(capsys.readouterr().out) == left


def test_nothing_is_prepared_unasked(texts, capsys):
    """A script's `--yes` must not read terabytes."""
    init.main(["a", *DEBUG, "--yes"])
    assert [path.name for path in Path("a").iterdir()] == ["train.toml"]
    left = [["torchtitan", "tokenize"], ["torchtitan", "train"]]
    assert next_commands(capsys.readouterr().out) == left


@pytest.mark.parametrize("answer", ["", "n"])
def test_a_terminal_is_asked(texts, capsys, monkeypatch, answer):
    answers = iter(["maybe", answer])
    monkeypatch.setattr(ask, "_read", lambda prompt: next(answers))
    monkeypatch.setattr(ask.Asker, "choose", lambda *_: 1)
    monkeypatch.setattr(init, "Asker", lambda **_: ask.Asker(interactive=True, accept=False))
    init.main(["a", *DEBUG])
    said = capsys.readouterr()
    size = sum(path.stat().st_size for path in Path("texts").iterdir())
    assert f"which read {size / 1000:.1f} kB of data" in said.out
    assert "'maybe' is neither yes nor no" in said.err
    assert Path("a/tokens-held-out").exists() == (answer == "")
    assert len(next_commands(said.out)) == (1 if answer == "" else 2)


def test_data_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="--prepare: this machine has no /of/the/cluster"):
        init.main(["a", SMALL[0], "--data=/of/the/cluster", SMALL[2], *H100, "--prepare"])
    assert not Path("a").exists()


def test_a_tokenizer_of_the_hub_is_downloaded(capsys, monkeypatch):
    """By its own program, which a script stands in for."""
    Path("bin").mkdir()
    monkeypatch.setenv("PATH", str(Path("bin").absolute()))
    argv = ["a", "--model=qwen3/0.6B", "--data=c4", "--hours=1", *H100, "--prepare"]
    with pytest.raises(UserError, match="hf download: not found; `pip install"):
        init.main(argv)
    assert next_commands(capsys.readouterr().out) == [["hf", "download"], ["torchtitan", "train"]]
    program = Path("bin/hf")
    program.write_text('#!/bin/sh\necho "$@" > words\nexit ${STATUS:-0}\n')
    program.chmod(0o755)
    init.main([*argv, "--force"])
    words = "download Qwen/Qwen3-0.6B-Base --include tokenizer* --local-dir a/tokenizer\n"
    assert Path("words").read_text() == words
    assert next_commands(capsys.readouterr().out) == [["torchtitan", "train"]]
    monkeypatch.setenv("STATUS", "3")
    with pytest.raises(UserError, match="hf download: failed with status 3"):
        init.main([*argv, "--force"])
