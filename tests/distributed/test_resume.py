"""Stop anywhere and resume under another layout: the loss curve is unchanged."""

import json
from concurrent.futures import Future
from threading import Thread
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests.rounding import assert_trained_alike
from tests.runs import (
    CHAIN,
    EXPERTS,
    LR,
    SAVE,
    SCHEDULE,
    TorchAverage,
    arguments,
    assert_averages,
    assert_continues,
    losses,
    read_metrics,
    train,
)
from torchtitan.checkpoint.commit import committed_steps
from torchtitan.checkpoint.manager import Checkpointer
from torchtitan.checkpoint.save import Stager
from torchtitan.train.built_in import WaitForCopy
from torchtitan.utils.logging import logger
from torchtitan.utils.wording import show_size

AVERAGE = ["--ema.enable", "--ema.decay=0.8", "--ema.warmup=false"]
REPLICATE = "--parallelism.data_parallel_replicate_degree=2"


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("disabled", marks=pytest.mark.slow),
        "async",
        pytest.param("async_with_pinned_mem", marks=pytest.mark.slow),
    ],
)
def test_async_modes_write_the_same_checkpoint(ranks, tmp_path, uninterrupted, mode):
    extra = [*SAVE, SCHEDULE, f"--checkpoint.async_mode={mode}"]
    ranks(2, train, arguments(tmp_path, *extra, steps=6))
    assert committed_steps(tmp_path / "out/checkpoint") == [3, 6]
    run = ranks(2, train, arguments(tmp_path, *extra, steps=8))[0]
    assert_continues(run, uninterrupted)
    assert run["metrics"][-1]["epochs/data"] == uninterrupted["metrics"][-1]["epochs/data"] > 0


def logged(argv):
    """Train; returns the log, and the numbers of parameters and of tensors that have some."""
    lines = []
    level = logger.level
    logger.setLevel("INFO")
    with mock.patch.object(logger, "handle", lambda record: lines.append(record.getMessage())):
        state = train(argv)["weights"]
    logger.setLevel(level)
    return lines, sum(x.numel() for x in state.values()), len(state)


def test_log_says_how_much_host_memory_copies_take(ranks, tmp_path):
    """12 bytes per parameter, and the optimizer's step counts."""
    argv = arguments(tmp_path, *SAVE, "--checkpoint.async_mode=async_with_pinned_mem", steps=2)
    lines, parameters, tensors = ranks(1, logged, argv)[0]
    size = show_size(12 * parameters + 4 * tensors)
    (line,) = (line for line in lines if "async_with_pinned_mem" in line)
    assert f"take {size} of host memory per rank, {size} for 1 rank here" in line


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The chain of layouts below passes through the slow ones.
        pytest.param((1, []), (4, ["--training.local_batch_size=1"]), marks=pytest.mark.slow),
        pytest.param((4, []), (1, []), marks=pytest.mark.proof),
        pytest.param((2, []), (4, [REPLICATE]), marks=pytest.mark.slow),
        pytest.param((4, [REPLICATE]), (2, []), marks=pytest.mark.slow),
        ((2, [REPLICATE]), (2, [])),
    ],
    ids=["1 to fsdp4", "fsdp4 to 1", "fsdp2 to hsdp", "hsdp to fsdp2", "ddp to fsdp"],
)
def test_resume_under_another_layout(ranks, tmp_path, uninterrupted, before, after):
    (world, extra), (new_world, new_extra) = before, after
    ranks(world, train, arguments(tmp_path, *SAVE, SCHEDULE, *extra, steps=4))
    run = ranks(
        new_world, train, arguments(tmp_path, *SAVE, SCHEDULE, *new_extra, steps=8), timeout=120
    )[0]
    assert_continues(run, uninterrupted)


def test_finished_run_has_nothing_to_do(ranks, tmp_path):
    argv = arguments(tmp_path, *SAVE)
    first = ranks(1, train, argv)[0]
    again = ranks(1, train, argv)[0]
    assert again["progress"] == first["progress"]
    assert len(again["metrics"]) == len(first["metrics"])


