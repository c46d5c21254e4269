"""The examples of the documentation: one file each, that changes one thing without a fork."""

import csv
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.examples import (
    all_at_once,
    arithmetic,
    characters,
    gated_attention,
    relu_squared,
    soft_cap,
    z_loss,
)
from tests.rounding import assert_rounds
from tests.runs import SAVE, SCHEDULE, arguments, losses, train
from torchtitan.checkpoint.format.manifest import read_manifest
from torchtitan.checkpoint.inspect import settings
from torchtitan.config import resolve
from torchtitan.config.registry import data_sources, tokenizers
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.inference.load import find, open_tokenizer
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.testing import parity

GATED = [f"--experimental.custom_import={gated_attention.__name__}", "--model.name=llama3_gated"]
ALL = [
    f"--experimental.custom_import={all_at_once.__name__}",
    "--optimizer.name=lion",
    "--optimizer.lr=1e-3",
    "--lr_scheduler.name=inverse_sqrt",
    "--training.loss=z_loss",
    "--custom.z_loss.coefficient=0.1",
    "--training.dataset=arithmetic",
    "--training.dataset_path=none",
    "--custom.arithmetic.largest=99",
    "--model.tokenizer=characters",
    "--metrics.sinks=csv_file",
    '--custom.csv_file.columns=["step", "loss", "lr", "grad_norm"]',
]
TP = ["--parallelism.tensor_parallel_degree=2", "--training.loss_chunks=2"]


@pytest.mark.parametrize(
    ("world", "axes"),
    [(2, ["tensor"]), pytest.param(4, ["tensor", "pipeline"], marks=pytest.mark.slow)],
)
def test_gated_attention_trains_as_on_one_process(ranks, world, axes):
    degrees = [f"--parallelism.{axis}_parallel_degree=2" for axis in axes]
    for passed, text in ranks(
        world, parity.check, [*GATED, *degrees, "--training.local_batch_size=2"], timeout=240
    ):
        assert passed, text


@pytest.mark.parametrize(
    ("module", "family", "flags"),
    [
        (relu_squared, "qwen3_moe_relu2", ["--parallelism.expert_parallel_degree=2"]),
        (
            soft_cap,
            "llama3_capped",
            ["--parallelism.tensor_parallel_degree=2", "--training.loss_chunks=2"],
        ),
    ],
)
def test_other_parts_of_the_model_train_as_on_one_process(ranks, module, family, flags):
    argv = [f"--experimental.custom_import={module.__name__}", f"--model.name={family}", *flags]
    for passed, text in ranks(2, parity.check, argv, timeout=240):
        assert passed, text


def test_open_gates_are_llama():
    """A gate whose scores are zero is one half."""
    torch.manual_seed(0)
    args = get_spec("llama3").args("debugmodel", {"n_layers": 2})
    plain = get_spec("llama3").build(args, attention_backend("cpu"))
    gated = get_spec("llama3_gated").build(args, attention_backend("cpu"))
    missing = gated.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == [f"layers.{i}.attention.gate.weight" for i in range(2)]
    tokens = torch.randint(0, args.vocab_size, (2, 64))
    with torch.no_grad():
        ungated = gated(tokens)
        for block in gated.layers.values():
            block.attention.gate.weight.zero_()
            block.attention.wo.weight.mul_(2)
        assert_rounds(gated(tokens), plain(tokens), terms=256, chain=24)
        assert not torch.allclose(ungated, plain(tokens), atol=1e-2)


# ---- all kinds in one run


