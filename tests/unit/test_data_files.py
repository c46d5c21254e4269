"""Which files a path names, and that only regular files that nobody has changed are read."""

import gzip
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import TOKENIZER, loader
from tests.damaged_models import POINTER
from torchtitan.commands import tokenize
from torchtitan.data.encode.tokenizer import LONG
from torchtitan.data.read import opening
from torchtitan.data.read.documents import LocalDocuments
from torchtitan.data.read.files import Ignored, find_text_files, find_token_files, path_problem
from torchtitan.data.read.opening import DataError, FilePool, FileStamp, open_plain
from torchtitan.data.read.records import read_records
from torchtitan.data.tokens.token_files import write_token_file
from torchtitan.utils.errors import UserError

SENTENCE = "is a pointer of git-lfs, not the file: run `git lfs pull` in its repository"


def texts(seed, count=20):
    return [f"{seed} {i} of words" for i in range(count)]


def write_lines(path, seed=1, count=20):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(seed, count)))
    return path


def read(path, **options):
    documents = LocalDocuments(str(path), "training.dataset_path", **options)
    return [str(documents[i]) for i in range(len(documents))]


def link_nowhere(path):
    path.symlink_to("/nonexistent/a.jsonl")


def link_to_itself(path):
    path.symlink_to(path)


UNREADABLE = {
    "pipe": (os.mkfifo, r"b\.jsonl is not a regular file"),
    "dangling link": (
        link_nowhere,
        r"b\.jsonl is a link to /nonexistent/a\.jsonl, which doesn't exist",
    ),
    "circular link": (link_to_itself, r"b\.jsonl is a link that leads in a circle"),
}


