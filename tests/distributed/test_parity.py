"""The numbers don't depend on the layout: every layout's run equals a plain single-process loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.runs import arguments, losses, train
from torchtitan.config import resolve
from torchtitan.data.loader import StepBatch
from torchtitan.models.layers import attention_backend
from torchtitan.train.build import build_data
from torchtitan.train.preflight import preflight

STEPS = 10

LAYOUTS = {
    "one process, accumulating": (1, ["--training.local_batch_size=2"]),
    "fsdp 2": (2, ["--training.local_batch_size=4"]),
    "fsdp 2, accumulating": (2, ["--training.local_batch_size=1"]),
    "fsdp 4": (4, ["--training.local_batch_size=2"]),
    "fsdp 4, accumulating": (4, ["--training.local_batch_size=1"]),
    "fsdp 2, never resharded": (2, ["--parallelism.fsdp_reshard_after_forward=never"]),
    "fsdp 2, always resharded": (2, ["--parallelism.fsdp_reshard_after_forward=always"]),
    "fsdp 2, offloaded": (2, ["--training.enable_cpu_offload"]),
    "hsdp 2 x 2": (4, ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=1"]),
    "ddp 2": (2, ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=4"]),
    "ddp 2, accumulating": (2, ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=2"]),
}


def plain_loop(argv: list[str]) -> dict:
    """The reference: the same model, data and optimizer in a dozen lines of ordinary PyTorch; no FSDP, no trainer."""
    config = resolve(argv, 1).config
    setup = preflight(config)
    model = setup.spec.build(setup.args, attention_backend("cpu"))
    model.load_state_dict(torch.load(f"{config.job.dump_folder}/initial.pt"))
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    loader = build_data(config, "training", setup.tokenizer)
    batches, curve, norms = iter(loader), [], []
    for step in range(STEPS):
        batch: StepBatch = next(batches)
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten(0, 1))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * ((step + 1) / 2 if step < 2 else 1 - (step - 1) / (STEPS - 1))
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    loader.close()
    return {"losses": curve, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def save_initial(argv: list[str]) -> dict:
    run = train(argv)
    torch.save(run["initial"], f"{resolve(argv, 1).config.job.dump_folder}/initial.pt")
    return run


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    argv = arguments(folder, steps=STEPS, local_batch=8)
    initial = ranks(1, save_initial, argv)[0]["initial"]
    return ranks(1, plain_loop, argv)[0] | {"initial": initial}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_curve_and_weights_equal_a_plain_loop(ranks, reference, tmp_path, layout):
    world, extra = LAYOUTS[layout]
    results = ranks(world, train, arguments(tmp_path, *extra, steps=STEPS, local_batch=2), timeout=120)
    run = results[0]
    for name, value in reference["initial"].items():
        assert torch.equal(run["initial"][name], value), f"initial {name}"
    assert losses(run) == pytest.approx(reference["losses"], rel=1e-5)
    assert [r["grad_norm"] for r in run["metrics"]] == pytest.approx(reference["norms"], rel=1e-4)
    assert run["metrics"][-1]["tokens"] == STEPS * 8 * 32
    for name, value in reference["weights"].items():
        torch.testing.assert_close(run["weights"][name], value, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        for other in results[1:]:
            assert torch.equal(other["weights"][name], run["weights"][name]), f"ranks disagree on {name}"


def test_the_reference_learns(reference):
    """Guards the comparison: curves that don't move would agree under any mistake."""
    assert reference["losses"][-1] < reference["losses"][0] - 1


@pytest.mark.parametrize(("dtype", "param"), [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_bf16_stays_near_fp32(ranks, reference, tmp_path, dtype, param):
    extra = [f"--training.dtype={dtype}", f"--training.mixed_precision_param={param}"]
    run = ranks(2, train, arguments(tmp_path, *extra, steps=STEPS))[0]
    assert losses(run) == pytest.approx(reference["losses"], rel=0.03)
    assert losses(run) != pytest.approx(reference["losses"], rel=1e-6)
    assert run["weights"]["output.weight"].dtype == getattr(torch, dtype)


def test_two_runs_are_identical(ranks, tmp_path):
    argv = [arguments(tmp_path, f"--job.dump_folder={tmp_path / name}", "--debug.deterministic") for name in "ab"]
    first, second = (ranks(2, train, args)[0] for args in argv)
    assert losses(first) == losses(second)


def test_another_seed_is_another_run(ranks, tmp_path):
    argv = [arguments(tmp_path, f"--job.dump_folder={tmp_path / s}", f"--debug.seed={s}") for s in "12"]
    first, second = (ranks(1, train, args)[0] for args in argv)
    assert losses(first) != losses(second)
