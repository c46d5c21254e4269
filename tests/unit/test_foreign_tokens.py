"""Token files of llm.c and nanoGPT, against the arrays they were written from; folders of formats
that can't be read.
"""

import json
import logging
import os

import numpy as np
import pytest

from tests.data_kinds import TOKENIZER, loader, take
from torchtitan.config import resolve
from torchtitan.data.read.files import find_token_files
from torchtitan.data.tokens.token_files import TokenFiles, write_token_file
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import UserError

IDS = np.random.default_rng(3).integers(2, 2000, 500)
LLMC = {"GPT-2": (20240520, 1, "<u2"), "Llama 3": (20240801, 7, "<u4")}


def llmc(path, ids=IDS, magic=20240520, version=1, dtype="<u2", count=None):
    """As `write_datafile` of llm.c's `data_common.py` does."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    return path


def nanogpt(path, ids=IDS):
    """As its `prepare.py` does."""
    ids.astype(np.uint16).tofile(path)
    return path


def windows(path, width=64):
    files = TokenFiles(find_token_files(str(path), "key"), width, TOKENIZER, "key")
    return [files.window(i).tolist() for i in range(len(files))]


def cut(ids, width=64):
    ids = ids.tolist()
    return [ids[i : i + width + 1] for i in range(0, len(ids) - 1, width)]


@pytest.mark.parametrize("kind", [*LLMC, "nanoGPT"])
def test_ids_are_those_that_were_written(tmp_path, kind, caplog, monkeypatch):
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    caplog.set_level(logging.INFO)
    if kind == "nanoGPT":
        file = nanogpt(tmp_path / "train.bin")
    else:
        magic, version, dtype = LLMC[kind]
        file = llmc(tmp_path / "any name.bin", magic=magic, version=version, dtype=dtype)
    assert windows(file) == cut(IDS)
    assert "1 token file of a tokenizer that can't be checked" in caplog.text
    steps = loader(file)
    batches = take(steps, 3)
    steps.close()
    read = {tuple(row) for tokens, *_ in batches for row in tokens.tolist()}
    assert all(row[0] in IDS for row in read)


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("train.bin", "val.bin"),
        ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"),
        ("fineweb_train_000001.bin", "fineweb_val_000000.bin"),
    ],
)
def test_a_folder_is_read_without_what_is_for_validation(tmp_path, train, val):
    write = nanogpt if train == "train.bin" else llmc
    (tmp_path / "meta.pkl").write_bytes(b"never unpickled")
    (tmp_path / "input.txt").write_text("text")
    write(tmp_path / train)
    write(tmp_path / val, IDS[:100])
    assert windows(tmp_path) == cut(IDS)
    assert windows(tmp_path / val) == cut(IDS[:100])
    (tmp_path / train).unlink()
    assert windows(tmp_path) == cut(IDS[:100]), "it alone is there"
    write_token_file(tmp_path / "val.bin", [IDS], TOKENIZER, {})
    assert (tmp_path / "val.bin") in find_token_files(str(tmp_path), "key"), "described"


REFUSED = {
    "cut off": (lambda d: llmc(d / "a.bin", count=501), "of its 501 ids"),
    "a negative number": (lambda d: llmc(d / "a.bin", count=-1), "ids"),
    "another version": (lambda d: llmc(d / "a.bin", version=2), "is of version 2 of llm.c's"),
    "llm.c's other files": (lambda d: llmc(d / "a.bin", magic=20240522), "no complete description"),
    "a name that says nothing": (lambda d: nanogpt(d / "a.bin"), "of nanoGPT the name train.bin"),
    "an odd size": (lambda d: (d / "train.bin").write_bytes(b"abc"), "an odd number"),
    "uint32": (lambda d: IDS.astype("<u4").tofile(d / "train.bin"), "so they are uint32"),
    "litdata": (lambda d: (d / "chunk-0-0.bin").write_bytes(b"x" * 64), "is a chunk of litdata"),
    "MDS": (
        lambda d: [(d / n).write_text("{}") for n in ("index.json", "shard.00000.mds.zstd")],
        "is MosaicML's MDS",
    ),
    "WebDataset": (lambda d: (d / "0.tar").write_text(""), "0.tar is WebDataset"),
    "TFRecord": (lambda d: (d / "a.tfrecord-00000-of-00001").write_text(""), "is TFRecord"),
    "NumPy": (lambda d: np.save(d / "part-0-00000.npy", IDS), "is NumPy arrays"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("as_folder", [True, False])
def test_config_and_train_refuse_the_same(tmp_path, kind, as_folder):
    make, problem = REFUSED[kind]
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    (name,) = [name for name in os.listdir(folder) if name != "index.json"]
    path = folder if as_folder else folder / name
    flags = ["--training.dataset=x", f"--training.dataset_path={path}"]
    flags.append(f"--job.dump_folder={tmp_path / 'out'}")
    with pytest.raises(UserError) as at_config:
        preflight(resolve(flags, 1).config)
    with pytest.raises(UserError) as at_start:
        loader(path)
    for error in (at_config, at_start):
        assert problem in str(error.value)
        assert "training.dataset_path: " in str(error.value)


def test_ids_beyond_the_vocabulary(tmp_path):
    file = nanogpt(tmp_path / "train.bin", np.full(100, 50256))
    with pytest.raises(UserError, match="has id 50256 at token 0, but the tokenizer has only"):
        windows(file)


def test_a_document_may_still_be_called_index(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps([{"text": "a document"}]))
    loader(tmp_path).close()
