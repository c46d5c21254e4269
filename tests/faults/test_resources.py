"""NaN on one rank, a rank without memory, a rank that is slow."""

import re
import resource
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.runs import SAVE, After, arguments, last
from torchtitan.config import resolve
from torchtitan.health import stragglers
from torchtitan.parallel.collectives import local
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.device import seconds_of_matmuls
from torchtitan.utils.logging import logger

PP = [
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.module_fqns_per_model_part=layers.1",
]


def poisoned(argv, step_to_poison, what):
    """Train with `what` of rank 1, activations or their gradients, made NaN in one step; whether
    weights and optimizer stayed as they were.
    """
    config = resolve(argv, dist.get_world_size()).config
    before = None
    kept = []

    def state():
        params = [p for model in trainer.engine.models for p in model.parameters()]
        slots = [tensor for p in params for tensor in trainer.engine.optimizer.state[p].values()]
        return [local(tensor).clone() for tensor in (*params, *slots)]

    def unchanged():
        return all(map(torch.equal, state(), before))

    def poison(module, args):
        hidden, *others = args
        if trainer.progress.step + 1 == step_to_poison and dist.get_rank() == 1:
            if what == "activations":
                return torch.full_like(hidden, float("nan")), *others
            hidden.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
        return args

    def watch(_):
        nonlocal before
        if trainer.progress.step + 1 == step_to_poison:
            before = state()
        elif trainer.progress.step == step_to_poison:
            kept.append(unchanged())

    trainer = Trainer(config, preflight(config), callbacks=[After(watch)])
    block = list(trainer.engine.models[0].layers.values())[-1]
    block.ffn_norm.register_forward_pre_hook(poison)
    try:
        return "ok", trainer.train().state_dict(), *kept
    except Exception as error:
        return type(error).__name__, str(error), unchanged()
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("layout", "what", "loss"),
    [([], "gradients", r"\d\.\d+"), pytest.param(PP, "activations", "nan", marks=pytest.mark.slow)],
    ids=["dp", "pp"],
)
def test_nan_on_one_rank_or_stage_stops_all_before_the_update(ranks, tmp_path, layout, what, loss):
    argv = arguments(tmp_path, *SAVE, *layout, steps=6)
    for kind, message, unchanged in ranks(2, poisoned, argv, 5, what):
        assert kind == "NonFiniteError"
        assert re.match(
            rf"step 5: loss {loss}, gradient norm nan\. Its update was skipped", message
        ), message
        assert "step-3" in message
        assert "training.on_nonfinite" in message
        assert unchanged


def test_nonfinite_step_can_be_skipped(ranks, tmp_path):
    """By an optimizer that can't skip on the device."""
    argv = arguments(
        tmp_path, "--training.on_nonfinite=skip", "--optimizer.implementation=foreach", steps=6
    )
    for kind, progress, unchanged in ranks(2, poisoned, argv, 4, "gradients"):
        assert unchanged
        assert kind == "ok"
        assert progress == {"step": 6, "tokens": 6 * 8 * 32, "skipped": 1}


def starved(argv):
    """Train where rank 1 gets no more memory from step 3 on: the limit is real, and so is the
    allocator's error.
    """
    config = resolve(argv, dist.get_world_size()).config
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def limit(_):
        if trainer.progress.step == 3 and dist.get_rank() == 1:
            trainer.engine.models[0].norm.register_forward_hook(lambda *_: torch.empty(1 << 30))
            resource.setrlimit(
                resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 30), limits[1])
            )

    trainer = Trainer(config, preflight(config), arrange=last(limit))
    try:
        trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_out_of_memory_on_one_rank_says_what_to_lower(ranks, tmp_path):
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed") as error:
        ranks(2, starved, arguments(tmp_path, *SAVE, steps=6))
    assert "OutOfMemoryError: step 4: out of memory" in str(error.value)
    assert "step-3" in str(error.value)
    assert "lower training.local_batch_size" in str(error.value)


def slowed(argv):
    """Train while rank 1 measures itself as a thousand times as slow; what was logged."""
    config = resolve(argv, dist.get_world_size()).config
    lines = []

    def measured():
        return seconds_of_matmuls() * (1000 if dist.get_rank() == 1 else 1)

    trainer = Trainer(config, preflight(config))
    with (
        mock.patch.object(stragglers, "seconds_of_matmuls", measured),
        mock.patch.object(logger, "handle", lambda record: lines.append(record.getMessage())),
    ):
        trainer.train()
    trainer.close()
    return lines


def test_a_slow_rank_is_named(ranks, tmp_path):
    extra = ["--guard.straggler_factor=2", "--guard.straggler_records=3"]
    lines = ranks(2, slowed, arguments(tmp_path, *extra, steps=8))[0]
    named = [line for line in lines if "is slow" in line]
    assert [line.split(":")[0] for line in named] == ["step 3", "step 6"]
    assert all("rank 1 is slow: it computes" in line for line in named)
