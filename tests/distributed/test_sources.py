"""The loss of each data source, on any layout and after a resume."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.runs import (
    SAVE,
    SCHEDULE,
    arguments,
    assert_continues,
    read_metrics,
    train,
    write_corpus,
)
from torchtitan.config import resolve
from torchtitan.data.order.rows import IGNORE_INDEX

P = "--parallelism."


def mixture(folder, *extra, **sizes):
    """Arguments of a run on two sources, whose weights and batch size change before step 4."""
    for seed, name in enumerate(("a", "b")):
        if not (folder / f"{name}.jsonl").exists():
            write_corpus(folder / f"{name}.jsonl", seed=seed)
    table = "{{name = '{0}', dataset_path = '{1}/{0}.jsonl', weight = {2}}}"
    sources = ", ".join(table.format(name, folder, weight) for name, weight in (("a", 3), ("b", 1)))
    argv = [arg for arg in arguments(folder, *extra, **sizes) if "--training.dataset" not in arg]
    stages = "[{from_step = 4, weights = {b = 3}, global_batch_size = 16, lr_scale = 0.5}]"
    return [*argv, f"--training.sources=[{sources}]", f"--training.stages={stages}"]


def first_losses(argv):
    """Loss of each source in the first step, by a plain forward of the initial model; and what the
    run reports.
    """
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    config = resolve(argv, 1).config
    trainer = Trainer(config, preflight(config))
    try:
        batch = next(iter(trainer.engine.loader))
        lengths = torch.from_numpy(trainer.setup.tokenizer.byte_lengths())
        expected = {}
        with torch.no_grad():
            logits = trainer.engine.models[0](batch.tokens)
        for i, name in enumerate("ab"):
            own = batch.sources == i
            labels = batch.labels[own]
            loss = F.cross_entropy(
                logits[own].flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX
            )
            expected |= {
                f"loss/{name}": loss.item(),
                f"bytes_per_token/{name}": lengths[labels].double().mean().item(),
            }
        trainer.train()
    finally:
        trainer.close()
    return expected, read_metrics(Path(config.job.dump_folder))


def test_the_loss_of_each_source(ranks, tmp_path):
    """That of a plain forward; the same on every layout; and together the loss of the batch."""
    expected, records = ranks(1, first_losses, mixture(tmp_path, steps=5))[0]
    assert {key: records[0][key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert [r["tokens"] for r in records] == [256, 512, 768, 1280, 1792]
    assert [(r["tokens/a"], r["tokens/b"]) for r in records] == [
        (192, 64), (384, 128), (576, 192), (832, 448), (1088, 704),
    ]  # fmt: skip
    for before, record in zip([{}, *records], records, strict=False):
        own = [record[f"tokens/{name}"] - before.get(f"tokens/{name}", 0) for name in "ab"]
        mean = sum(n * record[f"loss/{name}"] for n, name in zip(own, "ab", strict=True)) / sum(own)
        assert mean == pytest.approx(record["loss"], rel=1e-5)
    rates = [record["lr"] for record in records]
    (tmp_path / "four").mkdir()
    flags = [
        f"{P}pipeline_parallel_degree=2",
        f"{P}context_parallel_degree=2",
        "--training.loss_chunks=4",
    ]
    flags += [f"{P}pipeline_parallel_microbatch_size=2"]
    run = ranks(4, train, mixture(tmp_path / "four", *flags, steps=5, local_batch=4))[0]
    assert [record["lr"] for record in run["metrics"]] == rates
    for record, reference in zip(run["metrics"], records, strict=True):
        for key in (key for key in reference if "/" in key and "epochs" not in key):
            assert record[key] == pytest.approx(reference[key], rel=2e-5), key


def test_a_mixture_resumes_on_another_layout(ranks, tmp_path):
    whole = ranks(1, train, mixture(tmp_path, SCHEDULE, steps=8))[0]
    folder = tmp_path / "parts"
    folder.mkdir()
    first = ranks(2, train, mixture(folder, *SAVE, SCHEDULE, steps=3))[0]
    weights = 2 * (2 * 64 * (64 + 32) + 3 * 64 * 96) + 64 * 2048  # that a token is multiplied by
    for record, reference in zip(first["metrics"], whole["metrics"], strict=False):
        rate = record["tokens_per_second"]
        assert rate * record["step_time_s"] * 2 == pytest.approx(8 * 32), "a rank's rate"
        attention = 2 * 12 * 64 * 32
        assert record["tflops"] * 1e12 == pytest.approx((6 * weights + attention) * rate)
        assert record["loss"] <= record["max_loss"] < 1.2 * record["loss"]
        for key in (key for key in reference if key.startswith("epochs/")):
            assert record[key] == pytest.approx(reference[key])
    resumed = ranks(
        2, train, mixture(folder, *SAVE, SCHEDULE, f"{P}tensor_parallel_degree=2", steps=8)
    )[0]
    assert_continues(resumed, whole)
    for start in json.loads((folder / "out/run.json").read_text())["starts"]:
        assert start["data"]["weights"] == {"a": 3.0, "b": 1.0}
        assert [stage["from_step"] for stage in start["data"]["stages"]] == [4]
    for record, reference in zip(resumed["metrics"], whole["metrics"], strict=True):
        assert record["tokens/b"] == reference["tokens/b"]
        assert record["loss/b"] == pytest.approx(reference["loss/b"], rel=1e-5)


def train_in_pieces(argv):
    """Train, taking documents of a thousand characters for long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan.data.encode.base.LONG", 1000)
        patch.setattr("torchtitan.data.encode.base.PIECE", 300)
        return train(argv)


def test_a_run_is_saved_within_a_long_document(ranks, tmp_path):
    """The uninterrupted run encodes the document as a whole."""
    lines = [
        json.loads(line)["text"]
        for line in write_corpus(tmp_path / "corpus.jsonl").read_text().splitlines()
    ]
    (tmp_path / "long.txt").write_text("\n".join(lines))

    def argv(name, *extra, steps):
        (tmp_path / name).mkdir(exist_ok=True)
        given = arguments(tmp_path / name, SCHEDULE, *extra, steps=steps)
        return [arg for arg in given if "dataset_path" not in arg] + [
            f"--training.dataset_path={tmp_path / 'long.txt'}"
        ]

    whole = ranks(1, train, argv("whole", steps=8))[0]
    ranks(1, train_in_pieces, argv("parts", *SAVE, steps=3))
    manifest = json.loads((tmp_path / "parts/out/checkpoint/step-3/manifest.json").read_text())
    (lane,) = manifest["train_state"]["data"]["sources"]["data"]["lanes"].values()
    assert lane["position"] > 0
    assert_continues(ranks(2, train_in_pieces, argv("parts", *SAVE, steps=8))[0], whole)
