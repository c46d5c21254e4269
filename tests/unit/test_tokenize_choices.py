"""`torchtitan tokenize`: documents held out, whatever the order, the files and interruptions."""

import hashlib
import json
import random
import subprocess
import sys

import numpy as np
import pytest

from torchtitan.commands import tokenize
from torchtitan.commands import tokenizer as tokenizer_command
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.encode.tokenizer_training import train_tokenizer
from torchtitan.data.read.corpus import Corpus
from torchtitan.data.read.files import find_token_files
from torchtitan.utils.errors import UserError

TOKENIZER = build_tokenizer("./tests/assets/tokenizer")
TEXTS = [f"text {i} " + "word " * (i * 37 % 11) for i in range(200)]
"""Some of them occur again in `write`."""
AGAIN = TEXTS[3:60:7]


def write(folder, texts, files=1):
    folder.mkdir(parents=True)
    for i in range(files):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[i::files]]
        (folder / f"{i}.jsonl").write_text("".join(lines))
    return folder


def shuffled(seed):
    texts = TEXTS + AGAIN
    random.Random(seed).shuffle(texts)
    return texts


def run(folder, output, *options, part=40, workers=1):
    argv = ["--input", str(folder), "--output", str(output), "--part", str(part)]
    return tokenize.main([*argv, "--workers", str(workers), *options])


def documents(folder):
    """The texts in a folder of token files, in order."""
    found = []
    for file in find_token_files(str(folder), "key"):
        ids = np.fromfile(file, np.uint16)
        ends = np.flatnonzero(ids == TOKENIZER.eos_id)
        for document in np.split(ids, ends + 1)[:-1]:
            assert document[0] == TOKENIZER.bos_id
            found.append(TOKENIZER.decode(document[1:-1].tolist()))
        assert json.loads(file.with_suffix(".json").read_text())["tokens"] == len(ids)
    return found


def contents(*folders):
    return {str(path): path.read_bytes() for folder in folders for path in sorted(folder.iterdir())}


def held_out(text, share):
    """As documented: by a hash of the text."""
    hash = hashlib.blake2b(text.encode(), digest_size=8).digest()
    drawn = hashlib.blake2b(hash, digest_size=6, person=b"held-out").digest()
    return int.from_bytes(drawn, "little") < share * 2**48


@pytest.mark.parametrize(("seed", "files", "part"), [(0, 1, 40), (1, 5, 1000), (2, 3, 7)])
def test_the_same_documents_are_held_out(tmp_path, seed, files, part, capsys, monkeypatch):
    monkeypatch.setattr("torchtitan.data.tokens.tokenizing._SPOOLED", 64)
    monkeypatch.setattr("torchtitan.data.tokens.tokenizing._BATCH", 300)
    texts = shuffled(seed)
    folder = write(tmp_path / "text", texts, files)
    order = [text for i in range(files) for text in texts[i::files]]
    out = tmp_path / "tokens"
    run(folder, out, "--held-out", "12.5%", part=part)
    apart = tmp_path / "tokens-held-out"
    assert documents(out) == [text for text in order if not held_out(text, 0.125)]
    assert documents(apart) == [text for text in order if held_out(text, 0.125)]
    assert 10 < len(documents(apart)) < 45
    report = json.loads((apart / "tokens-report.json").read_text())
    assert report["documents"] == len(documents(apart))
    assert report["bytes"] == sum(map(len, documents(apart)))
    flags = f"--training.dataset_path {out} --validation.enable --validation.dataset_path {apart}"
    assert flags in capsys.readouterr().out


@pytest.mark.parametrize("name", ["input.txt", "a.jsonl"])
def test_the_end_of_a_single_document_is_held_out(tmp_path, name):
    """With its characters for tokens, as nanoGPT's `prepare.py` writes train.bin and val.bin."""
    text = "".join(f"Line {i} of a play.\n" for i in range(400))
    file = tmp_path / name
    file.write_text(text if name == "input.txt" else json.dumps({"text": text}))
    made, out = str(tmp_path / "made"), tmp_path / "tokens"
    tokenizer_command.main([str(file), "--characters", "--output", made])
    argv = ["--input", str(file), "--output", str(out), "--tokenizer", made, "--workers", "1"]
    for _ in range(2):  # the second finds all of it done
        assert tokenize.main([*argv, "--held-out", "10%"]) == 0
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = [stoi[c] for c in text]
    cut = int(len(text) * 0.9)
    for folder, expected in ((out, ids[:cut]), (tmp_path / "tokens-held-out", ids[cut:])):
        found = np.fromfile(folder / "tokens-00000.bin", np.uint16).tolist()
        assert found == expected


