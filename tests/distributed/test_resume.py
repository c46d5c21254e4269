"""Stop anywhere, go on under another layout: the curve continues as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.runs import arguments, full, losses, train
from torchtitan.components.checkpoint.commit import committed_steps
from torchtitan.config import resolve
from torchtitan.trainer.preflight import preflight
from torchtitan.trainer.trainer import Trainer

SAVE = ["--checkpoint.enable", "--checkpoint.interval=3"]
REPLICATE = "--parallelism.data_parallel_replicate_degree=2"
SCHEDULE = "--lr_scheduler.total_steps=8"


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    return ranks(1, train, arguments(tmp_path_factory.mktemp("whole"), SCHEDULE, steps=8))[0]


def assert_continues(run, uninterrupted):
    assert losses(run) == pytest.approx(losses(uninterrupted), rel=1e-5)
    assert [r["step"] for r in run["metrics"]] == list(range(1, 9))
    assert [r["lr"] for r in run["metrics"]] == pytest.approx([r["lr"] for r in uninterrupted["metrics"]])
    assert run["progress"] == uninterrupted["progress"]
    for name, value in uninterrupted["weights"].items():
        torch.testing.assert_close(run["weights"][name], value, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_async_modes_write_the_same_checkpoint(ranks, tmp_path, uninterrupted, mode):
    extra = [*SAVE, SCHEDULE, f"--checkpoint.async_mode={mode}"]
    ranks(2, train, arguments(tmp_path, *extra, steps=6))
    assert committed_steps(tmp_path / "out/checkpoint") == [3, 6]
    assert_continues(ranks(2, train, arguments(tmp_path, *extra, steps=8))[0], uninterrupted)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, []), (4, ["--training.local_batch_size=1"])),
        ((4, []), (1, [])),
        ((2, []), (4, [REPLICATE])),
        ((4, [REPLICATE]), (2, [])),
        ((2, [REPLICATE]), (2, ["--training.dataloader.num_workers=2"])),
    ],
    ids=["1 to fsdp4", "fsdp4 to 1", "fsdp2 to hsdp", "hsdp to fsdp2", "ddp to fsdp with workers"],
)
def test_resume_under_another_layout(ranks, tmp_path, uninterrupted, before, after):
    (world, extra), (new_world, new_extra) = before, after
    ranks(world, train, arguments(tmp_path, *SAVE, SCHEDULE, *extra, steps=4))
    run = ranks(new_world, train, arguments(tmp_path, *SAVE, SCHEDULE, *new_extra, steps=8), timeout=120)[0]
    assert_continues(run, uninterrupted)


def test_finished_run_has_nothing_to_do(ranks, tmp_path):
    argv = arguments(tmp_path, *SAVE)
    first, again = ranks(1, train, argv)[0], ranks(1, train, argv)[0]
    assert again["progress"] == first["progress"]
    assert len(again["metrics"]) == len(first["metrics"])


def test_damaged_checkpoint_is_named_and_the_one_before_taken(ranks, tmp_path, uninterrupted):
    ranks(2, train, arguments(tmp_path, *SAVE, SCHEDULE, steps=6))
    shard = max((tmp_path / "out/checkpoint/step-6").glob("*.distcp"), key=lambda p: p.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert_continues(ranks(2, train, arguments(tmp_path, *SAVE, SCHEDULE, steps=8))[0], uninterrupted)

    shutil.rmtree(tmp_path / "out/checkpoint/step-3")
    shutil.rmtree(tmp_path / "out/checkpoint/step-8")
    shard.write_bytes(content)
    with pytest.raises(AssertionError, match="no checkpoint can be resumed"):
        ranks(2, train, arguments(tmp_path, *SAVE, SCHEDULE, steps=8))


def test_load_step_and_what_may_be_excluded(ranks, tmp_path):
    whole = ranks(1, train, arguments(tmp_path, *SAVE, steps=6))[0]
    again = ranks(1, train, arguments(tmp_path, *SAVE, "--checkpoint.load_step=3", steps=6))[0]
    assert losses(again) == pytest.approx(losses(whole), rel=1e-6)
    extra = ["--checkpoint.load_step=3", "--checkpoint.exclude_from_loading=model,dataloader,lr_scheduler,optimizer"]
    fresh = ranks(1, train, arguments(tmp_path, *SAVE, *extra, steps=6))[0]
    assert losses(fresh)[3] == pytest.approx(losses(whole)[0], rel=1e-6), "a new model on the first batch"
    assert fresh["progress"]["step"] == 6
    with pytest.raises(AssertionError, match="has no step 4"):
        ranks(1, train, arguments(tmp_path, *SAVE, "--checkpoint.load_step=4", steps=6))


def test_another_model_is_refused(ranks, tmp_path):
    ranks(1, train, arguments(tmp_path, *SAVE))
    with pytest.raises(AssertionError, match="holds another model") as error:
        ranks(1, train, arguments(tmp_path, *SAVE, "--model.overrides.ffn_dim=128"))
    assert "[96, 64] there and [128, 64] here" in str(error.value)


def test_old_checkpoints_go_and_the_last_resumable_stays(ranks, tmp_path):
    extra = ["--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"]
    ranks(2, train, arguments(tmp_path, *extra, "--checkpoint.last_save_model_only", steps=5))
    folder = tmp_path / "out/checkpoint"
    assert committed_steps(folder) == [4, 5]
    assert sorted(p.name for p in folder.iterdir()) == ["step-4", "step-5"], "nothing half-deleted or half-written"
    manifest = json.loads((folder / "step-5/manifest.json").read_text())
    assert manifest["model_only"]
    run = ranks(2, train, arguments(tmp_path, *extra, steps=6))[0]
    assert run["progress"]["step"] == 6, "goes on from step 4, as step 5 holds only weights"


def test_model_only_export_is_plain_dcp_in_the_dtype_asked_for(ranks, tmp_path):
    extra = ["--checkpoint.enable", "--checkpoint.last_save_model_only", "--checkpoint.export_dtype=bfloat16"]
    run = ranks(2, train, arguments(tmp_path, *extra))[0]
    state = {"model": {name: torch.empty_like(w, dtype=torch.bfloat16) for name, w in run["weights"].items()}}
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
    run = ranks(1, train, arguments(tmp_path, *full_argv, f"--job.dump_folder={tmp_path / 'third'}", steps=6))[0]
    assert [r["step"] for r in run["metrics"]] == [5, 6]


def test_hf_export_loads_in_transformers_and_comes_back(ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    extra = ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    run = ranks(2, train, arguments(tmp_path, *extra))[0]
    folder = tmp_path / "out/checkpoint/step-4-hf"
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {p.name for p in folder.iterdir()}
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    argv = arguments(tmp_path)
    plan = preflight(resolve(argv, 1).config)
    from torchtitan.models.layers import attention_backend

    ours = plan.spec.build(plan.args, attention_backend("cpu"))
    ours.load_state_dict(run["weights"])
    tokens = torch.randint(0, 2048, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    back = [
        "--checkpoint.enable",
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={folder}",
        f"--job.dump_folder={tmp_path / 'back'}",
    ]
    again = ranks(2, train, arguments(tmp_path, *back, steps=1))[0]
    for name, weight in run["weights"].items():
        assert torch.equal(again["initial"][name], weight), name


def full_disk(argv):
    """Train where no file may grow past 100 kB, as if the disk were full; the limit is real, the error the OS's own."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        trainer.train()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        trainer.close()
    return None


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_full_disk_leaves_earlier_checkpoints_intact(ranks, tmp_path, mode):
    extra = [*SAVE, f"--checkpoint.async_mode={mode}"]
    ranks(2, train, arguments(tmp_path, *extra, steps=3))
    for kind, message in ranks(2, full_disk, arguments(tmp_path, *extra, steps=6)):
        assert kind == "CheckpointError"
        assert "can't save" in message
        assert "File too large" in message
        assert "checkpoint.folder" in message
        assert "step-3" in message
    folder = tmp_path / "out/checkpoint"
    assert sorted(p.name for p in folder.iterdir()) == ["step-3"]
    assert ranks(2, train, arguments(tmp_path, *extra, steps=6))[0]["progress"]["step"] == 6