def test_load_step_and_exclude_from_loading(ranks, tmp_path):
    whole = ranks(1, train, arguments(tmp_path, *SAVE, steps=6))[0]
    again = ranks(1, train, arguments(tmp_path, *SAVE, "--checkpoint.load_step=3", steps=6))[0]
    assert losses(again) == pytest.approx(losses(whole), rel=1e-6)
    extra = [
        "--checkpoint.load_step=3",
        "--checkpoint.exclude_from_loading=model,dataloader,lr_scheduler,optimizer",
    ]
    fresh = ranks(1, train, arguments(tmp_path, *SAVE, *extra, steps=6))[0]
    assert losses(fresh)[3] == pytest.approx(losses(whole)[0], rel=1e-6), (
        "a new model on the first batch"
    )
    assert fresh["progress"]["step"] == 6
    metrics = read_metrics(tmp_path / "out")
    argv = arguments(tmp_path, *SAVE, "--checkpoint.load_step=3", steps=3)
    assert ranks(1, train, argv)[0]["metrics"] == metrics, "nothing was trained"
    assert committed_steps(tmp_path / "out/checkpoint")[-1] == 6
    argv = arguments(tmp_path, *SAVE, "--checkpoint.load_step=3", "--optimizer.lr=1", steps=5)
    assert losses(ranks(1, train, argv)[0])[4] != losses(fresh)[4]
    argv = arguments(tmp_path, *SAVE, "--checkpoint.load_step=6", steps=7)
    assert ranks(1, train, argv)[0]["metrics"][:6] == metrics, "those of the branch of step 6"
    with pytest.raises(AssertionError, match="has no step 4"):
        ranks(1, train, arguments(tmp_path, *SAVE, "--checkpoint.load_step=4", steps=6))


def test_another_model_is_refused(ranks, tmp_path):
    ranks(1, train, arguments(tmp_path, *SAVE))
    with pytest.raises(AssertionError, match="holds another model") as error:
        ranks(1, train, arguments(tmp_path, *SAVE, "--model.overrides.ffn_dim=128"))
    assert "[96, 64] in the checkpoint, [128, 64] in the model" in str(error.value)
    with pytest.raises(AssertionError, match="holds another optimizer") as error:
        ranks(1, train, arguments(tmp_path, *SAVE, "--optimizer.name=Muon", steps=8))
    assert 'checkpoint.exclude_from_loading = ["optimizer"]' in str(error.value)


def test_old_checkpoints_are_deleted_but_not_the_last_resumable(ranks, tmp_path):
    extra = ["--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"]
    keep = ["--checkpoint.keep_every_n=2", "--checkpoint.last_save_model_only"]
    ranks(2, train, arguments(tmp_path, *extra, *keep, steps=5))
    folder = tmp_path / "out/checkpoint"
    assert committed_steps(folder) == [2, 4, 5]
    assert sorted(p.name for p in folder.iterdir()) == ["step-2", "step-4", "step-5"], (
        "nothing half-deleted"
    )
    events = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
    deleted = [
        (event["step"], event["steps"], event["message"])
        for event in events
        if event["kind"] == "deleted"
    ]
    why = f"from {folder}: older than the newest 2, and not multiples of 2"
    assert deleted == [(3, [1], f"Deleted step-1 {why}"), (5, [3], f"Deleted step-3 {why}")]
    manifest = json.loads((folder / "step-5/manifest.json").read_text())
    assert manifest["model_only"]
    run = ranks(2, train, arguments(tmp_path, *extra, steps=6))[0]
    assert run["progress"]["step"] == 6, "resumes from step 4, as step 5 holds only weights"


