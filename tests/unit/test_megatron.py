"""Megatron's pairs of `.bin` and `.idx` as token files."""

import logging
import os

import numpy as np
import pytest

from tests.corpora import TEXTS, assert_same_rows, loader, take, write_json_lines, write_megatron
from torchtitan.commands import tokenize
from torchtitan.utils.errors import UserError


@pytest.mark.parametrize(
    ("dtype", "code", "sentences"), [(np.uint16, 8, 1), (np.int32, 4, 2), (np.int64, 5, 1)]
)
@pytest.mark.parametrize("named", ["folder", "bin", "idx", "above"])
def test_rows_of_megatron_are_those_of_token_files(tmp_path, dtype, code, sentences, named):
    lines = write_json_lines(tmp_path / "x.jsonl")
    tokenize.main(["--input", str(lines), "--output", str(tmp_path / "tokens"), "--workers", "1"])
    folder = tmp_path / "corpora/megatron"
    folder.mkdir(parents=True)
    file = write_megatron(folder, dtype=dtype, code=code, sentences=sentences)
    path = {
        "folder": folder,
        "bin": file,
        "idx": file.with_suffix(".idx"),
        "above": tmp_path / "corpora",
    }[named]
    assert_same_rows(path, tmp_path / "tokens")


def changed(place, content, suffix=".idx"):
    """Changes bytes of a pair; None cuts the file there."""

    def change(file):
        path = file.with_suffix(suffix)
        data = bytearray(path.read_bytes())
        if content is None:
            del data[place:]
        else:
            data[place : place + len(content)] = content
        path.write_bytes(data)

    return change


N = len(TEXTS)
BAD_PAIRS = {
    "another file": (changed(0, b"NOTANIDX"), "corpus.idx is no index of a Megatron token file"),
    "the older kind": (changed(0, b"TNTIDX\0\0"), "older kind; .*--dataset-impl mmap"),
    "another version": (changed(9, b"\2"), "has version 2; only version 1"),
    "floats": (changed(17, b"\7"), "values are of type 7 .float32., which are no token ids"),
    "a header that is cut": (changed(20, None), "no index of a Megatron token file .cut off"),
    "a cut index": (changed(-3, None), r"corpus.idx has .* bytes instead of the"),
    "modes": (lambda f: f.with_suffix(".idx").open("ab").write(bytes(N)), "multimodal"),
    "a length": (changed(34 + 4, b"\x01"), "sequence 2 doesn't begin where"),
    "a place": (changed(34 + 4 * N + 8 * 5, b"\x01"), "sequence 5 doesn't begin where"),
    "a boundary": (
        changed(34 + 12 * N + 8 * 3, b"\xff"),
        "boundaries of its documents aren't in order",
    ),
    "cut ids": (
        changed(-2, None, ".bin"),
        "corpus.bin has .* bytes instead of the .* of corpus.idx",
    ),
    "an id beyond the vocabulary": (
        changed(0, b"\xff\xff", ".bin"),
        "has id 65535 at token 0, but the tokenizer",
    ),
    "a pipe": (
        lambda f: (f.with_suffix(".idx").unlink(), os.mkfifo(f.with_suffix(".idx"))),
        "not a regular file",
    ),
}


def test_a_negative_id_is_no_flag(tmp_path):
    """Of 32 bits, whose highest one flags ids in this project's files."""
    file = write_megatron(tmp_path, dtype=np.int32, code=4)
    changed(0, np.int32(-(2**31) + 5).tobytes(), ".bin")(file)
    with pytest.raises(UserError, match="has id -2147483643 at token 0, but the tokenizer"):
        take(loader(file), 1)


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_bad_pairs_of_megatron_are_named(tmp_path, case):
    change, text = BAD_PAIRS[case]
    file = write_megatron(tmp_path)
    change(file)
    with pytest.raises(UserError, match=rf"training.dataset_path: .*{text}"):
        take(loader(tmp_path), 200)


def test_megatron_says_what_cannot_be_checked(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    with caplog.at_level("INFO", "torchtitan"):
        loader(write_megatron(tmp_path).parent)
    assert "1 token file of a tokenizer that can't be checked" in caplog.text