@pytest.mark.parametrize("named", ["", "*", "**/*.jsonl", "b.jsonl"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_one_sentence_at_once(tmp_path, monkeypatch, kind, named):
    """A pipe would block, and pauses between attempts raise here."""
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it was tried again"))
    make, problem = UNREADABLE[kind]
    write_lines(tmp_path / "a.jsonl")
    make(tmp_path / "b.jsonl")
    with pytest.raises(UserError, match=problem) as error:
        loader(tmp_path / named)
    assert str(error.value).startswith("training.dataset_path: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet", "a.arrow", "a.bin"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    """Also where its description was fetched."""
    (tmp_path / name).write_text(POINTER, newline="\r\n" if name == "a.txt" else None)
    if name == "a.bin":
        description = {"dtype": "uint16", "tokens": 9, "tokenizer": TOKENIZER.fingerprint}
        (tmp_path / "a.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=rf"^training.dataset_path: \S+{name} {SENTENCE}$"):
        loader(tmp_path)


@pytest.mark.parametrize("name", ["a.bin", "a.json"])
def test_a_pipe_among_token_files(tmp_path, name):
    write_token_file(tmp_path / "a.bin", [np.arange(10, 100)], TOKENIZER, {})
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=rf"training\.dataset_path: .*{name}.* regular file"):
        loader(tmp_path)


@pytest.mark.parametrize("name", ["pipe.jsonl", "pipe.txt", "pipe.parquet", "pipe.json.gz"])
def test_tokenize_reads_no_pipe(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=rf"--input: .*{name} is not a regular file"):
        tokenize.main(
            ["--input", str(tmp_path), "--output", str(tmp_path / "out"), "--workers", "1"]
        )


def write_parquet(path, seed):
    pq.write_table(pa.table({"text": texts(seed)}), path)


def write_text(path, seed):
    path.write_text("\n".join(texts(seed)))


def write_long_text(path, seed):
    path.write_text(f"{seed}" * (LONG + 1))


def write_tokens(path, seed):
    """Within the same file if there is one, so that it is the one that is open."""
    if path.exists():
        path.write_bytes(np.arange(seed, seed + 90, dtype="uint16").tobytes())
    else:
        write_token_file(path, [np.arange(seed, seed + 90)], TOKENIZER, {})


REWRITTEN = {
    "a.jsonl": write_lines,
    "a.txt": write_text,
    "long.txt": write_long_text,
    "a.bin": write_tokens,
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_file_rewritten_at_equal_size_is_an_error(tmp_path, name):
    write = REWRITTEN[name]
    write(tmp_path / name, 3)
    size = (tmp_path / name).stat().st_size
    steps = loader(tmp_path / name)
    write(tmp_path / name, 4)
    assert (tmp_path / name).stat().st_size == size
    with pytest.raises(
        UserError, match=rf"{name} has changed since the run indexed it; start the run again"
    ):
        next(iter(steps))
    steps.close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet"])
def test_every_reader_compares_the_stamp(tmp_path, name):
    write = {**REWRITTEN, "a.parquet": write_parquet}[name]
    file = tmp_path / name
    write(file, 3)
    stamp = FileStamp.of(file)
    os.utime(file, ns=(stamp.mtime_ns, stamp.mtime_ns + 1))
    with pytest.raises(DataError, match="has changed since"):
        list(read_records(file, "text", stamp=stamp))
    with pytest.raises(DataError, match="has changed since"):
        open_plain(file, stamp=stamp)


def test_a_longer_file_is_no_error_of_decoding(tmp_path):
    """The range of the old text ends within a character of the new one."""
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text("word " * 60)
    steps = loader(tmp_path)
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text("xé" * 3000)
    with pytest.raises(
        UserError, match=r"\.txt has changed since the run indexed it; start the run again"
    ):
        next(iter(steps))
    steps.close()


@pytest.mark.parametrize("pattern", ["", "**", "**/*.jsonl"])
def test_a_file_is_found_once_whatever_links_lead_to_it(tmp_path, caplog, monkeypatch, pattern):
    """A loop was read 41 times, an alias of the folder twice; two loops would be 2^40 folders."""
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    caplog.set_level("INFO")
    (tmp_path / "v1").mkdir()
    write_lines(tmp_path / "v1/a.jsonl")
    write_lines(tmp_path / "b.jsonl", seed=2)
    os.link(tmp_path / "b.jsonl", tmp_path / "hard.jsonl")
    (tmp_path / "latest").symlink_to("v1")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "v1/loop").symlink_to(tmp_path)
    (tmp_path / "v1/0.jsonl").symlink_to("a.jsonl")
    assert find_text_files(str(tmp_path / pattern), "key") == [
        tmp_path / "b.jsonl",
        tmp_path / "hard.jsonl",
        tmp_path / "v1/a.jsonl",
    ]
    assert "key: skipping 4 links to what is read under another name: " in caplog.text
    for name in ("latest", "loop", "v1/loop", "v1/0.jsonl"):
        assert str(tmp_path / name) in caplog.text


def test_links_out_of_the_folder_are_followed_once(tmp_path):
    (tmp_path / "other").mkdir()
    write_lines(tmp_path / "other/x.jsonl")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/b").symlink_to(tmp_path / "other")
    (tmp_path / "data/c").symlink_to(tmp_path / "other")
    (tmp_path / "data/d.jsonl").symlink_to(tmp_path / "other/x.jsonl")
    assert find_text_files(str(tmp_path / "data"), "key") == [tmp_path / "data/b/x.jsonl"]


def test_files_of_other_formats_are_counted_and_named(tmp_path, caplog, monkeypatch):
    """7 of 150 real files were read, and nothing said so."""
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    caplog.set_level("INFO")
    write_lines(tmp_path / "a.jsonl")
    for name in ("README.md", "x.gz", "\x1b[31m.gz", "copyright"):
        (tmp_path / name).write_text("text")
    ignored = Ignored()
    assert find_text_files(str(tmp_path), "key", ignored) == [tmp_path / "a.jsonl"]
    assert len(ignored.files) == 4
    (record,) = caplog.records
    assert record.levelname == "WARNING", "of unknown format are more than are read"
    assert record.getMessage().startswith(
        "key: reading 1 file; ignoring 4 files without documents (2 .gz, 1 .md, 1 without an "
        "ending): ?[31m.gz, README.md, copyright, x.gz; a glob reads those that are text: '*.md'. "
        "Files must be of .jsonl"
    )
    for i in range(5):
        write_lines(tmp_path / f"{i}.jsonl")
    find_text_files(str(tmp_path / "*"), "key")
    assert caplog.records[-1].levelname == "INFO"


def test_code_and_readmes_are_read_where_they_are_named(tmp_path, caplog, monkeypatch):
    """By their ending, in a path or a glob; a folder's are left out, with the way to read them."""
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    caplog.set_level("INFO")
    for name in ("README.md", "a.py", "b.txt", "c.py.gz", "d.pdf", "dataset_infos.json"):
        content = f"text of {name}".encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for pattern, names in {
        "": ["b.txt"],
        "*": ["b.txt"],
        "README*": [],
        "*.md": ["README.md"],
        "README.md": ["README.md"],
        "a.py": ["a.py"],
        "*.py": ["a.py"],
        "**/*.py.gz": ["c.py.gz"],
        "*.p*": [],
        "*.json": [],
    }.items():
        if names:
            assert read(tmp_path / pattern) == [f"text of {name}" for name in names], pattern
        else:
            with pytest.raises(UserError, match="; ignoring "):
                read(tmp_path / pattern)
    left_out = "d.pdf, dataset_infos.json; a glob reads those that are text: '*.md', '*.py'"
    assert left_out in caplog.text
    assert path_problem(str(tmp_path / "a.py")) is None


RUN = ["run.json", "events.jsonl", "metrics.jsonl", "config.toml", "logs/rank_0.jsonl"]
WRITTEN = {
    "run": RUN,
    "run that has just begun": [".lock", "logs/rank_0.jsonl"],
    "run without a record": ["metrics.jsonl", "config.toml", "samples.jsonl"],
    "checkpoint": ["manifest.json", "tensors.json", "__0.json", "data_files.json"],
    "checkpoint, cut off": [".incomplete", "__0.json", "__0_0.distcp"],
    "model": ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json"],
    "model in shards": ["config.json", "pytorch_model.bin.index.json", "README.md"],
    "tokenizer": ["tokenizer.json", "tokenizer_config.json", "merges.txt", "vocab.json"],
}
"""Names in folders that are no data."""


def make_files(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "no document"}')


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("pattern", ["", "**", "**/*.json*", "[dr]*/**/*.json*"])
def test_folders_that_runs_write_are_no_data(tmp_path, monkeypatch, caplog, kind, pattern):
    """The second start read the checkpoint's `__0.json` as a document."""
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    write_lines(tmp_path / "docs/a.jsonl")
    make_files(Path("runs/one"), WRITTEN[kind])
    (tmp_path / "named").symlink_to("runs/one")
    for path in (pattern or ".", str(tmp_path / pattern)):
        caplog.clear()
        ignored = Ignored()
        (file,) = find_text_files(path, "key", ignored)
        assert (file.parent.name, file.name) == ("docs", "a.jsonl")
        (line,) = [text for text in caplog.messages if "leaving out" in text]
        (left_out,) = ignored.outputs
        assert left_out.absolute() in (tmp_path / "runs/one", tmp_path / "named")
        assert line == f"key: leaving out {left_out} ({ignored.outputs[left_out]}): never data"
        assert kind.split()[0].strip(",") in ignored.outputs[left_out]


def test_a_run_in_the_folder_of_the_data_itself(tmp_path, monkeypatch):
    """`job.dump_folder = "."`: its files are left out, and no others."""
    make_files(tmp_path, [*RUN, "run-20260101-010203.json", "checkpoint/other.json"])
    make_files(tmp_path, ["more/logs/a.jsonl", "text.json", "tokenizer/words.txt"])
    found = find_text_files(str(tmp_path), "key")
    names = [str(file.relative_to(tmp_path)) for file in found]
    assert names == ["more/logs/a.jsonl", "text.json", "tokenizer/words.txt"]
    assert find_text_files(str(tmp_path / "metrics.jsonl"), "key"), "named by itself"
    (tmp_path / "text.json").unlink()
    with pytest.raises(UserError, match=r"no file matches .*metrics\.jsonl \(run\).* is no data"):
        find_text_files(str(tmp_path / "*.json*"), "key")


@pytest.mark.parametrize(
    "names",
    [
        ["run.json", "walk.json"],
        ["manifest.json", "index.json"],
        ["config.json", "a.json"],
        ["events.jsonl", "samples.jsonl"],
        ["logs/a.jsonl", "wandb/a.jsonl"],
    ],
)
def test_a_name_alone_makes_no_run(tmp_path, names):
    make_files(tmp_path / "data", names)
    found = find_text_files(str(tmp_path), "key")
    assert [str(file.relative_to(tmp_path / "data")) for file in found] == sorted(names)


def test_a_cache_beside_the_data_is_no_data(tmp_path):
    file = write_lines(tmp_path / "a.jsonl")
    for cache in (tmp_path / "cache", tmp_path):
        for _ in range(2):
            documents = LocalDocuments(str(tmp_path), "key", cache_folder=str(cache))
            assert [index.path for index in documents.indexes] == [str(file)]
    assert find_text_files(f"{tmp_path}/**/*", "key") == [file]


@pytest.fixture
def tokens(tmp_path):
    """Makes a folder of token files."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        write_token_file(folder / "a.bin", [np.arange(10, 90)], TOKENIZER, {})
        return folder

    return make


@pytest.mark.parametrize("name", ["[x]", "a*b?", "tokens.bin"])
def test_names_of_token_folders_are_no_patterns(tokens, name):
    folder = tokens(name)
    assert find_token_files(str(folder), "key") == [folder / "a.bin"]


def test_token_files_at_any_depth(tokens, tmp_path, caplog, monkeypatch):
    """A folder of text isn't one of token files because a model lies somewhere below it."""
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    inner = tokens("tokens/part-0")
    (tmp_path / "tokens/pytorch_model.bin.d").mkdir()
    (tmp_path / "tokens/pytorch_model.bin.d/model.bin").write_bytes(b"weights")
    (tmp_path / "tokens/tokens-report.json").write_text("{}")
    assert find_token_files(str(tmp_path / "tokens"), "key") == [inner / "a.bin"]
    assert "beside" not in caplog.text
    write_lines(tmp_path / "tokens/more.jsonl")
    assert find_token_files(str(tmp_path / "tokens"), "key") == [inner / "a.bin"]
    assert "reading 1 token file of" in caplog.text
    assert "and not what lies beside: more.jsonl" in caplog.text
    (inner / "a.bin").unlink()
    assert find_token_files(str(tmp_path / "tokens"), "key") == []


def test_files_are_closed_when_modules_are_gone(tmp_path, monkeypatch):
    """As at the exit of the interpreter."""
    path = write_lines(tmp_path / "a.jsonl")
    pool = FilePool()
    pool.read(str(path), 0, 1)
    ((handle, _),) = pool._open.values()
    with monkeypatch.context() as patches:
        patches.setattr(opening, "os", None)
        pool.__del__()
    pool._open.clear()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_padding_between_streams_of_xz_is_legal(tmp_path):
    """As `xz --robot` and tape archives write it: lzma.open lost what followed, or failed."""
    parts = [b"one\n" * 50_000, b"two\n", b""]
    streams = [lzma.compress(part) for part in parts]
    for name, content in {
        "padded": (b"\0" * 4).join(streams),
        "at the end": streams[0] + streams[1] + b"\0" * 4096,
        "much": (b"\0" * (2**20 + 4)).join(streams),
        "none": b"".join(streams),
    }.items():
        file = tmp_path / f"{name}.txt.xz"
        file.write_bytes(content)
        with open_plain(file) as opened:
            assert opened.read() == b"".join(parts), name
        file.write_bytes(content.rstrip(b"\0")[:-5])
        with pytest.raises((EOFError, lzma.LZMAError)), open_plain(file) as opened:
            opened.read()
