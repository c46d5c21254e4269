"""Spikes, faulty copies and slow ranks, made on one rank and dealt with by all."""

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.examples import mean_loss
from tests.rounding import assert_trained_alike
from tests.runs import EXPERTS, LR, arguments, average_of, first, losses, weights
from torchtitan.config import resolve
from torchtitan.data.loader import StepLoader
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer

SAVE = ["--checkpoint.enable", "--checkpoint.interval=4"]
WATCH = ["--guard.window=8", "--guard.warmup_steps=0", "--guard.grad_norm_threshold=0"]
HSDP = [
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=2",
]
PP = ["--parallelism.pipeline_parallel_degree=2"]
LAYOUTS = {
    "hsdp": HSDP,
    "pp x tp": [*PP, "--parallelism.tensor_parallel_degree=2"],
    "dp_replicate x cp": [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.context_parallel_degree=2",
    ],
    "fsdp x tp": ["--parallelism.tensor_parallel_degree=2"],
    "cp x tp": [
        "--parallelism.context_parallel_degree=2",
        "--parallelism.tensor_parallel_degree=2",
    ],
    "hsdp x ep": [*EXPERTS, *HSDP, "--parallelism.expert_parallel_degree=2"],
    "tp x ep": [
        *EXPERTS,
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.expert_parallel_degree=4",
    ],
}


def spoiled(argv, bad=(), drop=(), factor=400.0):
    """Train on the batches that are not in `drop`; those in `bad` reach the last rank's logits
    multiplied.
    """
    real = StepLoader.__iter__
    now = {}

    def batches(self):
        for index, batch in enumerate(real(self)):
            if index not in drop:
                now["index"] = index
                yield batch

    def spoil(module, args, output):
        return output * factor if now["index"] in bad else None

    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    if dist.get_rank() == dist.get_world_size() - 1:
        trainer.engine.models[-1].norm.register_forward_hook(spoil)
    with mock.patch.object(StepLoader, "__iter__", batches):
        try:
            trainer.train()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            trainer.close()
    return {
        "weights": weights(trainer.engine.models),
        "average": average_of(trainer),
        "progress": trainer.progress.state_dict(),
    }


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder):
    return [json.loads(line) for line in (folder / "guard.jsonl").read_text().splitlines()]


def assert_same(run, folder, other, other_folder, rel=1e-6):
    assert [r["step"] for r in metrics(folder)] == [r["step"] for r in metrics(other_folder)]
    assert losses({"metrics": metrics(folder)}) == pytest.approx(
        losses({"metrics": metrics(other_folder)}), rel=rel
    )
    for kind in ("weights", "average"):
        assert run[kind].keys() == other[kind].keys()
        for name, value in other[kind].items():
            assert_trained_alike(run[kind][name], value, LR, 14, name)


