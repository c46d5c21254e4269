"""A step of which no token is predicted has no loss and updates nothing, under every layout."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.chats import say, write_chats, write_tokenizer
from tests.processes import run_module
from tests.runs import EXPERTS, After, arguments, full, read_metrics, weights
from torchtitan.config import resolve
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.train.build import Builders, build_data
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer

P = "--parallelism."
EMPTY = {1, 3}
"""Steps without labels; the first has no moments of the optimizer yet."""
IN_BACKWARD = [
    "--optimizer.early_step_in_backward",
    "--training.max_norm=0",
    "--training.local_batch_size=4",
]
SAVED = ["--checkpoint.enable", "--checkpoint.interval=3", "--lr_scheduler.total_steps=5"]
KINDS = {
    "on the device": (1, []),
    "accumulation, ema": (2, ["--ema.enable", "--training.local_batch_size=1"]),
    "judged on the host": (2, ["--guard.policy=skip"]),
    "bfloat16 moments": (1, ["--optimizer.state_dtype=bfloat16"]),
    "muon, in the backward": (2, ["--optimizer.name=Muon", *IN_BACKWARD]),
    "multi-token prediction": (1, ["--model.overrides.n_mtp=1"]),
}


class Masked:
    """A loader whose batches at some steps have no labels."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __iter__(self):
        for batch in self.loader:
            labels = batch.labels
            if batch.position.step in EMPTY:
                labels = torch.full_like(labels, IGNORE_INDEX)
            yield dataclasses.replace(batch, labels=labels)


def masked_data(config, section, *args, **kwargs):
    loader = build_data(config, section, *args, **kwargs)
    return Masked(loader) if section == "training" else loader


def state_of(engine):
    """Copies of everything that training changes but the schedule."""
    tensors = {f"weight {name}": value for name, value in weights(engine.models).items()}
    for i, state in enumerate(engine.optimizer.state.values()):
        for slot, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{slot} {i}"] = full(value)
    if engine.average is not None:
        current = engine.average.current().items()
        tensors |= {f"average {name}": full(value) for name, value in current}
    return tensors


def observe(argv):
    """Train; the results of the steps, and what each step left unchanged."""
    config = resolve(argv, dist.get_world_size()).config
    results, unchanged = [], []

    def compare(result):
        after = state_of(trainer.engine)
        zero = torch.zeros(())  # of moments that are new
        unchanged.append(
            all(
                torch.equal(value, before.get(name, zero.expand_as(value)))
                for name, value in after.items()
            )
        )
        results.append(result)
        before.clear()
        before.update(after)

    trainer = Trainer(
        config, preflight(config), callbacks=[After(compare)], builders=Builders(data=masked_data)
    )
    before = state_of(trainer.engine)
    try:
        progress = trainer.train()
    finally:
        trainer.close()
    return {
        "results": results,
        "unchanged": unchanged,
        "metrics": read_metrics(Path(config.job.dump_folder)) if dist.get_rank() == 0 else None,
        "progress": progress,
        "window": dict(trainer.state.guard.spikes.windows),
        "rows": trainer.state.guard.spikes.rows,
    }


COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
SLOW = {
    "in the backward": (2, IN_BACKWARD),
    "pipeline": (2, [f"{P}pipeline_parallel_degree=2"]),
    "tensor parallel, experts": (2, [f"{P}tensor_parallel_degree=2", *EXPERTS]),
    "context parallel": (2, [f"{P}context_parallel_degree=2"]),
    "compiled": (1, COMPILED),
    "compiled, in the backward": (2, [*COMPILED, *IN_BACKWARD]),
}


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(k, marks=pytest.mark.slow) for k in SLOW)])
def test_it_has_no_loss_and_updates_nothing(ranks, tmp_path, kind):
    world, flags = (KINDS | SLOW)[kind]
    argv = arguments(tmp_path, "--guard.policy=warn", "--guard.warmup_steps=0", *flags, steps=5)
    for run in ranks(world, observe, argv):
        assert run["unchanged"] == [step in EMPTY for step in range(1, 6)]
        for step, result in enumerate(run["results"], 1):
            empty = step in EMPTY
            assert (result.loss is None, result.tokens == 0, result.updated) == (
                empty, empty, not empty,
            )  # fmt: skip
        progress = run["progress"]
        assert (progress.step, progress.skipped) == (5, 2)
        assert progress.tokens == sum(result.tokens for result in run["results"])
        assert progress.losses[0] == run["results"][1].loss
        assert len(run["window"]["loss"]) == 3
        assert run["rows"] == 40
        for record in run["metrics"] or ():
            values = [record[key] for key in ("loss", "max_loss", "grad_norm")]
            assert (values == [None] * 3) is (record["step"] in EMPTY)
            assert "mtp_loss" not in record or record["step"] not in EMPTY
            assert record["lr"] > 0


def test_two_ranks_are_one_also_after_a_resume(ranks, tmp_path):
    """The step counts, and the data and the schedule go on."""
    runs = []
    for world in (1, 2):
        (tmp_path / str(world)).mkdir()
        argv = arguments(tmp_path / str(world), *SAVED, steps=5)
        ranks(world, observe, [*argv, "--training.steps=3"])
        runs.append(ranks(3 - world, observe, argv)[0]["metrics"])
    (tmp_path / "whole").mkdir()
    runs.append(ranks(1, observe, arguments(tmp_path / "whole", SAVED[-1], steps=5))[0]["metrics"])
    for key in ("step", "loss", "grad_norm", "lr", "tokens", "skipped_steps"):
        first, *others = [[record[key] for record in run] for run in runs]
        for other in others:
            for value, expected in zip(other, first, strict=True):
                assert value == (expected and pytest.approx(expected, rel=1e-5)), key


def test_a_run_that_predicts_nothing(tmp_path):
    """Turns of users that fill all rows: nothing is learned, and nothing is called 0."""
    write_tokenizer(tmp_path / "tokenizer", eos="<|im_end|>")
    write_chats(tmp_path / "chats.jsonl", [say("word " * 3000, "y")] * 30)
    flags = [
        f"--training.dataset_path={tmp_path}/chats.jsonl",
        "--training.messages_column=messages",
        f"--model.hf_assets_path={tmp_path}/tokenizer",
        "--model.overrides.vocab_size=2056",
        "--validation.enable",
        f"--validation.dataset_path={tmp_path}/chats.jsonl",
        "--validation.messages_column=messages",
        "--validation.steps=1",
    ]
    done = run_module("torchtitan.train", *arguments(tmp_path, *flags, steps=2), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = read_metrics(tmp_path / "out")
    assert [record.get("loss") for record in records] == [None] * 3
    assert records[-1]["validation_loss"] is records[-1]["validation_bits_per_byte"] is None
    assert {record["tokens"] for record in records[:2]} == {0}
    assert "step 1/2  no predicted tokens  lr" in done.stdout
    assert "step 2/2  validation loss: no predicted tokens" in done.stdout
    assert "Done: step 2, 0 tokens, no loss: no token was predicted" in done.stdout
    assert done.stdout.count("no token of its batch is predicted") == 1