def test_model_only_export_is_plain_dcp_in_the_dtype_asked_for(ranks, tmp_path):
    extra = [
        "--checkpoint.enable",
        "--checkpoint.last_save_model_only",
        "--checkpoint.export_dtype=bfloat16",
    ]
    run = ranks(2, train, arguments(tmp_path, *extra))[0]
    state = {
        "model": {
            name: torch.empty_like(w, dtype=torch.bfloat16) for name, w in run["weights"].items()
        }
    }
    dcp.load(state, checkpoint_id=tmp_path / "out/checkpoint/step-4", no_dist=True)
    for name, weight in run["weights"].items():
        assert torch.equal(state["model"][name], weight.to(torch.bfloat16)), name


def test_start_from_another_runs_weights(ranks, tmp_path):
    first = ranks(2, train, arguments(tmp_path, *SAVE))[0]
    source = f"--checkpoint.initial_load_path={tmp_path / 'out/checkpoint/step-4'}"
    other = f"--job.dump_folder={tmp_path / 'other'}"
    run = ranks(1, train, arguments(tmp_path, "--checkpoint.enable", source, other, steps=2))[0]
    for name, weight in first["weights"].items():
        assert torch.equal(run["initial"][name], weight), name
    assert run["progress"]["step"] == 2
    full_argv = ["--checkpoint.enable", source, "--checkpoint.initial_load_model_only=false"]
    run = ranks(
        1,
        train,
        arguments(tmp_path, *full_argv, f"--job.dump_folder={tmp_path / 'third'}", steps=6),
    )[0]
    assert [r["step"] for r in run["metrics"]] == [5, 6]


def recorded(argv):
    """Train; also returns the rows of every step, in the global order."""
    from torchtitan.train import step as module

    steps = []
    real = module.forward_backward

    def recording(engine, batch, *rest, **options):
        mesh = engine.mesh
        boxes = [None] * dist.get_world_size()
        dist.all_gather_object(boxes, (mesh.dp_rank, batch.tokens, batch.labels))
        by_rank = {rank: (tokens, labels) for rank, tokens, labels in boxes}
        for rank, tokens, labels in boxes:  # pipeline, context and tensor ranks read the same rows
            assert torch.equal(tokens, by_rank[rank][0])
            assert torch.equal(labels, by_rank[rank][1])
        steps.append(torch.cat([torch.stack(by_rank[r]) for r in range(mesh.dp_degree)], 1))
        return real(engine, batch, *rest, **options)

    with mock.patch.object(module, "forward_backward", recording):
        return train(argv) | {"rows": steps}


@pytest.mark.parametrize(
    "mode", [pytest.param("disabled", marks=pytest.mark.slow), "async_with_pinned_mem"]
)
def test_one_curve_and_the_same_rows_from_layout_to_layout(ranks, tmp_path, mode):
    """Each layout resumes from the previous one; together they equal one uninterrupted run.

    The average is that of the weights which the layouts end with, bit for bit.
    """
    size = [
        "--model.overrides.n_layers=4",
        "--lr_scheduler.total_steps=10",
        f"--checkpoint.async_mode={mode}",
    ]
    size += [*AVERAGE, "--ema.start_step=2", "--ema.every=2"]
    whole_argv = [*size, f"--job.dump_folder={tmp_path / 'whole'}"]
    whole = ranks(1, recorded, arguments(tmp_path, *whole_argv, steps=10, local_batch=8))[0]
    rows = []
    oracle = TorchAverage(0.8)
    for i, (world, layout) in enumerate(CHAIN.values(), 1):
        argv = arguments(
            tmp_path, *SAVE, *size, "--checkpoint.interval=2", *layout, steps=2 * i, local_batch=4
        )
        run = ranks(world, recorded, argv, timeout=100)[0]
        assert len(run["rows"]) == 2
        rows += run["rows"]
        oracle.update(run["weights"])
        assert_averages(run["average"], oracle.values())
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert [r["tokens"] for r in run["metrics"]] == [r["tokens"] for r in whole["metrics"]]
    assert all(torch.equal(a, b) for a, b in zip(rows, whole["rows"], strict=True))
    for name, weight in whole["weights"].items():
        assert_trained_alike(run["weights"][name], weight, LR, 10, name)
        assert_trained_alike(run["average"][name], whole["average"][name], LR, 10, name)