@pytest.mark.parametrize(
    ("world", "layout", "factor"),
    [
        pytest.param(4, HSDP, 400.0, id="hsdp"),
        pytest.param(2, PP, float("nan"), id="pp", marks=pytest.mark.slow),
    ],
)
def test_rewind_is_a_run_that_never_saw_the_batches_before_the_spike(
    ranks, tmp_path, world, layout, factor
):
    """Back from step 11 to the checkpoint of step 8: batches 8 to 10, counted from 0, have no part
    in the weights.
    """
    mean = [f"--experimental.custom_import={mean_loss.__name__}", "--training.callbacks=mean_loss"]
    common = [*SAVE, *layout, *mean, "--lr_scheduler.total_steps=14", "--ema.enable"]
    argv = arguments(tmp_path, *common, *WATCH, "--guard.policy=rewind", steps=14)
    run = ranks(world, spoiled, argv, bad=[10], factor=factor)[0]
    clean = arguments(tmp_path, *common, f"--job.dump_folder={tmp_path / 'clean'}", steps=14)
    reference = ranks(world, spoiled, clean, drop=[8, 9, 10])[0]
    assert_same(run, tmp_path / "out", reference, tmp_path / "clean")
    (event,) = events(tmp_path / "out")
    assert (event["step"], event["back_to"], event["rows"]) == (11, 8, [8 * 8, 11 * 8])
    assert event["reason"].startswith("loss ")
    happened = [
        json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()
    ]
    kinds = [(event["kind"], event["step"]) for event in happened]
    saved = [("saved", step) for step in (4, 8, 12, 14)]
    assert kinds == [("started", 0), *saved[:2], ("rewound", 11), *saved[2:], ("finished", 14)]
    assert happened[3]["message"].endswith("training continues with the data after this step")
    state, clean_state = (
        json.loads((folder / "checkpoint/step-14/manifest.json").read_text())["train_state"]
        for folder in (tmp_path / "out", tmp_path / "clean")
    )
    assert state["guard"]["skipped"] == [[64, 88]]
    assert state["guard"]["rows"] == (14 + 3) * 8
    mean, clean_mean = (x["callbacks"]["mean_loss"] for x in (state, clean_state))
    assert mean["steps"] == clean_mean["steps"] == 14
    assert mean["sum"] == pytest.approx(clean_mean["sum"], rel=1e-6)


def test_a_run_that_rewound_resumes_with_the_data_that_come_next(ranks, tmp_path):
    """And with their learning rate: after the rewind, step 10 reads what step 13 would have."""
    stages = "--training.stages=[{from_step = 13, lr_scale = 0.25}]"
    constant = ["--lr_scheduler.warmup_steps=0", "--lr_scheduler.decay_ratio=0.0"]
    common = [*SAVE, "--lr_scheduler.total_steps=14", *constant, stages]
    guarded = [*common, *WATCH, "--guard.policy=rewind"]
    ranks(2, spoiled, arguments(tmp_path, *guarded, steps=12), bad=[10])
    run = ranks(1, spoiled, arguments(tmp_path, *guarded, steps=14))[0]
    clean = arguments(tmp_path, *common, f"--job.dump_folder={tmp_path / 'clean'}", steps=14)
    reference = ranks(2, spoiled, clean, drop=[8, 9, 10])[0]
    assert_same(run, tmp_path / "out", reference, tmp_path / "clean", rel=1e-5)
    rates = [record["lr"] for record in metrics(tmp_path / "out")]
    assert rates == pytest.approx([LR] * 9 + [LR / 4] * 5)


@pytest.mark.parametrize(
    "policy",
    [pytest.param("skip", marks=pytest.mark.slow), pytest.param("rewind", marks=pytest.mark.proof)],
)
def test_a_spike_with_no_checkpoint_to_go_back_to_is_skipped(ranks, tmp_path, policy):
    extra = [
        *WATCH,
        f"--guard.policy={policy}",
        "--checkpoint.enable",
        "--checkpoint.interval=50",
        "--ema.enable",
    ]
    run = ranks(2, spoiled, arguments(tmp_path, *extra, steps=12), bad=[9])[0]
    assert run["progress"]["skipped"] == 1
    (event,) = events(tmp_path / "out")
    assert (event["step"], event["rows"]) == (10, [72, 80])
    assert [r["skipped_steps"] for r in metrics(tmp_path / "out")][8:11] == [0, 1, 1]
    manifest = json.loads((tmp_path / "out/checkpoint/step-12/manifest.json").read_text())
    assert manifest["train_state"]["ema"] == {"counted": 11}


def test_weights_that_are_changed_already_are_not_called_left_out(ranks, tmp_path):
    extra = [
        *WATCH,
        "--guard.policy=rewind",
        "--checkpoint.enable",
        "--optimizer.early_step_in_backward",
    ]
    argv = arguments(tmp_path, *extra, "--training.max_norm=0", steps=12, local_batch=4)
    for answer in ranks(2, spoiled, argv, bad=[9], factor=float("nan")):
        assert answer.startswith("GuardError: step 10: loss nan")
        assert "There is no checkpoint yet" in answer