def test_a_larger_share_holds_out_the_same_and_more(tmp_path):
    folder = write(tmp_path / "text", TEXTS)
    run(folder, tmp_path / "few", "--held-out", "5%")
    run(folder, tmp_path / "many", "--held-out", "40%")
    few, many = (set(documents(tmp_path / f"{name}-held-out")) for name in ("few", "many"))
    assert few < many


def test_held_out_parts_are_completed(tmp_path, capsys):
    folder = write(tmp_path / "text", TEXTS)
    out, apart = tmp_path / "tokens", tmp_path / "tokens-held-out"
    run(folder, out, "--held-out", "20%")
    before = contents(out, apart)
    (apart / "tokens-00001.json").unlink()
    (out / "tokens-00003.bin").unlink()
    capsys.readouterr()
    run(folder, out, "--held-out", "20%")
    assert "3 parts already done" in capsys.readouterr().out
    assert contents(out, apart) == before
    for options in ([], ["--held-out", "10%"]):
        with pytest.raises(UserError, match="or with other options than now"):
            run(folder, out, *options)
    assert contents(out, apart) == before


def test_token_files_in_the_folder_of_the_text(tmp_path, capsys):
    """Their descriptions are JSON, but no documents."""
    folder = write(tmp_path / "text", TEXTS)
    out = folder / "tokens"
    run(folder, out, "--held-out", "20%")
    (out / "tokens-00001.json").write_text("[1]")  # damaged, so it is written again
    run(folder, out, "--held-out", "20%")
    assert "4 parts already done" in capsys.readouterr().out
    assert len(documents(out)) + len(documents(folder / "tokens-held-out")) == len(TEXTS)


def test_a_share_that_holds_out_nothing_is_an_error(tmp_path):
    """Before anything is written."""
    folder = write(tmp_path / "text", TEXTS)
    for share, which in (("0.000001%", "none"), ("99.999999%", "each")):
        with pytest.raises(UserError, match=f"^--held-out: {which} of 200 documents is held out, "):
            run(folder, tmp_path / "tokens", "--held-out", share)
    assert list(tmp_path.iterdir()) == [folder]


def test_documents_are_text_or_conversations(capsys):
    columns = ["--text-column=a", "--messages-column=b"]
    with pytest.raises(SystemExit):
        tokenize.parser().parse_args(["--input=x", "--output=y", *columns])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0%", "100%", "0.5", "-1%", "x%"])
def test_a_share_that_is_none(share, capsys):
    with pytest.raises(SystemExit):
        tokenize.parser().parse_args(["--input=x", "--output=y", f"--held-out={share}"])
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../b", "a/b", "", ".hidden", "[ab]", "a b"])
def test_a_name_that_is_no_beginning_of_a_file(name, capsys):
    """Held-out documents of `../b` would replace the others."""
    with pytest.raises(SystemExit):
        tokenize.parser().parse_args(["--input=x", "--output=y", f"--name={name}"])
    assert "--name" in capsys.readouterr().err


@pytest.mark.e2e
def test_workers_do_not_receive_ctrl_c():
    """Else each prints a traceback. This process ends them, so it receives it."""
    script = """
import signal
from functools import partial
from torchtitan.data.tokens.tokenizing import encode_batches

blocked = partial(signal.pthread_sigmask, signal.SIG_BLOCK)
print([signal.SIGINT in found for _, found in encode_batches(iter([(0, [])]), blocked, 2)])
print(signal.SIGINT in blocked([]))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[True]\nFalse\n", done.stderr


def test_a_tokenizer_that_was_trained_again_is_read_again(tmp_path):
    folder = write(tmp_path / "texts", TEXTS)
    made = tmp_path / "tokenizer"
    for words in ("text word", "drow txet"):
        other = write(tmp_path / words, [words])
        train_tokenizer(Corpus(str(other), "PATH"), made, 300)
        output = tmp_path / f"tokens of {words}"
        run(folder, output, "--tokenizer", str(made), part=1000)
        ids = np.fromfile(output / "tokens-00000.bin", np.uint16)
        text = build_tokenizer(str(made)).decode(ids.tolist())
        assert text.replace("<|begin_of_text|>", "").split("<|end_of_text|>")[:-1] == TEXTS
