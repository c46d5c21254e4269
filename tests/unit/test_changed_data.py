"""A resume on data that has changed stops and names the file, or goes on with a warning."""

import dataclasses
import json
import logging
import os

import numpy as np
import pytest
import torch

from tests.positions import saved
from torchtitan.config.sections.data import DataLoader, Source
from torchtitan.data.encode.tokenizer import LONG, build_tokenizer
from torchtitan.data.loader import build_loader
from torchtitan.data.read.contents import (
    Contents,
    DataFile,
    base_folder,
    changes,
    parse_lists,
    render_lists,
)
from torchtitan.data.spec import DataSpec
from torchtitan.data.tokens.token_files import write_token_file
from torchtitan.utils.errors import UserError

TOKENIZER = build_tokenizer("./tests/assets/tokenizer")


def loader(*paths, on_changed="stop", section="training"):
    names = ["data"] if len(paths) == 1 else [f"s{i}" for i in range(len(paths))]
    return build_loader(
        DataSpec(
            sources=[
                Source(name=name, dataset_path=str(path))
                for name, path in zip(names, paths, strict=True)
            ],
            tokenizer=TOKENIZER,
            seq_len=16,
            rows_per_step=4,
            seed=1,
            infinite=True,
            options=DataLoader(retries=0),
            on_changed_data=on_changed,
            section=section,
        )
    )


def steps(reading, count=2):
    """The rows of some steps, and the position after them with the list of files, as a checkpoint
    has them.
    """
    iterator = iter(reading)
    found = [next(iterator) for _ in range(count)]
    reading.close()
    return torch.cat([batch.tokens for batch in found]), (
        saved(reading, found[-1].position),
        reading.record.lists(),
    )


def resume(reading, checkpoint):
    state, lists = checkpoint
    reading.seek(state, lambda: parse_lists(lists))
    return steps(reading)[0]


def write_lines(path, seed, count=40):
    rows = [
        " ".join(f"{(seed * 7919 + i * 31 + j * 17) % 9973:04d}" for j in range(12))
        for i in range(count)
    ]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def write_tokens(path, seed, count):
    write_token_file(path, [(np.arange(count) * 7 + seed * 13) % 500 + 10], TOKENIZER, {})


def text(folder):
    write_lines(folder / "a.jsonl", 1)
    write_lines(folder / "b.jsonl", 2)


def tokens(folder):
    write_tokens(folder / "a.bin", 1, 700)
    write_tokens(folder / "b.bin", 2, 300)


def swap(folder):
    (folder / "a.jsonl").rename(folder / "c.jsonl")
    (folder / "b.jsonl").rename(folder / "a.jsonl")
    (folder / "c.jsonl").rename(folder / "b.jsonl")


def rename(folder):
    for ending in ("bin", "json"):
        (folder / f"a.{ending}").rename(folder / f"z.{ending}")


def move_tokens(folder):
    write_tokens(folder / "a.bin", 1, 600)
    write_tokens(folder / "b.bin", 2, 400)


def in_place(folder):
    """Tokens that another program replaced, under the description that says nothing of it."""
    (folder / "b.bin").write_bytes(np.arange(300, dtype="uint16").tobytes())


