"""Whatever is wrong with a checkpoint is refused by name, and every rank falls back to the one
before.
"""

import json
import os
import random
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.checkpoints import (
    change,
    index,
    lane,
    manifest,
    on_rank_0,
    outcome,
    rank_file,
    replace,
    replace_index,
    replace_tensors,
    save_steps,
    seal,
    seal_rank,
    small_checkpointer,
    train_state,
)
from torchtitan.checkpoint import backend, resume
from torchtitan.checkpoint.commit import disposable
from torchtitan.checkpoint.format.index import read_rank
from torchtitan.checkpoint.format.manifest import MANIFEST, parse, read_manifest
from torchtitan.checkpoint.hf.export import export_checkpoint
from torchtitan.commands import ckpt
from torchtitan.utils.errors import CheckpointError, DamageError, UserError

DEEP = "[" * 100_000


def raw(content):
    return lambda step: (step / MANIFEST).write_bytes(content)


def changed(**changes):
    return lambda step: change(step, **changes)


def without(key):
    return lambda step: seal(step, {k: v for k, v in manifest(step).items() if k != key})


def state(part, **changes):
    return lambda step: change(
        step, train_state=train_state(2) | {part: train_state(2)[part] | changes}
    )


def position(**entries):
    """Damages the position of a source."""
    return state("data", sources={"a": {"contents": "x", "rows": 1, **entries}})


def file_entry(name, **entry):
    return lambda step: change(
        step, files=manifest(step)["files"] | {name: {"bytes": 1, "crc32": 1} | entry}
    )


def rank_entry(**changes):
    """Change what rank 0 says that it has written."""
    return lambda step: seal_rank(step, rank_file(step) | changes)


def layout(value):
    """Change the ranks that the index names for its first tensor."""

    def damage(step):
        tensors = json.loads((step / "tensors.json").read_text())
        next(iter(tensors.values()))["layout"] = value
        replace(step, "tensors.json", json.dumps(tensors).encode())

    return damage


def tensor(change_it):
    """Change the first tensor of the index."""

    def damage(step):
        tensors = index(step)
        change_it(next(iter(tensors.values())))
        replace_index(step, tensors)

    return damage