EXPERT_CHAIN = [
    (4, {"expert": 2}),
    (4, {"expert": 4}),
    (2, {"expert": 2, "tensor": 2}),
    (4, {"expert": 2, "pipeline": 2}),
    (1, {}),
]
"""Ranks and degrees. What the first saves is in shards of whole experts and of FSDP."""


def test_experts_move_between_ranks(ranks, tmp_path):
    """A step in each layout: the curve, rows, loads, routing biases, weights and average of one
    process.
    """
    extra = [
        *EXPERTS,
        "--lr_scheduler.total_steps=5",
        "--moe.global_balance_loss=0.1",
    ]  # by the load of the last step
    extra += AVERAGE
    whole = ranks(
        1, recorded, arguments(tmp_path, *extra, f"--job.dump_folder={tmp_path / 'whole'}", steps=5)
    )[0]
    rows = []
    oracle = TorchAverage(0.8)
    for step, (world, degrees) in enumerate(EXPERT_CHAIN, 1):
        layout = [
            f"--parallelism.{kind}_parallel_degree={degree}" for kind, degree in degrees.items()
        ]
        argv = arguments(tmp_path, *SAVE, *extra, *layout, steps=step)
        run = ranks(world, recorded, argv, timeout=100)[0]
        rows += run["rows"]
        oracle.update({name: run["weights"][name] for name in run["average"]})
        assert_averages(run["average"], oracle.values())
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(rows, whole["rows"], strict=True))
    loads = [
        [line["rows"] for line in read_metrics(tmp_path / name, "expert_load")]
        for name in ("out", "whole")
    ]
    assert loads[0] == loads[1]
    for name, weight in whole["weights"].items():
        if ".router." in name and not name.endswith("weight"):
            assert torch.equal(run["weights"][name], weight), name
        else:
            assert_trained_alike(run["weights"][name], weight, LR, 5, name)
    for name, value in whole["average"].items():
        assert_trained_alike(run["average"][name], value, LR, 5, name)
    assert whole["weights"]["layers.0.moe.router.expert_bias"].abs().max() > 0.02


def test_an_optimizer_in_the_backward_resumes_as_a_plain_one_and_back(ranks, tmp_path):
    plain = ["--training.max_norm=0", "--lr_scheduler.total_steps=6"]
    early = [
        *plain,
        "--optimizer.early_step_in_backward",
        "--checkpoint.async_mode=async_with_pinned_mem",
    ]
    argv = arguments(
        tmp_path, *plain, f"--job.dump_folder={tmp_path / 'whole'}", steps=6, local_batch=4
    )
    whole = ranks(2, train, argv)[0]
    for steps, extra in ((2, early), (4, plain), (6, early)):
        run = ranks(2, train, arguments(tmp_path, *SAVE, *extra, steps=steps, local_batch=4))[0]
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    norms = [[r["grad_norm"] for r in x["metrics"]] for x in (run, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_copy_waits_for_the_update(monkeypatch):
    """On CUDA the optimizer's step is only enqueued when a save begins; another stream would copy
    the old weights.
    """
    stager = Stager(StagingOptions(*[False] * 4))
    order = []
    stager._staging_stream = SimpleNamespace(wait_stream=order.append)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: "after the update")
    monkeypatch.setattr(DefaultStager, "stage", lambda *_: order.append("copied"))
    stager.stage({})
    assert order == ["after the update", "copied"]


def test_the_update_waits_for_a_copy():
    """A save in the background still reads the weights that the update would change."""
    checkpointer = object.__new__(Checkpointer)
    checkpointer._staging = copy = Future()
    checkpointer._guard = lambda result: result()
    update = Thread(target=WaitForCopy(checkpointer).before_update, args=(None,))
    update.start()
    update.join(0.05)
    assert update.is_alive()
    copy.set_result(None)
    update.join(30)
    assert not update.is_alive()
    checkpointer.wait_staged()  # nothing is left to wait for
