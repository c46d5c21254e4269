"""The parity tool finds planted mistakes, and says what and where they are."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from tests.planted_mistakes import check
from torchtitan.config.sections.optim import Optimizer
from torchtitan.testing import parity
from torchtitan.testing.difference import Difference, Tolerances, difference
from torchtitan.testing.observe import Observation


def degrees(**by_axis):
    return [
        f"--parallelism.{parity.DEGREE_KEYS[axis]}={degree}" for axis, degree in by_axis.items()
    ]


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
            *("dropped_all_reduce", {"dp_replicate": 2, "tp": 2}, ", along dp_replicate (9 of"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("partial_norm_gradient", {"tp": 2, "cp": 2}, "layers.1.ffn_norm.weight: gradient is"),
            marks=pytest.mark.slow,
        ),
        pytest.param("shifted labels", {"cp": 2, "tp": 2}, "along cp (", marks=pytest.mark.slow),
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
    ("bug", "sentence"),
    [
        pytest.param("decayed_vectors", "norm.weight: update off by", marks=pytest.mark.slow),
        pytest.param("wrong_beta", "times its rounding, along", marks=pytest.mark.slow),
        (
            "later_gradient",
            "FAIL: layers.0.ffn_norm.weight: gradient off by 1.0e-02 in a later step, along",
        ),
    ],
)
def test_a_mistake_after_the_first_gradients_is_found(ranks, bug, sentence):
    for passed, text in ranks(2, check, degrees(dp_shard=2), bug, timeout=240):
        assert not passed
        assert sentence in text, text
        assert "(the first step's gradients are right)" in text


def test_a_parameter_without_a_gradient_is_named(ranks):
    for passed, text in ranks(2, check, degrees(dp_shard=2), "unused_parameter", timeout=240):
        assert not passed
        assert "FAIL: forward gives no gradient to norm.unused; it must" in text, text


def test_noise_of_the_size_of_rounding_passes(ranks):
    """Adam makes a full update of it where there is no other gradient."""
    for passed, text in ranks(2, check, degrees(dp_shard=2), "rounding_noise", timeout=240):
        assert passed, text


MIXTURE = [
    "--model.name=qwen3_moe",
    "--moe.balance_bias_rate=1e-3",
    "--parallelism.expert_parallel_degree=2",
]


@pytest.mark.parametrize(
    ("bug", "sentence"),
    [
        ("scaled experts", "FAIL: layers.1.moe.experts.w3: gradient is 2.00x, along ep (6 of"),
        pytest.param(
            "doubled bias",
            "FAIL: layers.0.moe.router.expert_bias: is 2.00x after step 1, along ep (the "
            "first step's",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "counted padding",
            "FAIL: layers.0.moe.router: counts 256 rows in step 1 instead of 192, along ep",
            marks=pytest.mark.slow,
        ),
        pytest.param("wrong inverse", ", so the forward is wrong too)", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_of_expert_parallelism_is_named(ranks, bug, sentence):
    argv = ["--training.local_batch_size=2", "--training.global_batch_size=4", *MIXTURE]
    for passed, text in ranks(2, check, argv, bug, timeout=240):
        assert not passed
        assert sentence in text, text
        assert "along ep" in text
        assert "2 ranks, dp_shard 2 x ep 2, against one process; 3 steps of 4 x 32 tokens" in text


@pytest.mark.parametrize(
    ("fault", "degrees", "axes"),
    [
        ({"ep"}, {"dp_shard": 4, "ep": 2}, ["ep"]),
        ({"ep", "tp"}, {"dp_shard": 2, "tp": 2, "ep": 2}, ["tp", "ep"]),
        ({"ep", "pp"}, {"pp": 2, "dp_shard": 2, "ep": 2}, ["pp", "ep"]),
        (
            {"ep", "dp_replicate"},
            {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
            ["dp_replicate", "ep"],
        ),
        ({"tp"}, {"dp_shard": 2, "tp": 2, "ep": 4}, ["tp"]),
    ],
)
def test_the_smallest_set_of_axes_is_found(monkeypatch, fault, degrees, axes):
    """Of a fault that occurs where all of its axes have several ranks."""

    def compare(argv, tolerances):
        sizes = dict(
            flag.removeprefix("--parallelism.").split("=") for flag in argv if "parallelism" in flag
        )
        tried = {axis: int(sizes[key]) for axis, key in keys.items()}
        assert tried["dp_shard"] * tried["tp"] * tried["cp"] % tried["ep"] == 0
        return mock.Mock(problems=all(tried[axis] > 1 for axis in fault))

    keys = parity.DEGREE_KEYS | {"ep": "expert_parallel_degree"}
    monkeypatch.setattr(parity, "compare", compare)
    assert parity.find_axes([], dict.fromkeys(keys, 1) | degrees, 2, Tolerances()) == axes


@pytest.mark.parametrize(("ties", "equal"), [(1, True), (0, False)])
def test_a_token_between_two_equal_experts_may_go_to_either(ties, equal):
    """Its gradients are others, in this step alone. For a token that scored otherwise it is a
    mistake.
    """

    def observed(load, loss, gradient):
        return Observation(
            losses=[2.0, loss],
            grad_norms=[1.0, 1.0],
            tokens=[8, 16],
            gradients=[{"w": torch.ones(1, 2)}, {"w": torch.tensor([[1.0, gradient]])}],
            weights=[{"w": torch.ones(1, 2)}] * 2,
            loads=[torch.tensor([[4.0, 4.0]]), torch.tensor([load])],
            ties=[torch.tensor([0.0]), torch.tensor([float(ties)])],
        )

    run = observed([3.0, 5.0], 2.1, 0.9)
    expected = observed([4.0, 4.0], 2.0, 1.0)
    found = difference(run, expected, Optimizer())
    assert (found.flips, found.first_flip) == (1, (2, 0))
    assert (found.problems(Tolerances()) == []) is equal


def test_an_update_may_be_off_by_its_rounding_and_no_more():
    weights = torch.tensor([[0.0, 1e-3, 1.0, -3.0]])
    optimizer = Optimizer(lr=1e-3)

    def off(change):
        run = Observation(losses=[1.0], grad_norms=[1.0])
        expected = Observation(losses=[1.0], grad_norms=[1.0])
        run.gradients = expected.gradients = [{"w": weights}]
        expected.weights = [{"w": weights}]
        run.weights = [{"w": weights + change}]
        return difference(run, expected, optimizer).problems(Tolerances())

    eps = torch.finfo(torch.float32).eps
    assert off(2 * eps * weights.abs()) == []
    assert off(1e-6 * optimizer.lr) == []
    assert off(torch.tensor([1e-5 * optimizer.lr, 0.0, 0.0, 0.0])) == [
        "w: update off by 5.2e+00 times its rounding"
    ]
    assert off(torch.tensor([0.0, 0.0, 5 * eps, 0.0])) != []
    assert off(torch.full((4,), torch.nan)) == ["w: update off by inf times its rounding"]


def test_where_tokens_go_astray():
    """If the first layer's go to the right experts, what is wrong comes after its router."""
    right = {
        "grad_norm": 0.0,
        "mtp_loss": 0.0,
        "weights": {"output.weight": 0.0},
        "validation_loss": 0.0,
        "tokens_differ": False,
    }
    wrong = {
        "loss": 0.1,
        "first_loss": 0.1,
        "step": 0,
        "gradients": {"output.weight": 0.1},
        "later_gradients": {},
    }
    astray = {"flips": 3, "first_flip": (1, 1), "miscount": None, "biases": {}}
    finding = parity.Finding(
        Difference(**right, **wrong, **astray), ["loss"], "output.weight", None
    )
    text = parity.verdict(finding, ["ep"], Tolerances())
    assert "the forward is wrong too, and from layer 1 on tokens are sent to other experts" in text


