"""The list of data files that checkpoints keep, from the trainer's save to its resume."""

import shutil

import pytest

from tests.runs import SAVE, SCHEDULE, arguments, train, write_corpus
from torchtitan.checkpoint.commit import damage
from torchtitan.checkpoint.format.index import data_files
from torchtitan.checkpoint.format.manifest import read_manifest
from torchtitan.utils.errors import DamageError

CONTINUE = "--training.on_changed_data=continue"


def test_a_changed_file_is_named_by_a_resume(ranks, tmp_path):
    """Of training and of validation, on every rank; and the run goes on where that is wanted."""
    data = tmp_path / "data"
    data.mkdir()
    for name, seed in (("a", 1), ("b", 2)):
        write_corpus(data / f"{name}.jsonl", seed=seed)
    shutil.copytree(data, tmp_path / "held_out")
    extra = [
        f"--training.dataset_path={data}",
        "--validation.enable",
        "--validation.dataset=held_out",
        f"--validation.dataset_path={tmp_path / 'held_out'}",
        "--validation.steps=1",
        "--validation.freq=3",
        "--checkpoint.keep_latest_k=0",
    ]
    argv = arguments(
        tmp_path, *SAVE, SCHEDULE, *extra, "--checkpoint.last_save_model_only", steps=4
    )
    ranks(2, train, [*argv, "--training.steps=4"])
    folder = tmp_path / "out/checkpoint"
    step = folder / "step-3"
    weights = folder / "step-4"
    assert "data_files.json" not in read_manifest(weights).files
    shutil.rmtree(weights)
    lists = data_files(step, read_manifest(step))
    sizes = [(f"{name}.jsonl", (data / f"{name}.jsonl").stat().st_size) for name in ("a", "b")]
    assert [(file.name, file.size) for file in lists["sources"]["data"]] == sizes
    assert lists["held_out"] == {"validation": lists["sources"]["data"]}

    (data / "b.jsonl").rename(data / "c")
    (data / "a.jsonl").rename(data / "b.jsonl")
    (data / "c").rename(data / "a.jsonl")
    with pytest.raises(
        Exception,
        match=r"training\.dataset_path: the data has changed .* a\.jsonl has the contents",
    ):
        ranks(2, train, argv)
    ranks(2, train, [*argv, CONTINUE])
    shutil.rmtree(weights)

    content = (step / "data_files.json").read_bytes()
    (step / "data_files.json").write_bytes(content.replace(b"a.jsonl", b"x.jsonl"))
    assert list(damage(step, read_manifest(step))) == ["data_files.json has a wrong checksum"]
    with pytest.raises(DamageError, match=r"data_files\.json: its size or checksum is wrong"):
        data_files(step, read_manifest(step))
    (step / "data_files.json").write_bytes(content)
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "held_out", data)
    write_corpus(tmp_path / "held_out/a.jsonl", seed=3)
    with pytest.raises(
        Exception, match=r"validation\.dataset_path: the data has changed .* a\.jsonl has "
    ):
        ranks(2, train, argv)


def test_a_run_below_the_folder_of_its_data(ranks, tmp_path):
    """`dataset_path = "."` beside `outputs/` and the cache: a resume reads what the start read."""
    extra = [
        f"--training.dataset_path={tmp_path}",
        f"--training.dataloader.cache_folder={tmp_path / 'cache'}",
        "--logging.format=json",
    ]
    argv = arguments(tmp_path, *SAVE, SCHEDULE, *extra, steps=6)
    ranks(2, train, [*argv, "--training.steps=3"])
    ranks(2, train, argv)
    step = tmp_path / "out/checkpoint/step-6"
    (files,) = data_files(step, read_manifest(step))["sources"].values()
    assert [file.name for file in files] == ["corpus.jsonl"]
