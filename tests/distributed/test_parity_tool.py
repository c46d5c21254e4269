"""The parity tool finds planted mistakes, and says what and where they are."""

import subprocess
import sys
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.lab import parity
from torchtitan.train import build
from torchtitan.train.compute import Compute

REAL_PARALLELIZE = build.parallelize
REAL_PART = Compute.own_part
REAL_ALL_REDUCE = dist.all_reduce


def after_build(change):
    """Let `change(models, mesh)` spoil every model that is built."""

    def spoiled(config, spec, args, stages, mesh, device):
        models = REAL_PARALLELIZE(config, spec, args, stages, mesh, device)
        change(models, mesh)
        return models

    return mock.patch.object(build, "parallelize", spoiled)


def doubled_gradient(models, mesh):
    if mesh.size("cp") > 1:
        weight = models[0].layers["1"].attention.wo.weight
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))


def dropped_all_reduce(tensor, *args, group=None, calls=[], **options):  # noqa: B006 - counts the calls
    """HSDP's reduction over the replicas is left out for the last block: the first of three in each backward."""
    ours = group is not None and group.group_desc == "mesh_dp_replicate"
    calls += [None] if ours else []
    if not ours or len(calls) % 3 != 1:
        REAL_ALL_REDUCE(tensor, *args, group=group, **options)


def partial_norm_gradient(models, mesh):
    """A norm's gradient stays the sum over this rank's part of the sequence, as if it were not reduced over tp."""
    if mesh.size("tp") > 1:
        weight = models[0].layers["1"].ffn_norm.weight

        def spoil(p):
            grad = p.grad
            local = grad.to_local() * (1.0 if mesh.rank("tp") == 0 else 0.5)
            p.grad = DTensor.from_local(local, grad.device_mesh, grad.placements, run_check=False)

        weight.register_post_accumulate_grad_hook(spoil)


def shifted_labels(self, rows, calls=[]):  # noqa: B006 - tokens and labels come in turns
    part = REAL_PART(self, rows)
    calls.append(None)
    return part.roll(1, 1) if len(calls) % 2 == 0 and part.shape[1] < rows.shape[1] else part


@contextmanager
def planted(bug):
    with ExitStack() as stack:
        if bug == "shifted labels":
            stack.enter_context(mock.patch.object(Compute, "own_part", shifted_labels))
        elif bug == "dropped_all_reduce":
            stack.enter_context(mock.patch.object(dist, "all_reduce", dropped_all_reduce))
        elif bug:
            stack.enter_context(after_build(globals()[bug]))
        yield


def check(argv, bug):
    import logging

    logging.getLogger("torchtitan").setLevel("ERROR")
    with planted(bug):
        return parity.check(argv)


def degrees(**by_axis):
    return [f"--parallelism.{parity.DEGREE_KEYS[axis]}={degree}" for axis, degree in by_axis.items()]


SMALL = ["--training.local_batch_size=2", "--training.global_batch_size=8"]


@pytest.mark.parametrize(
    ("bug", "layout", "sentence"),
    [
        (
            "doubled_gradient",
            {"cp": 2, "dp_shard": 2},
            "layers.1.attention.wo.weight: gradient is 2.00x, along cp (1 of",
        ),
        pytest.param(
            *("dropped_all_reduce", {"dp_replicate": 2, "tp": 2}, ", along dp_replicate (9 of"), marks=pytest.mark.slow
        ),
        pytest.param(
            *("partial_norm_gradient", {"tp": 2, "cp": 2}, "layers.1.ffn_norm.weight: gradient is"),
            marks=pytest.mark.slow,
        ),
        ("shifted labels", {"cp": 2, "tp": 2}, "along cp ("),
    ],
)
def test_a_planted_mistake_is_found_and_named(ranks, bug, layout, sentence):
    # A hook on the gradient doubles it once a step, not with every batch that is added to it.
    once = ["--parallelism.fsdp_reduce_once_per_step"] if bug == "doubled_gradient" else []
    results = ranks(4, check, [*SMALL, *degrees(**layout), *once], bug, timeout=240)
    for passed, text in results:
        assert not passed
        assert sentence in text, text
    text = results[0][1]
    if bug == "dropped_all_reduce":
        assert "FAIL: layers.1." in text
    if bug == "partial_norm_gradient":
        assert "along tp" in text
    assert ("so the forward is wrong too" in text) == (bug == "shifted labels"), text


@pytest.mark.parametrize(
    ("world", "argv"),
    [
        (4, [*SMALL, *degrees(dp_replicate=2, dp_shard=2), "--checkpoint.enable_checkpoint=true"]),
        (4, [*degrees(pp=2, tp=2), "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]),
        (
            2,
            [
                *degrees(pp=2),
                "--model.overrides.n_layers=6",
                "--parallelism.pipeline_parallel_first_stage_less_layers=4",
                "--parallelism.pipeline_parallel_last_stage_less_layers=0",
                "--parallelism.pipeline_parallel_microbatches=4",
            ],
        ),
        (2, [*degrees(cp=2), "--training.seq_len=1024", "--model.flavor=1B", "--model.overrides.vocab_size=2048"]),
    ],
)
def test_a_right_run_passes(ranks, world, argv):
    for passed, text in ranks(world, check, argv, None, timeout=120):
        assert passed, text
        assert "PASS" in text


def test_tolerances_are_tight_enough_to_matter(ranks):
    """The differences reported are those of floating point, and not those of a comparison with itself."""
    _, text = ranks(2, check, [*degrees(tp=2)], None, timeout=120)[0]
    largest = float(text.split("gradients")[1].split()[0])
    assert 0 < largest < 1e-5
    assert torch.finfo(torch.float32).eps < 1e-6


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["torchtitan", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_command(tmp_path, launcher):
    command, ranks = [sys.executable, "-m"], "--nproc-per-node=2"
    if launcher == "torchrun":
        command, ranks = [*command, "torch.distributed.run", "--standalone", ranks, "-m"], ""
    flags = [f"--job.dump_folder={tmp_path / 'no'}", "--parallelism.pipeline_parallel_degree=2"]
    argv = [*command, "torchtitan", "parity", *flags, "debug_model", *filter(None, [ranks])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, pp 2, schedule 1F1B, against one process" in done.stdout
    assert "PASS" in done.stdout
    assert not (tmp_path / "no").exists()
