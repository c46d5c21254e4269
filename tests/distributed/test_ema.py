"""The average of the weights: against torch's, and wherever it is used in place of the weights."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.runs import (
    SAVE,
    After,
    TorchAverage,
    arguments,
    assert_averages,
    average_of,
    train,
    weights,
)
from torchtitan.config import resolve
from torchtitan.config.sections.optim import EMA
from torchtitan.optim.ema import WeightAverage
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.logging import logger

AVERAGE = ["--ema.enable", "--ema.decay=0.8", "--ema.warmup=false"]


def followed(argv):
    """Train; returns the full weights after each step that updated them, and the average at the
    end.
    """
    config = resolve(argv, dist.get_world_size()).config
    lines = []
    seen = []
    names = set()

    def follow(result):
        if result.updated:
            found = weights(trainer.engine.models)
            seen.append({name: value for name, value in found.items() if name in names})

    level = logger.level
    logger.setLevel("INFO")
    with mock.patch.object(logger, "handle", lambda record: lines.append(record.getMessage())):
        trainer = Trainer(config, preflight(config), callbacks=[After(follow)])
    logger.setLevel(level)
    parameters = [name for model in trainer.engine.models for name, _ in model.named_parameters()]
    boxes = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, parameters)
    names |= {name for box in boxes for name in box}
    update = trainer.engine.average.update

    def watched(step):
        with CommDebugMode() as communication:
            update(step)
        assert communication.get_total_counts() == 0

    trainer.engine.average.update = watched
    try:
        trainer.train()
    finally:
        trainer.close()
    return {"seen": seen, "average": average_of(trainer), "log": lines}


@pytest.mark.parametrize(("every", "start", "warmup"), [(1, 1, False), (3, 4, False), (2, 1, True)])
def test_updates_are_those_of_torch(every, start, warmup):
    """And a saved average continues bit for bit."""
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    config = EMA(enable=True, decay=0.5, every=every, start_step=start, warmup=warmup)
    average = WeightAverage([model], config)
    counted = 0

    def mean(averages, values, number):
        keep = min(0.5, (1 + number.item()) / (10 + number.item())) if warmup else 0.5
        get_ema_multi_avg_fn(keep)(averages, values, number)

    oracle = AveragedModel(model, multi_avg_fn=mean)
    for step in range(1, 15):
        if step % 5 == 0:
            continue  # skipped
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param))
        average.update(step)
        if step < start:
            assert torch.equal(average.current()["weight"], model.weight)
            continue
        if counted % every == 0:
            oracle.update_parameters(model)
        counted += 1
        assert_averages(average.current(), dict(oracle.module.named_parameters()))
        if step == 7:
            again = WeightAverage([model], config)
            for name, tensor in again.tensors.items():
                tensor.copy_(average.current()[name])
            again.load_state_dict(average.state_dict())
            average = again
    before = model.weight.clone()
    with average.swap_in():
        assert torch.equal(model.weight, average.tensors["weight"])
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(
            [
                "--training.dtype=bfloat16",
                "--training.mixed_precision_param=bfloat16",
                "--training.enable_cpu_offload",
                "--parallelism.pipeline_parallel_degree=2",
            ],
            marks=pytest.mark.slow,
        ),
        [
            "--optimizer.early_step_in_backward",
            "--training.max_norm=0",
            "--training.local_batch_size=4",
            "--model.converters=float8",
            "--quantize.linear.float8.emulate",
            "--quantize.linear.float8.enable_fsdp_float8_all_gather",
            "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
            "--training.mixed_precision_param=bfloat16",
        ],
    ],
    ids=["bf16, offload and a pipeline", "float8 and a step in the backward"],
)
def test_average_wherever_weights_are(ranks, tmp_path, extra):
    """Saved in the middle and resumed; validated as what a run validates that starts from the
    exported average.
    """
    if any("float8" in flag for flag in extra):
        pytest.importorskip("torchao")
    held_out = [
        "--validation.enable",
        "--validation.dataset=corpus",
        f"--validation.dataset_path={tmp_path / 'corpus.jsonl'}",
        "--validation.steps=1",
        "--validation.seq_len=32",
        "--validation.freq=4",
    ]
    common = [*AVERAGE, *held_out, *extra, "--lr_scheduler.total_steps=4", "--ema.validation"]
    oracle = TorchAverage(0.8)
    for steps, more in ((2, []), (4, ["--checkpoint.last_save_model_only", "--ema.export"])):
        run = ranks(
            2, followed, arguments(tmp_path, "--checkpoint.enable", *common, *more, steps=steps)
        )[0]
        for values in run["seen"]:
            oracle.update(values)
        assert_averages(run["average"], oracle.values())
    last = tmp_path / "out/checkpoint/step-4"
    manifest = json.loads((last / "manifest.json").read_text())
    assert manifest["averaged"]
    assert manifest["tensor_bytes"].keys() == {"model"}
    source = [
        "--checkpoint.enable",
        f"--checkpoint.initial_load_path={last}",
        "--optimizer.lr=1e-30",
    ]
    argv = [*common, *source, f"--job.dump_folder={tmp_path / 'other'}", "--validation.freq=1"]
    other = ranks(2, train, arguments(tmp_path, *argv, steps=1))[0]
    (theirs,) = [r for r in other["metrics"] if "validation_loss" in r]
    metrics = [
        json.loads(line) for line in Path(tmp_path / "out/metrics.jsonl").read_text().splitlines()
    ]
    ours = next(r for r in metrics if r["step"] == 4 and "validation_loss" in r)
    assert ours["validation_loss_ema"] == theirs["validation_loss"] == theirs["validation_loss_ema"]
    assert abs(ours["validation_loss_ema"] - ours["validation_loss"]) > 1e-3


def test_the_host_waits_for_nothing():
    """A fake tensor has no value that the host could read."""
    with FakeTensorMode() as mode:
        model = nn.Linear(3, 3)
        average = WeightAverage([model], EMA(enable=True))
        for step in (1, 2, 3):
            average.update(step)
        with average.swap_in(), pytest.raises(DataDependentOutputException):
            model.weight.sum().item()
    assert all(
        isinstance(value, FakeTensor) and value.fake_mode is mode
        for value in average.tensors.values()
    )


def test_turning_it_on_and_off(ranks, tmp_path):
    ranks(2, train, arguments(tmp_path, *SAVE, steps=3))
    started = ranks(1, followed, arguments(tmp_path, *SAVE, *AVERAGE, steps=5))[0]
    oracle = TorchAverage(0.8)
    for values in started["seen"]:
        oracle.update(values)
    assert_averages(started["average"], oracle.values())
    assert any(
        "step-3 has no average of the weights: it starts from the weights" in line
        for line in started["log"]
    )
    extra = [
        "--checkpoint.exclude_from_loading=ema",
        "--checkpoint.last_save_in_hf",
        "--ema.export",
    ]
    anew = ranks(2, followed, arguments(tmp_path, *SAVE, *AVERAGE, *extra, steps=7))[0]
    oracle = TorchAverage(0.8)
    for values in anew["seen"]:
        oracle.update(values)
    assert_averages(anew["average"], oracle.values())
    exported = load_file(tmp_path / "out/checkpoint/step-7-hf/model.safetensors")
    assert torch.equal(
        exported["model.embed_tokens.weight"], anew["average"]["tok_embeddings.weight"]
    )
    off = ranks(1, train, arguments(tmp_path, *SAVE, steps=8))[0]
    assert off["average"] == {}
    manifest = json.loads((tmp_path / "out/checkpoint/step-8/manifest.json").read_text())
    assert manifest["tensor_bytes"].keys() == {"model", "optimizer"}
    assert "ema" not in manifest["train_state"]