@pytest.mark.e2e
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_kill_during_a_save_leaves_a_good_checkpoint(tmp_path, delay):
    """A real process, killed at some moment while it saves step after step."""
    argv = [*arguments(tmp_path, steps=500), "--checkpoint.enable", "--checkpoint.interval=1"]
    folder = tmp_path / "out/checkpoint"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "torchtitan.train", *argv], stdout=log, stderr=log)
        wait_for(lambda: committed_steps(folder) and list(folder.glob(".step-*.tmp")), process, tmp_path)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    steps = committed_steps(folder)
    assert steps
    assert all((folder / f"step-{step}/.metadata").is_file() for step in steps)
    more = [*arguments(tmp_path, steps=steps[-1] + 2), "--checkpoint.enable"]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan.train", *more], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"Resumed from {folder / f'step-{steps[-1]}'}" in done.stdout
    assert not list(folder.glob(".step-*"))


def wait_for(condition, process, folder: Path, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.001)


def poisoned(argv, step_to_poison):
    """Train with the activations of rank 1 made NaN in one step; tells whether that step changed the weights."""
    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    weight = trainer.parts.models[0].layers["0"].attention.wq.weight
    after_step, before = trainer._after_step, None

    def poison(module, args):
        if trainer.progress.step + 1 == step_to_poison and dist.get_rank() == 1:
            return torch.full_like(args[0], float("nan")), *args[1:]
        return args

    def watch():
        nonlocal before
        after_step()
        if trainer.progress.step + 1 == step_to_poison:
            before = full(weight)
        elif trainer.progress.step == step_to_poison:
            before = torch.equal(full(weight), before)

    trainer._after_step = watch
    trainer.parts.models[0].layers["1"].ffn_norm.register_forward_pre_hook(poison)
    try:
        return "ok", trainer.train().state_dict(), before
    except Exception as error:
        return type(error).__name__, str(error), torch.equal(full(weight), before)
    finally:
        trainer.close()