def test_warnings_change_nothing(ranks, tmp_path):
    run = ranks(2, spoiled, arguments(tmp_path, *WATCH, "--guard.policy=warn", steps=11), bad=[9])[
        0
    ]
    plain = arguments(tmp_path, f"--job.dump_folder={tmp_path / 'plain'}", steps=11)
    assert_same(run, tmp_path / "out", ranks(2, spoiled, plain, bad=[9])[0], tmp_path / "plain")
    (event,) = events(tmp_path / "out")
    assert event["policy"] == "warn"


def test_spike_after_spike_ends_the_run_on_every_rank(ranks, tmp_path):
    extra = [*SAVE, *WATCH, "--guard.policy=rewind", "--guard.limit=2"]
    answers = ranks(2, spoiled, arguments(tmp_path, *extra, steps=30), bad=range(10, 30))
    for answer in answers:
        assert answer.startswith("GuardError: step 9: loss ")
        assert "guard.limit" in answer
        assert "step-8" in answer
    assert [e["rows"] for e in events(tmp_path / "out")] == [[64, 88], [64, 96]]


def corrupted(argv, rank, name):
    """Train, and flip one bit of a weight of one rank after step 3."""
    config = resolve(argv, dist.get_world_size()).config

    def flip(_):
        if trainer.progress.step == 3 and dist.get_rank() == rank:
            model = trainer.engine.models[0]
            tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
            bits = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            bits.detach().view(torch.int32).view(-1)[0] ^= 1

    trainer = Trainer(config, preflight(config), arrange=first(flip))
    try:
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.close()
    return "ok"


@pytest.mark.parametrize(
    "layout", [x if x == "hsdp x ep" else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS]
)
def test_copies_stay_equal_bit_for_bit_in_every_layout(ranks, tmp_path, layout):
    extra = [*LAYOUTS[layout], "--guard.weight_hash_freq=1"]
    assert ranks(4, corrupted, arguments(tmp_path, *extra, steps=4), rank=-1, name="") == ["ok"] * 4


def test_experts_without_copies_are_not_compared(ranks, tmp_path):
    """Tensor parallelism copies routers and norms to its ranks, but no expert."""
    argv = arguments(tmp_path, *LAYOUTS["tp x ep"], "--guard.weight_hash_freq=1", steps=4)
    assert ranks(4, corrupted, argv, rank=3, name="layers.0.moe.experts.w1") == ["ok"] * 4


@pytest.mark.parametrize(
    ("layout", "rank", "name", "where"),
    [
        pytest.param(
            *("hsdp", 2, "layers.0.attention.wq.weight"),
            "along dp_replicate: rank 0 against rank 2",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            *("pp x tp", 1, "layers.0.attention_norm.weight"),
            "along tp: rank 0 against rank 1",
            marks=pytest.mark.slow,
        ),
        ("hsdp x ep", 3, "layers.0.moe.experts.w1", "along dp_replicate: rank 1 against rank 3"),
        (
            "hsdp x ep",
            3,
            "layers.1.moe.router.expert_bias",
            "along dp_shard: rank 2 against rank 3",
        ),
    ],
)
def test_one_flipped_bit_is_found_before_it_is_saved(ranks, tmp_path, layout, rank, name, where):
    extra = [
        *LAYOUTS[layout],
        "--guard.weight_hash_freq=3",
        "--checkpoint.enable",
        "--checkpoint.interval=3",
    ]
    for answer in ranks(4, corrupted, arguments(tmp_path, *extra, steps=6), rank=rank, name=name):
        assert answer.startswith("GuardError: after step 3: ranks hold different copies: ")
        assert f"{name} differs {where}" in answer
    assert not list((tmp_path / "out/checkpoint").glob("step-*"))