CHANGES = {
    "other contents": (
        text,
        lambda d: write_lines(d / "b.jsonl", 9),
        "b.jsonl has other contents of the same size",
    ),
    "two files swapped": (
        text,
        swap,
        "a.jsonl has the contents that b.jsonl had, b.jsonl has the contents that a",
    ),
    "token file renamed": (
        tokens,
        rename,
        "a.bin is now called z.bin, and files are read in the order of their names",
    ),
    "tokens replaced": (
        tokens,
        lambda d: write_tokens(d / "a.bin", 5, 700),
        "a.bin has other contents of the same",
    ),
    "tokens replaced in place": (tokens, in_place, "b.bin has other contents of the same size"),
    "tokens moved": (
        tokens,
        move_tokens,
        "a.bin has 1,200 bytes instead of 1,400, b.bin has 800 bytes instead of 600",
    ),
    "lines appended": (
        text,
        lambda d: write_lines(d / "b.jsonl", 2, 41),
        "b.jsonl has 2,952 bytes instead of 2,880",
    ),
    "file added": (text, lambda d: write_lines(d / "c.jsonl", 3), "c.jsonl is new"),
    "file deleted": (text, lambda d: (d / "b.jsonl").unlink(), "b.jsonl is missing"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_stops_the_resume_and_is_named(tmp_path, case, caplog, monkeypatch):
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    make, change, words = CHANGES[case]
    make(tmp_path)
    _, checkpoint = steps(loader(tmp_path))
    change(tmp_path)
    with pytest.raises(UserError) as error:
        resume(loader(tmp_path), checkpoint)
    message = str(error.value)
    assert message.startswith(
        f"training.dataset_path: the data has changed since the checkpoint was saved: {words}"
    ), message
    assert 'training.on_changed_data = "continue"' in message
    assert "exclude_from_loading" in message
    found = resume(loader(tmp_path, on_changed="continue"), checkpoint)
    assert found.shape == (8, 16)
    assert f"{words}" in caplog.text
    assert "Continuing with it as it is" in caplog.text


def renamed_in_order(folder):
    (folder / "b.jsonl").rename(folder / "c.jsonl")


def touched(folder):
    os.utime(folder / "a.jsonl", (1, 1))


def rewritten(folder):
    content = (folder / "a.jsonl").read_bytes()
    (folder / "a.jsonl").unlink()
    (folder / "a.jsonl").write_bytes(content)


@pytest.mark.parametrize("change", [renamed_in_order, touched, rewritten])
def test_what_changes_no_row_stops_nothing(tmp_path, change):
    text(tmp_path)
    _, checkpoint = steps(loader(tmp_path))
    expected = resume(loader(tmp_path), checkpoint)
    change(tmp_path)
    assert torch.equal(resume(loader(tmp_path), checkpoint), expected)


def test_a_moved_folder_is_the_same_data(tmp_path):
    (tmp_path / "old/part").mkdir(parents=True)
    text(tmp_path / "old/part")
    _, checkpoint = steps(loader(tmp_path / "old"))
    expected = resume(loader(tmp_path / "old"), checkpoint)
    (tmp_path / "old").rename(tmp_path / "new")
    assert torch.equal(resume(loader(tmp_path / "new/**/*.jsonl"), checkpoint), expected)


def test_a_position_in_data_without_a_list_of_files_is_compared(tmp_path):
    text(tmp_path)
    _, (state, _) = steps(loader(tmp_path))
    position = state.sources["data"].model_copy(update={"contents": "other"})
    other = state.model_copy(update={"sources": {"data": position}})
    with pytest.raises(
        UserError, match=r"the data has changed .*: it was other, and is 2 files with hash"
    ):
        resume(loader(tmp_path), (other, b"{}"))


def test_a_hash_noted_down_later_changes_nothing(tmp_path):
    """Token files of earlier versions and of other programs have none in their description."""
    tokens(tmp_path)
    about = tmp_path / "a.json"
    content = json.loads(about.read_text())
    about.write_text(json.dumps({key: value for key, value in content.items() if key != "hash"}))
    _, checkpoint = steps(loader(tmp_path))
    expected = resume(loader(tmp_path), checkpoint)
    about.write_text(json.dumps(content))
    assert torch.equal(resume(loader(tmp_path), checkpoint), expected)
    about.write_text(json.dumps(content | {"hash": "00"}))
    _, checkpoint = steps(loader(tmp_path))
    about.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"a\.bin has other contents of the same size"):
        resume(loader(tmp_path), checkpoint)


def test_each_source_of_a_mixture_is_compared(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text(tmp_path / name)
    _, checkpoint = steps(loader(tmp_path / "a", tmp_path / "b"))
    write_lines(tmp_path / "b/a.jsonl", 7)
    with pytest.raises(
        UserError, match=r"training\.sources\.s1\.dataset_path: .* a\.jsonl has other contents"
    ):
        resume(loader(tmp_path / "a", tmp_path / "b"), checkpoint)


def test_a_source_that_pauses_is_compared_when_it_returns(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text(tmp_path / name)
    _, (state, lists) = steps(loader(tmp_path / "a", tmp_path / "b"))
    between = loader(tmp_path / "a")  # by another name, so both sources of the checkpoint pause
    between.seek(state, lambda: parse_lists(lists))
    _, checkpoint = steps(between)
    write_lines(tmp_path / "b/b.jsonl", 7)
    with pytest.raises(
        UserError, match=r"training\.sources\.s1\.dataset_path: .* b\.jsonl has other contents"
    ):
        resume(loader(tmp_path / "a", tmp_path / "b"), checkpoint)


def test_validation_data_is_compared(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    for name in ("train", "held_out"):
        (tmp_path / name).mkdir()
        text(tmp_path / name)

    def run(held_out="held_out", **options):
        reading = loader(tmp_path / "train", **options)
        reading.record.add_validation_set(loader(tmp_path / held_out, section="validation").record)
        return reading

    _, checkpoint = steps(run())
    expected = resume(run(), checkpoint)
    assert "validation: training reads this data, too" in caplog.text
    assert torch.equal(resume(run("train"), checkpoint), expected), (
        "another set, by the configuration"
    )
    write_lines(tmp_path / "held_out/b.jsonl", 7)
    with pytest.raises(
        UserError, match=r"validation\.dataset_path: the data .*: b\.jsonl has other contents"
    ):
        resume(run(), checkpoint)
    caplog.clear()
    assert torch.equal(resume(run(on_changed="continue"), checkpoint), expected)
    assert "training reads" not in caplog.text


def long_text(folder):
    (folder / "a.txt").write_text("some words " * (LONG // 5))


def short_text(folder):
    (folder / "a.txt").write_text("other words")


@pytest.mark.parametrize(
    ("before", "after"), [(long_text, short_text), (text, tokens), (tokens, text)]
)
def test_continuing_within_a_document_that_is_gone(tmp_path, before, after):
    """A lane begins its document anew; data of another kind begins at its beginning."""
    before(tmp_path)
    _, checkpoint = steps(loader(tmp_path), 40)
    for file in tmp_path.iterdir():
        file.unlink()
    after(tmp_path)
    beginning = steps(loader(tmp_path))[0]
    assert resume(loader(tmp_path, on_changed="continue"), checkpoint).shape == beginning.shape


def stream(path, on_changed="stop"):
    return build_loader(
        DataSpec(
            sources=[Source(name="data", dataset=str(path))],
            tokenizer=TOKENIZER,
            seq_len=16,
            rows_per_step=4,
            seed=1,
            infinite=True,
            options=DataLoader(retries=0),
            on_changed_data=on_changed,
        )
    )


def test_another_stream_starts_at_its_beginning(tmp_path, caplog, monkeypatch):
    """It isn't data of another kind."""
    monkeypatch.setattr("torchtitan.utils.logging.logger.propagate", True)
    for name, seed in (("a", 1), ("b", 7)):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "x.jsonl", seed)
    _, checkpoint = steps(stream(tmp_path / "a"))
    with pytest.raises(UserError, match=r"it was stream of .*/a, and is stream of .*/b"):
        resume(stream(tmp_path / "b"), checkpoint)
    found = resume(stream(tmp_path / "b", on_changed="continue"), checkpoint)
    assert torch.equal(found, steps(stream(tmp_path / "b"))[0])
    assert "training.sources: data is another stream, " in caplog.text
    assert "another kind" not in caplog.text


def test_lanes_begin_the_document_that_has_the_number_now(tmp_path):
    """Where they stood in the old one means nothing in it."""
    long_text(tmp_path)
    _, (state, lists) = steps(loader(tmp_path), 40)
    (lane,) = state.sources["data"].lanes.values()
    assert lane.offset >= 0
    write_lines(tmp_path / "a.txt", 3)
    reading = loader(tmp_path, on_changed="continue")
    reading.seek(state, lambda: parse_lists(lists))
    (again,) = reading.start.sources["data"].lanes.values()
    assert (again.cursor, again.offset, again.position) == (lane.cursor, -1, 0)
    ids = TOKENIZER.encode_document((tmp_path / "a.txt").read_text())
    assert steps(reading, 1)[0][0].tolist() == ids[:16]


def test_names_that_are_not_utf8_can_be_saved(tmp_path):
    name = os.fsdecode(b"caf\xe9\n.jsonl")
    write_lines(tmp_path / name, 1)
    _, checkpoint = steps(loader(tmp_path))
    write_lines(tmp_path / name, 2)
    with pytest.raises(UserError, match=r"saved: caf\\xe9 \.jsonl has other contents"):
        resume(loader(tmp_path), checkpoint)


def test_many_changes_are_counted():
    files = [DataFile(f"{i}.jsonl", 10, f"{i:x}") for i in range(100_000)]
    contents = Contents.of(files)
    lists = render_lists({"sources": {"data": files}})
    assert len(lists) < 40 * len(files)
    assert parse_lists(lists) == {"sources": {"data": files}}
    others = [file._replace(sample="aa" + file.sample) for file in files]
    assert len(changes(files, others)) == len(files)
    assert Contents.of(others).fingerprint != contents.fingerprint
    assert dataclasses.replace(contents) == contents


BAD_LISTS = {
    "no object": b"[]",
    "no section": b'{"sources": 1}',
    "negative size": b'{"sources": {"data": [["a", -1, "aa"]]}}',
    "fraction": b'{"sources": {"data": [["a", 1.0, "aa"]]}}',
    "no hash": b'{"sources": {"data": [["a", 1]]}}',
    "text as hash": b'{"sources": {"data": [["a", 1, "no hash"]]}}',
    "more values": b'{"sources": {"data": [["a", 1, "aa", "bb", "cc"]]}}',
    "long name": b'{"sources": {"data": [["' + b"a" * 30_000 + b'", 1, "aa"]]}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", BAD_LISTS)
def test_lists_are_read_strictly(case):
    with pytest.raises(ValueError, match="validation error"):
        parse_lists(BAD_LISTS[case])


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("{d}", "{d}"),
        ("{d}/a.jsonl", "{d}"),
        ("{d}/**/*.jsonl", "{d}"),
        ("{d}/x*/y/[ab].txt", "{d}"),
        (["{d}/x/a.jsonl", "{d}/y/b.jsonl"], "{d}"),
    ],
)
def test_names_are_relative_to_what_is_configured(tmp_path, path, base):
    paths = (
        path.format(d=tmp_path)
        if isinstance(path, str)
        else [one.format(d=tmp_path) for one in path]
    )
    assert base_folder(paths) == base.format(d=tmp_path)