def test_nonfinite_loss_on_one_rank_stops_all_before_the_update(ranks, tmp_path):
    argv = arguments(tmp_path, *SAVE, steps=6)
    for kind, message, unchanged in ranks(2, poisoned, argv, 5):
        assert kind == "NonFiniteError"
        assert "step 5" in message
        assert "step-3" in message
        assert "training.on_nonfinite" in message
        assert unchanged


def test_nonfinite_step_can_be_skipped(ranks, tmp_path):
    argv = arguments(tmp_path, "--training.on_nonfinite=skip", steps=6)
    for kind, progress, unchanged in ranks(2, poisoned, argv, 4):
        assert unchanged
        assert kind == "ok"
        assert progress == {"step": 6, "tokens": 6 * 8 * 32, "skipped": 1}


def recorded(argv):
    """Train, and return the rows of every step in the global order too."""
    from torchtitan.trainer import trainer as module

    steps, real = [], module.forward_backward

    def recording(parts, batch, *rest):
        mesh, boxes = parts.mesh, [None] * dist.get_world_size()
        dist.all_gather_object(boxes, (mesh.dp_rank, batch.tokens, batch.labels))
        by_rank = {rank: (tokens, labels) for rank, tokens, labels in boxes}
        for rank, tokens, labels in boxes:  # pipeline, context and tensor ranks read the same rows
            assert torch.equal(tokens, by_rank[rank][0])
            assert torch.equal(labels, by_rank[rank][1])
        steps.append(torch.cat([torch.stack(by_rank[r]) for r in range(mesh.dp_degree)], 1))
        return real(parts, batch, *rest)

    with mock.patch.object(module, "forward_backward", recording):
        return train(argv) | {"rows": steps}


CHAIN = {
    "dp 4": (4, ["--training.local_batch_size=2"]),
    "pp 2 x tp 2": (4, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"]),
    "cp 2 x dp_replicate 2": (
        4,
        ["--parallelism.context_parallel_degree=2", "--parallelism.data_parallel_replicate_degree=2"],
    ),
    "one process": (1, []),
    "pp 2 x dp_shard 2": (
        4,
        ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"],
    ),
}


@pytest.mark.parametrize("mode", ["disabled", "async_with_pinned_mem"])
def test_one_curve_and_the_same_rows_from_layout_to_layout(ranks, tmp_path, mode):
    """Each layout goes on where the one before stopped; together they are the run that never stopped."""
    size = ["--model.overrides.n_layers=4", "--lr_scheduler.total_steps=10", f"--checkpoint.async_mode={mode}"]
    whole_argv = [*size, f"--job.dump_folder={tmp_path / 'whole'}"]
    whole = ranks(1, recorded, arguments(tmp_path, *whole_argv, steps=10, local_batch=8))[0]
    rows = []
    for i, (world, layout) in enumerate(CHAIN.values(), 1):
        argv = arguments(tmp_path, *SAVE, *size, "--checkpoint.interval=2", *layout, steps=2 * i, local_batch=4)
        run = ranks(world, recorded, argv, timeout=100)[0]
        assert len(run["rows"]) == 2
        rows += run["rows"]
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert [r["tokens"] for r in run["metrics"]] == [r["tokens"] for r in whole["metrics"]]
    assert all(torch.equal(a, b) for a, b in zip(rows, whole["rows"], strict=True))
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(run["weights"][name], weight, rtol=1e-3, atol=2e-5)


def test_an_optimizer_in_the_backward_resumes_as_a_plain_one_and_back(ranks, tmp_path):
    plain = ["--training.max_norm=0", "--lr_scheduler.total_steps=6"]
    early = [*plain, "--optimizer.early_step_in_backward", "--checkpoint.async_mode=async_with_pinned_mem"]
    argv = arguments(tmp_path, *plain, f"--job.dump_folder={tmp_path / 'whole'}", steps=6, local_batch=4)
    whole = ranks(2, train, argv)[0]
    for steps, extra in ((2, early), (4, plain), (6, early)):
        run = ranks(2, train, arguments(tmp_path, *SAVE, *extra, steps=steps, local_batch=4))[0]
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    norms = [[r["grad_norm"] for r in x["metrics"]] for x in (run, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_hugging_face_weights_go_in_and_out_of_every_layout(ranks, tmp_path):
    """Exported by pipeline stages of tensor-parallel ranks, and read by other ones."""
    out = ["--checkpoint.enable", "--checkpoint.last_save_in_hf", "--model.overrides.n_layers=4"]
    layout = CHAIN["pp 2 x tp 2"][1]
    run = ranks(4, train, arguments(tmp_path, *out, *layout, steps=2, local_batch=4))[0]
    folder = tmp_path / "out/checkpoint/step-2-hf"
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 4
    for i, (world, layout) in enumerate(CHAIN.values()):
        back = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--model.overrides.n_layers=4", *layout]
        more = [f"--checkpoint.initial_load_path={folder}", f"--job.dump_folder={tmp_path / str(i)}"]
        again = ranks(world, train, arguments(tmp_path, *back, *more, steps=1, local_batch=4), timeout=100)[0]
        for name, weight in run["weights"].items():
            assert torch.equal(again["initial"][name], weight), name