@pytest.mark.parametrize(
    ("world", "argv"),
    [
        (4, [*SMALL, *degrees(dp_replicate=2, dp_shard=2), "--checkpoint.enable_checkpoint=true"]),
        pytest.param(
            4,
            [*MIXTURE, *degrees(pp=2), "--moe.sequence_balance_loss=0.01"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            [*degrees(pp=2, tp=2), "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            [
                *degrees(pp=2),
                "--parallelism.pipeline_parallel_schedule=LoopedBFS",
                "--model.overrides.n_layers=2",
            ],
            marks=pytest.mark.proof,
        ),
        pytest.param(
            2,
            [
                *degrees(pp=2),
                "--model.overrides.n_layers=6",
                "--parallelism.pipeline_parallel_first_stage_less_layers=4",
                "--parallelism.pipeline_parallel_last_stage_less_layers=0",
                "--parallelism.pipeline_parallel_microbatches=4",
            ],
            marks=pytest.mark.slow,
        ),
        (
            2,
            [
                *degrees(cp=2),
                "--training.seq_len=1024",
                "--model.flavor=1B",
                "--model.overrides.vocab_size=2048",
            ],
        ),
        (
            2,
            [
                *degrees(cp=2),
                "--training.packing=best_fit",
                "--training.document_mask",
                "--training.sources=[{name = 'a', text_column = 'body'}, {name = 'b'}]",
                "--training.stages=[{from_step = 2, weights = {a = 2}}]",
            ],
        ),
    ],
)
def test_a_right_run_passes(ranks, world, argv):
    for passed, text in ranks(world, check, argv, None, timeout=120):
        assert passed, text
        assert "PASS" in text


def test_tolerances_are_tight_enough_to_matter(ranks):
    """The differences reported are those of floating point, and not those of a comparison with
    itself.
    """
    _, text = ranks(2, check, [*degrees(tp=2)], None, timeout=120)[0]
    largest = float(text.split("gradients")[1].split()[0])
    assert 0 < largest < 1e-5
    assert torch.finfo(torch.float32).eps < 1e-6


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["torchtitan", "torchrun"])
def test_the_command(tmp_path, launcher):
    command = [sys.executable, "-m"]
    ranks = "--nproc-per-node=2"
    if launcher == "torchrun":
        command = [*command, "torch.distributed.run", "--standalone", ranks, "-m"]
        ranks = ""
    flags = [f"--job.dump_folder={tmp_path / 'no'}", "--parallelism.pipeline_parallel_degree=2"]
    argv = [*command, "torchtitan", "parity", *flags, "debug_model", *filter(None, [ranks])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, pp 2, schedule 1F1B, against one process" in done.stdout
    assert "PASS" in done.stdout
    assert not (tmp_path / "no").exists()
