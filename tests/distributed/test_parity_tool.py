"""The parity tool finds planted mistakes, and says what and where they are."""

import subprocess
import sys
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.config.sections.optim import Optimizer
from torchtitan.models.moe import Experts, Router
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.parallel import expert
from torchtitan.parallel.collectives import local
from torchtitan.testing import parity
from torchtitan.testing.compare import Observation
from torchtitan.testing.difference import Difference, Tolerances, difference
from torchtitan.train import build
from torchtitan.train.forward import Compute

REAL_PARALLELIZE = build.parallelize
REAL_PART = Compute.own_part
REAL_ALL_REDUCE = dist.all_reduce
REAL_BALANCE = ExpertBalance.step
REAL_BY_EXPERT = expert._by_expert
REAL_OPTIMIZER = build.build_optimizer


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
    """HSDP's reduction over the replicas is left out for the last block: the first of three in each
    backward. Counts of tokens and losses, which are reduced by the same group, are small.
    """
    replicas = group is not None and group.group_desc == "mesh_dp_replicate"
    ours = replicas and tensor.numel() > 100
    calls += [None] if ours else []
    if not ours or len(calls) % 3 != 1:
        REAL_ALL_REDUCE(tensor, *args, group=group, **options)


def partial_norm_gradient(models, mesh):
    """A norm's gradient stays the sum over this rank's part of the sequence, as if it were not
    reduced over tp.
    """
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


def on_experts(kind, change):
    """Let `change(module)` spoil the modules of a kind where experts are on several ranks."""

    def spoil(models, mesh):
        for module in (module for model in models for module in model.modules()):
            if mesh.ep is not None and isinstance(module, kind):
                change(module)

    return after_build(spoil)


def scaled_experts(experts):
    """As if gradients were summed over ep once more."""
    for weight in experts.parameters():
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))


def counted_padding(router):
    """Every token has a weight."""
    router.register_forward_pre_hook(lambda _, args: (args[0], args[1].clamp(min=1e-30)))


def doubled_bias(router):
    """The routing bias is updated twice in each step."""
    router.doubled = True


def balance_twice(self, skip=None):
    before = {layer: router.expert_bias.clone() for layer, router in self.routers.items()}
    REAL_BALANCE(self, skip)
    for layer, router in self.routers.items():
        if hasattr(router, "doubled"):
            router.expert_bias += router.expert_bias - before[layer]


def wrong_inverse(received, rows):
    """Rows return from the experts in the order in which they came to them, instead of its
    inverse.
    """
    order, _ = REAL_BY_EXPERT(received, rows)
    return order, order


def rounding_noise(models, mesh):
    """Noise of the size of rounding, also in elements whose gradient is 0, as in rows of tokens
    that don't occur.
    """
    eps = torch.finfo(torch.float32).eps
    for param in (param for model in models for param in model.parameters()):
        param.register_post_accumulate_grad_hook(
            lambda p: local(p.grad).add_(
                torch.randn_like(local(p.grad)), alpha=eps * local(p.grad).abs().max().item()
            )
        )


def later_gradient(models, mesh, calls=[]):  # noqa: B006 - counts the calls
    """A norm's gradient is wrong in all steps but the first: too little to be seen in loss and
    gradient norm.
    """

    def spoil(p):
        calls.append(None)
        p.grad.mul_(1.0 if len(calls) == 1 else 1.01)

    models[0].layers["0"].ffn_norm.weight.register_post_accumulate_grad_hook(spoil)


def decayed_vectors(models, settings, *args):
    """Norms are in the group with weight decay."""
    optimizer = REAL_OPTIMIZER(models, settings, *args)
    for group in optimizer.param_groups:
        group["weight_decay"] = settings.weight_decay
    return optimizer


def wrong_beta(models, settings, *args):
    return REAL_OPTIMIZER(models, settings.model_copy(update={"beta2": 0.96}), *args)


@contextmanager
def planted(bug):
    with ExitStack() as stack:
        if bug == "shifted labels":
            stack.enter_context(mock.patch.object(Compute, "own_part", shifted_labels))
        elif bug == "dropped_all_reduce":
            stack.enter_context(mock.patch.object(dist, "all_reduce", dropped_all_reduce))
        elif bug in ("decayed_vectors", "wrong_beta"):
            stack.enter_context(mock.patch.object(build, "build_optimizer", globals()[bug]))
        elif bug == "wrong inverse":
            stack.enter_context(mock.patch.object(expert, "_by_expert", wrong_inverse))
        elif bug == "scaled experts":
            stack.enter_context(on_experts(Experts, scaled_experts))
        elif bug == "counted padding":
            stack.enter_context(on_experts(Router, counted_padding))
        elif bug == "doubled bias":
            stack.enter_context(on_experts(Router, doubled_bias))
            stack.enter_context(mock.patch.object(ExpertBalance, "step", balance_twice))
        elif bug:
            stack.enter_context(after_build(globals()[bug]))
        yield


def check(argv, bug):
    with planted(bug):
        return parity.check(argv)


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
    ("bug", "sentence"),
    [
        ("decayed_vectors", "norm.weight: update off by"),
        ("wrong_beta", "times its rounding, along"),
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
        (
            "doubled bias",
            "FAIL: layers.0.moe.router.expert_bias: is 2.00x after step 1, along ep (the "
            "first step's",
        ),
        (
            "counted padding",
            "FAIL: layers.0.moe.router: counts 256 rows in step 1 instead of 192, along ep",
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
        (4, [*MIXTURE, *degrees(pp=2), "--moe.sequence_balance_loss=0.01"]),
        (4, [*degrees(pp=2, tp=2), "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]),
        (
            2,
            [
                *degrees(pp=2),
                "--parallelism.pipeline_parallel_schedule=LoopedBFS",
                "--model.overrides.n_layers=2",
            ],
        ),
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
        (
            2,
            [
                *degrees(cp=2),
                "--training.seq_len=1024",
                "--model.flavor=1B",
                "--model.overrides.vocab_size=2048",
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


@pytest.mark.e2e
@pytest.mark.parametrize(
    "launcher", ["torchtitan", pytest.param("torchrun", marks=pytest.mark.slow)]
)
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