def overlap(step):
    """Say that each matrix was written as one half of it, twice."""
    tensors = index(step)
    for about in tensors.values():
        if len(about["size"]) == 2:
            (whole,) = about["parts"]
            rows, columns = about["size"]
            half = [whole[0], [rows, columns // 2], *whole[2:]]
            about["parts"] = [half, half]
    replace_index(step, tensors)


def part(number, value):
    return tensor(lambda about: about["parts"][0].__setitem__(number, value))


def instead_of(name, make):
    def damage(step):
        (step / name).unlink()
        make(step / name)

    return damage


def to_copy(path):
    shutil.copy(path.parents[1] / "step-1" / path.name, path.with_name("other"))
    path.symlink_to("other")


def cut(name):
    return lambda step: os.truncate(step / name, (step / name).stat().st_size // 2)


SHARD = "__0_0.distcp"
RANK = "__0.json"
DAMAGES = {
    "empty manifest": raw(b""),
    "list": raw(b"[]"),
    "not UTF-8": raw(b"\xff\xfe{}"),
    "nested": raw(DEEP.encode()),
    "cut manifest": cut(MANIFEST),
    "sealed nesting": lambda step: seal(step, '{"format": 4, "data": {"a": ' + DEEP),
    "checksum removed": lambda step: (step / MANIFEST).write_text(
        json.dumps(manifest(step), indent=1)
    ),
    "format 1": lambda step: (step / MANIFEST).write_text(
        json.dumps(manifest(step) | {"format": 1}, indent=1)
    ),
    "manifest is a folder": instead_of(MANIFEST, Path.mkdir),
    "manifest is a pipe": instead_of(MANIFEST, os.mkfifo),
    "manifest is a link": instead_of(MANIFEST, to_copy),
    "manifest is a device": instead_of(MANIFEST, lambda path: path.symlink_to("/dev/zero")),
    "no step": without("step"),
    "no state": without("train_state"),
    "unknown key": changed(more=1),
    "step of another": changed(step=1, train_state=train_state(1)),
    "negative step": changed(step=-1),
    "state is null": changed(train_state=None),
    "state of another step": changed(train_state=train_state(1)),
    "config is no TOML": changed(config="a = ["),
    "config of dots": changed(config=".".join("a" * 5000) + " = 1"),
    "no files": changed(files={}),
    "name above": file_entry("../step-1/manifest.json"),
    "NaN in the window": state("guard", windows={"loss": [float("nan")]}),
    "lane missing": state(
        "data",
        sources={
            "a": {
                "contents": "x",
                "rows": 1,
                "lane_count": 2,
                "lanes": {"0": lane(0), "2": lane(2)},
            }
        },
    ),
    "too few lanes": state(
        "data",
        sources={"a": {"contents": "x", "rows": 1, "lane_count": 10**12, "lanes": {"0": lane(0)}}},
    ),
    "no position": state("data", sources=None),
    "shares of another source": state(
        "data", shares={"weights": {"a": 1}, "rows": 0, "counts": {"b": 0}}
    ),
    "shard missing": lambda step: (step / SHARD).unlink(),
    "cut shard": cut(SHARD),
    "shard is a pipe": instead_of(SHARD, os.mkfifo),
    "shard is a folder": instead_of(SHARD, Path.mkdir),
    "shard is a link": instead_of(SHARD, to_copy),
    "index missing": lambda step: (step / "tensors.json").unlink(),
    "index unlisted": lambda step: change(
        step, files={k: v for k, v in manifest(step)["files"].items() if k != "tensors.json"}
    ),
    "index is garbage": lambda step: replace(step, "tensors.json", b"\xff\xfe"),
    "nested index": lambda step: replace(step, "tensors.json", DEEP.encode()),
    "index of another dtype": lambda step: replace(
        step,
        "tensors.json",
        (step / "tensors.json").read_bytes().replace(b"float32", b"float64", 1),
    ),
    "ranks beyond the last": layout([7, [[], []]]),
    "more pieces than ranks": layout([0, [[[2**30, 1]], []]]),
    "pieces of no rank": layout([0, [[[0, 1]], []]]),
    "layout of one dimension": layout([0, [[]]]),
    "another rank": layout([1, [[], []]]),
    "rank's file missing": lambda step: (step / RANK).unlink(),
    "other rank's file missing": lambda step: (
        (step / "__1.json").unlink(missing_ok=True)
        or change(step, written=manifest(step)["written"] | {"ranks": 3})
    ),
    "cut rank's file": cut(RANK),
    "rank's file is a pipe": instead_of(RANK, os.mkfifo),
    "rank's file is a link": instead_of(RANK, to_copy),
    "rank's file of another save": lambda step: shutil.copy(
        step.with_name("step-1") / RANK, step / RANK
    ),
    "another save": rank_entry(save="0" * 16),
    "file of another rank": rank_entry(rank=1),
    "rank's file is a list": lambda step: seal_rank(step, []),
    "rank's file above": rank_entry(files={"../step-1/manifest.json": {"bytes": 1, "crc32": 1}}),
    "no ranks": lambda step: change(step, written=manifest(step)["written"] | {"ranks": 0}),
    "no such dtype": tensor(lambda about: about.update(dtype="Tensor")),
    "size beyond memory": tensor(lambda about: about.update(size=[2**62, 2**62])),
    "64 dimensions too many": tensor(lambda about: about.update(size=[1] * 128)),
    "part outside": part(0, [1, 1]),
    "part too small": part(1, [1, 1]),
    "part of fewer dimensions": part(1, [1]),
    "parts overlap": overlap,
    "ranks without end": lambda step: change(
        step, written=manifest(step)["written"] | {"ranks": 2**31 - 1}
    ),
    "shard unlisted": part(2, "__7_0.distcp"),
    "shard above": part(2, "../step-1/__0_0.distcp"),
    "beyond the end": part(3, 10**6),
    "too short": part(4, 1),
    "elsewhere in the file": part(3, 1),
    "part without a checksum": tensor(lambda about: about["parts"][0].pop()),
    "tensors are text": lambda step: replace_tensors(step, b"\x80\x02X\x02\x00\x00\x00hi."),
    "tensors are garbage": lambda step: replace_tensors(step, b"garbage"),
}
UNSEEN = [
    name
    for name in DAMAGES
    if name in ("manifest is a folder", "manifest is a pipe", "manifest is a device")
]


def resume_each(folder, names):
    """What every rank makes of each damage to the newest of two checkpoints, and of the same one
    alone.
    """
    on_rank_0(shutil.rmtree, folder, True)
    save_steps(folder / "good", 1, 2)
    out = {}
    for name in names:
        damaged = folder / name
        on_rank_0(shutil.copytree, folder / "good", damaged)
        on_rank_0(DAMAGES[name], damaged / "step-2")
        out[name] = (outcome(damaged), outcome(damaged, load_step=2))
    return out


FEW = (
    "nested",
    "checksum removed",
    "manifest is a pipe",
    "manifest is a link",
    "no state",
    "step of another",
    "no files",
    "name above",
    "lane missing",
    "config of dots",
    "shard missing",
    "shard is a pipe",
    "index unlisted",
    "shard unlisted",
    "parts overlap",
    "ranks without end",
    "beyond the end",
    "rank's file missing",
    "rank's file of another save",
    "another rank",
    "more pieces than ranks",
    "part without a checksum",
    "tensors are text",
)


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(DAMAGES), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_rank_falls_back(ranks, tmp_path, names):
    first, second = ranks(2, resume_each, tmp_path, names)
    assert first.keys() == set(names)
    for name, (fallback, refusal) in first.items():
        assert second[name] == (fallback, refusal), name
        assert fallback == 1, name
        assert str(tmp_path / name) in refusal, name
        assert len(refusal) < 1000, name
        if name not in UNSEEN:  # a folder whose manifest isn't a file is no checkpoint
            assert "no checkpoint can be resumed" in refusal, name


def save_one(folder):
    save_steps(folder, 2)


@pytest.fixture(scope="module")
def checkpoint(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    ranks(1, save_one, folder)
    return folder / "step-2"


@pytest.mark.parametrize("name", DAMAGES)
def test_the_tools_refuse_or_report(checkpoint, tmp_path, capsys, name):
    step = shutil.copytree(checkpoint, tmp_path / "step-2")
    shutil.copytree(checkpoint, tmp_path / "step-1")
    DAMAGES[name](step)
    began = time.process_time()  # a load on the machine doesn't count
    problems = []
    for command in ("verify", "inspect"):
        try:
            ckpt.main([command, str(step)])
        except UserError as error:
            problems.append(str(error))
    assert all(str(step) in text for text in problems)
    if name not in UNSEEN:
        assert ckpt.main(["verify", str(tmp_path)]) == 1 or name in PLAUSIBLE
    assert time.process_time() - began < 2


PLAUSIBLE = (
    "elsewhere in the file",
    "tensors are text",
    "tensors are garbage",
    "step of another",
    "rank's file of another save",
)
"""Only reading the tensors, or the folder's name, tells."""


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (3, "torchtitan 0.1.2, which wrote it, reads it: export its weights there with "),
        (5, "torchtitan 0.1.2 wrote it: update to that version"),
    ],
)
def test_another_format_is_refused_by_its_number(checkpoint, tmp_path, number, advice):
    step = shutil.copytree(checkpoint, tmp_path / "step-2")
    change(step, format=number, versions={"torchtitan": "0.1.2"})
    with pytest.raises(DamageError) as error:
        read_manifest(step)
    text = f"{step} has format {number}, and this version reads format 4; {advice}"
    assert str(error.value).startswith(text)


def test_verify_counts_the_files_of_all_ranks(checkpoint, tmp_path, capsys):
    step = shutil.copytree(checkpoint, tmp_path / "step-2")
    change(step, written=manifest(step)["written"] | {"files": 1})
    assert ckpt.main(["verify", str(step)]) == 1
    assert "the ranks list 4 files of" in capsys.readouterr().out


def test_every_flipped_bit_of_a_rank_file_is_found(checkpoint, tmp_path):
    step = shutil.copytree(checkpoint, tmp_path / "step-2")
    save = manifest(step)["save"]
    content = (step / RANK).read_bytes()
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        (step / RANK).write_bytes(flipped)
        with pytest.raises(DamageError, match="checksum"):
            read_rank(step, save, 0)


def test_every_flipped_bit_of_a_manifest_is_found(checkpoint):
    content = (checkpoint / MANIFEST).read_bytes()
    state = parse(content).state()
    assert state | {"data": state["data"].model_dump(exclude_defaults=True)} == train_state(2)
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(ValueError, match="checksum"):
            parse(bytes(flipped))


def test_numbers_are_kept_bit_for_bit(checkpoint, tmp_path):
    step = shutil.copytree(checkpoint, tmp_path / "step-2")
    numbers = [random.Random(0).uniform(-1, 1) * 10.0**power for power in range(-320, 308)]
    state("guard", windows={"loss": numbers})(step)
    assert parse((step / MANIFEST).read_bytes()).state()["guard"]["windows"]["loss"] == numbers


def test_a_save_does_not_delete_itself_for_later_steps(checkpoint, tmp_path):
    """After a return to step 1, the steps from before it are newer, and don't count."""
    for step in (1, 2, 3, 8, 9):
        target = shutil.copytree(checkpoint, tmp_path / f"step-{step}")
        change(target, step=step, train_state=train_state(step))
    (tmp_path / "step-2" / MANIFEST).write_text("damaged")
    assert disposable(tmp_path, 2) == [1, 2, 3]
    assert disposable(tmp_path, 2, newest=3) == [1]
    assert disposable(tmp_path, 1, newest=2) == [], "2 can't be resumed"


def another_model(folder):
    save_steps(folder, 1, 2)
    checkpointer = small_checkpointer(folder, features=5, load_only=True)
    with pytest.raises(CheckpointError) as error:
        checkpointer.resume()
    return str(error.value)


def test_another_model_is_no_damage(ranks, tmp_path):
    for text in ranks(2, another_model, tmp_path / "checkpoint"):
        assert "step-2 holds another model" in text


def late(folder, reads):
    """Rank 1 sees the manifest only after `reads` attempts."""
    save_steps(folder, 1)
    real = backend.manifest_bytes
    count = 0

    def read(path):
        nonlocal count
        count += 1
        if dist.get_rank() == 1 and count <= reads:
            raise FileNotFoundError(path)
        return real(path)

    with (
        mock.patch.object(backend, "manifest_bytes", read),
        mock.patch.object(resume, "VISIBLE_WITHIN", 0.5),
        mock.patch.dict(os.environ, LOCAL_RANK="0"),  # each rank on a node of its own
    ):
        found = outcome(folder)
        count = 0
        checkpointer = small_checkpointer(folder)
        exported = "exported"
        try:
            with mock.patch("torchtitan.checkpoint.hf.export.HFExport"):
                export_checkpoint(checkpointer, 1, None, None, None)
        except CheckpointError as error:
            exported = str(error)
        checkpointer.close()
        return found, exported


def test_ranks_wait_until_they_see_what_rank_0_sees(ranks, tmp_path):
    for found in ranks(2, late, tmp_path / "soon", 3):
        assert found == (1, "exported")
    for found in ranks(2, late, tmp_path / "never", 10**6):
        for text in found:
            assert text.startswith("rank 1 on ")
            assert str(tmp_path / "never/step-1/manifest.json") in text
            assert "in a folder that all nodes share" in text