def columns(folder: Path) -> dict[str, list[float]]:
    with (folder / "out/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """Eight steps on one rank: the run, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return ranks(1, train, arguments(folder, SCHEDULE, *ALL, steps=8))[0], folder


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TP, ["--training.loss_chunks=4"]),
        pytest.param(
            ["--parallelism.pipeline_parallel_degree=2", "--optimizer.implementation=foreach"],
            ["--compile.enable", "--compile.backend=aot_eager", *TP],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_everything_together_trains_and_resumes_on_other_layouts(
    ranks, whole, tmp_path, first, second
):
    alone, folder = whole
    argv = arguments(tmp_path, SCHEDULE, *ALL, *SAVE, steps=8)
    ranks(2, train, [*argv, *first, "--training.steps=5"], timeout=240)
    resumed = ranks(2, train, [*argv, *second], timeout=240)[0]
    assert losses(resumed) == pytest.approx(losses(alone), rel=1e-4)
    assert columns(tmp_path).keys() == {"step", "loss", "lr", "grad_norm"}
    for name, values in columns(folder).items():
        assert columns(tmp_path)[name] == pytest.approx(values, rel=1e-3), name
        assert values == [record[name] for record in alone["metrics"]]
    source = find(str(tmp_path / "out"), all_at_once.__name__)
    assert open_tokenizer(source, None).decode([10, 11, 100]) == "ab<end>"
    assert settings(read_manifest(source.folder))["custom.z_loss.coefficient"] == 0.1
    # The sign of a mean near zero depends on rounding; a few weights move by the learning rate the
    # other way.
    for name, value in alone["weights"].items():
        moved = (value - alone["initial"][name]).abs().mean()
        assert (resumed["weights"][name] - value).abs().mean() < 1e-3 * moved, name


def test_the_effective_configuration_repeats_the_run(whole):
    _, folder = whole
    config = resolve([f"--job.config_file={folder / 'out/config.toml'}"], 1).config
    assert config.custom.tables["arithmetic"] == arithmetic.Keys(largest=99)
    assert config.custom.tables["z_loss"] == z_loss.Keys(coefficient=0.1)
    assert config.custom.tables["lion"].beta2 == 0.99
    flags = [f"--job.dump_folder={folder / 'out'}", *ALL, *arguments(folder, SCHEDULE, steps=8)]
    assert resolve([*flags, *ALL], 1).config.custom == config.custom


# ---- each against its formula


def test_lion_moves_by_the_sign_of_a_running_mean():
    model = nn.Linear(3, 2)
    argv = [*ALL[:3], "--custom.lion.beta1=0.5", "--optimizer.weight_decay=0.25"]
    config = resolve(argv, 1).config
    optimizer = build_optimizer([model], config.optimizer, config.custom)
    expected = model.weight.detach().double().clone()
    mean = torch.zeros(2, 3, dtype=torch.float64)
    torch.manual_seed(0)
    for step in range(4):
        gradient = torch.randn(2, 3)
        model.weight.grad = gradient
        model.bias.grad = torch.zeros(2)
        for group in optimizer.param_groups:
            group["lr"] = rate = 0.1 / (step + 1)
        optimizer.step()
        direction = (0.5 * mean + 0.5 * gradient).sign()
        expected = expected - rate * direction - rate * 0.25 * expected
        mean = 0.99 * mean + 0.01 * gradient
        torch.testing.assert_close(model.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "timescale"), [([], 5), (["--custom.inverse_sqrt.timescale=9"], 9)]
)
def test_inverse_sqrt_is_that_of_transformers(flags, timescale):
    hf = pytest.importorskip("transformers.optimization")
    argv = [
        "--training.steps=40",
        "--lr_scheduler.warmup_steps=5",
        "--lr_scheduler.min_lr_factor=0.2",
    ]
    config = resolve([ALL[0], ALL[3], *argv, *flags], 1).config
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr_scale": 1.0}], lr=1.0
    )
    theirs = hf.get_inverse_sqrt_schedule(optimizer, num_warmup_steps=5, timescale=timescale)
    ours = LRSchedule(optimizer, 1.0, config.lr_scheduler, config.custom)
    for step in range(40):
        optimizer.step()
        theirs.step()
        (factor,) = theirs.get_last_lr()
        assert ours.apply() == pytest.approx(factor if step < 5 else 0.2 + 0.8 * factor)
        ours.advance()


def test_z_loss_is_its_formula():
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 7, requires_grad=True)
    labels = torch.randint(0, 7, (3, 4))
    labels[0, 1:] = labels[2] = -100
    values = z_loss.z_loss(z_loss.Keys(coefficient=0.3))(logits, labels)
    exact = logits.detach().double().requires_grad_()
    entropy = F.cross_entropy(exact.transpose(1, 2), labels, reduction="none")
    expected = (entropy + 0.3 * exact.exp().sum(-1).log() ** 2 * (labels >= 0)).sum(1)
    torch.testing.assert_close(values.double(), expected)
    assert values[2] == 0
    (ours,), (theirs,) = (
        torch.autograd.grad(values.sum(), logits),
        torch.autograd.grad(expected.sum(), exact),
    )
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)


def test_worker_processes_can_make_tokenizer_and_source_again():
    config = resolve([*ALL, "--custom.characters.alphabet=abc?"], 1).config
    tokenizer = build_tokenizer("anywhere", tokenizers.maker("characters", config.custom))
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode_document("cab!") == [2, 0, 1, 3, 4] == tokenizer.encode_document("cab!")
    assert again.decode([2, 0, 1, 3, 4]) == "cab?<end>"
    assert again.byte_lengths().tolist() == [1, 1, 1, 1, 0]
    assert (
        again.fingerprint
        == tokenizer.fingerprint
        != characters.Characters(Path(), characters.Keys()).fingerprint
    )
    make = pickle.loads(pickle.dumps(data_sources.maker("arithmetic", config.custom)))
    sums = make(None)
    for i in (0, 123_456):
        lines = sums[i].splitlines()
        assert lines == data_sources.maker("arithmetic", config.custom)(None)[i].splitlines()
        assert all(eval(line.replace("=", "==")) for line in lines)
        assert math.log10(max(int(line.split()[0]) for line in lines)) < 2
