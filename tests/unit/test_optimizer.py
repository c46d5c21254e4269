"""Learning rate against its closed form; weight decay on matrices only."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rounding import assert_rounds
from torchtitan.config import resolve
from torchtitan.config.sections.optim import LRScheduler, Optimizer, ParamGroup
from torchtitan.models.layers.linear import PerHead
from torchtitan.optim import optimizer as optimizer_module
from torchtitan.optim.lr_schedule import LRSchedule, lr_factor
from torchtitan.optim.optimizer import build_optimizer


def curve(total, **kwargs):
    schedule = LRScheduler(total_steps=total, **kwargs)
    return [lr_factor(step, schedule) for step in range(total)]


SHAPES = {
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: 1 - math.sqrt(t),
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
}


@pytest.mark.parametrize(("decay_type", "shape"), SHAPES.items())
def test_decay_shapes_end_at_the_floor(decay_type, shape):
    factors = curve(9, warmup_steps=0, decay_type=decay_type, min_lr_factor=0.1)
    assert factors == pytest.approx([0.1 + 0.9 * shape(i / 9) for i in range(9)])
    beyond = lr_factor(
        50, LRScheduler(total_steps=9, warmup_steps=0, decay_type=decay_type, min_lr_factor=0.1)
    )
    assert beyond == pytest.approx(0.1)


def named(name, *flags, steps=40, warmup=8):
    """The factor at every step, and the effective configuration."""
    argv = [
        f"--training.steps={steps}",
        f"--lr_scheduler.warmup_steps={warmup}",
        f"--lr_scheduler.name={name}",
        *flags,
    ]
    schedule = resolve(argv, 1).config.lr_scheduler
    return [lr_factor(step, schedule) for step in range(steps)], schedule


def ramp(schedule):
    """`schedule(t)` after 8 steps of warm-up; `t` runs over 32 steps, from 0 to 31/32."""
    return [(step + 1) / 8 for step in range(8)] + [schedule(step / 32) for step in range(32)]


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_decays_from_the_end_of_warmup(name):
    factors, schedule = named(name, "--lr_scheduler.min_lr_factor=0.1")
    assert factors == pytest.approx(ramp(lambda t: 0.1 + 0.9 * SHAPES[name](t)))
    assert (schedule.decay_type, schedule.decay_ratio) == (name, None)


@pytest.mark.parametrize(("flags", "decay"), [((), 8), (("--lr_scheduler.decay_ratio=0.5",), 20)])
@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_wsd_stays_constant_and_then_decays(shape, flags, decay):
    flags += (f"--lr_scheduler.decay_type={shape}",) if shape else ()
    factors, _ = named("wsd", *flags)
    tail = [SHAPES[shape or "linear"](i / decay) for i in range(decay)]
    assert factors == pytest.approx(ramp(lambda t: 1.0)[: 40 - decay] + tail)


def test_without_a_name_the_schedule_is_that_of_its_keys():
    flags = ["--training.steps=40", "--lr_scheduler.warmup_steps=8"]
    schedule = resolve(
        [*flags, "--lr_scheduler.decay_ratio=0.2", "--lr_scheduler.decay_type=sqrt"], 1
    ).config
    assert [lr_factor(step, schedule.lr_scheduler) for step in range(40)] == named(
        "wsd", "--lr_scheduler.decay_type=sqrt"
    )[0]
    schedule = resolve(flags, 1).config.lr_scheduler
    assert [lr_factor(step, schedule) for step in range(40)] == named("linear")[0]


def test_named_schedules_are_those_of_torch_and_transformers():
    """After warm-up, which begins with a factor of 0 there."""
    hf = pytest.importorskip("transformers.optimization")

    def theirs(make, **options):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = make(optimizer, **options)
        out = []
        for _ in range(40):
            optimizer.step()
            out.append(scheduler.get_last_lr()[0])
            scheduler.step()
        return pytest.approx(out[8:])

    whole = {"num_warmup_steps": 8, "num_training_steps": 40}
    assert named("linear")[0][8:] == theirs(hf.get_linear_schedule_with_warmup, **whole)
    assert named("cosine")[0][8:] == theirs(hf.get_cosine_schedule_with_warmup, **whole)
    constant = theirs(hf.get_constant_schedule_with_warmup, num_warmup_steps=8)
    assert named("constant")[0][8:] == constant
    parts = {
        "num_warmup_steps": 8,
        "num_stable_steps": 24,
        "num_decay_steps": 8,
        "min_lr_ratio": 0.1,
    }
    floor = ["--lr_scheduler.min_lr_factor=0.1"]
    for ours, shape in {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}.items():
        factors, _ = named("wsd", f"--lr_scheduler.decay_type={ours}", *floor)
        assert factors[8:] == theirs(hf.get_wsd_schedule, decay_type=shape, **parts)
    torchs = torch.optim.lr_scheduler
    linear = theirs(torchs.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=40)
    assert named("linear", *floor, warmup=0)[0][8:] == linear
    cosine = theirs(torchs.CosineAnnealingLR, T_max=40, eta_min=0.1)
    assert named("cosine", *floor, warmup=0)[0][8:] == cosine


def test_a_short_run_cuts_a_long_schedule_with_a_warning(tmp_path):
    """A file for 1000 steps with `--training.steps`: as TorchTitan 0.2, warm-up first, then what is
    left decays.
    """
    file = tmp_path / "long.toml"
    file.write_text(
        "[training]\nsteps = 1000\n[lr_scheduler]\nwarmup_steps = 200\ndecay_ratio = 0.8\n"
    )
    resolved = resolve(["--config", str(file), "--training.steps=10"], 1)
    schedule = resolved.config.lr_scheduler
    assert [lr_factor(step, schedule) for step in range(10)] == pytest.approx(
        [(step + 1) / 10 for step in range(10)]
    )
    assert resolved.warnings == [
        f"{file}:4: lr_scheduler.warmup_steps: 200 cut to total_steps 10",
        f"{file}:5: lr_scheduler.decay_ratio: 0.8 cut to 0 steps, which 10 warmup_steps "
        "leave of 10",
    ]
    resolved = resolve(
        ["--config", str(file), "--training.steps=300", "--lr_scheduler.warmup_steps=100"], 1
    )
    schedule = resolved.config.lr_scheduler
    factors = [lr_factor(step, schedule) for step in range(300)]
    assert factors == pytest.approx(
        [(s + 1) / 100 for s in range(100)] + [1 - i / 200 for i in range(200)]
    )
    assert resolved.warnings == [
        f"{file}:5: lr_scheduler.decay_ratio: 0.8 cut to 200 steps, which 100 "
        "warmup_steps leave of 300"
    ]
    assert resolve(["--config", str(file)], 1).warnings == []


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize(("name", "decayed"), [("AdamW", 1 - 0.5 * 0.25), ("Adam", None)])
def test_weight_decay_spares_vectors(name, decayed, implementation):
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(
        [model], Optimizer(name=name, lr=0.5, weight_decay=0.25, implementation=implementation)
    )
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(before)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    after = dict(model.named_parameters())
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert torch.equal(after["0.bias"], before["0.bias"])
    if decayed:
        assert_rounds(after["0.weight"].detach(), before["0.weight"] * decayed, terms=1, chain=2)
    else:
        assert not torch.equal(after["0.weight"], before["0.weight"])


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_filters_and_stacked_biases_are_vectors(name):
    """Without weight decay, and not for Muon, though they have two dimensions."""
    block = nn.Module()
    block.moe = nn.Module()
    block.moe.b1 = nn.Parameter(torch.ones(3, 4))
    block.q_conv = PerHead(6, 4)
    block.w1 = nn.Linear(4, 6, bias=False)
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": block})})
    optimizer = build_optimizer([model], Optimizer(name=name, weight_decay=0.5))
    decay = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    muon = {p for g in optimizer.param_groups if "ns_steps" in g for p in g["params"]}
    assert decay[block.w1.weight] == 0.5
    assert decay[block.moe.b1] == decay[block.q_conv.weight] == 0
    assert muon == ({block.w1.weight} if name == "Muon" else set())


def test_schedule_resumes_where_it_was():
    model = nn.Linear(2, 2)
    config = LRScheduler(total_steps=10, warmup_steps=3)
    first = LRSchedule(build_optimizer([model], Optimizer()), 1.0, config)
    rates = []
    for _ in range(10):
        rates.append(first.apply())
        first.advance()
        if len(rates) == 4:
            saved = first.state_dict()
    second = LRSchedule(build_optimizer([model], Optimizer()), 1.0, config)
    second.load_state_dict(saved)
    assert second.apply() == rates[4]
    assert second.optimizer.param_groups[0]["lr"] == rates[4]


def test_parameter_groups_set_rate_and_decay_and_the_first_match_counts():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.RMSNorm(4))
    groups = [
        ParamGroup(pattern="0.*", lr_scale=0.5),
        ParamGroup(pattern="?.weight", weight_decay=0.3),
    ]
    optimizer = build_optimizer([model], Optimizer(weight_decay=0.1, param_groups=groups))
    rate = LRSchedule(optimizer, 1.0, LRScheduler(total_steps=9, warmup_steps=2)).apply()
    assert rate == pytest.approx(0.5)
    found = {
        id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]
    }
    own = {name: found[id(p)] for name, p in model.named_parameters()}
    assert own == {
        "0.weight": (0.25, 0.1),
        "0.bias": (0.25, 0.0),
        "1.weight": (0.5, 0.3),
        "2.weight": (0.5, 0.3),
    }


def test_bf16_state_is_bf16_and_follows_adamw():
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    narrow = nn.Linear(8, 8)
    narrow.load_state_dict(plain.state_dict())
    pair = [
        build_optimizer([m], Optimizer(lr=1e-2, state_dtype=d))
        for m, d in ((plain, "float32"), (narrow, "bfloat16"))
    ]
    for _ in range(10):
        gradient = torch.randn(8, 8)
        for model, optimizer in zip((plain, narrow), pair, strict=True):
            model.weight.grad = gradient.clone()
            optimizer.step()
    assert pair[1].state[narrow.weight]["exp_avg"].dtype == torch.bfloat16
    assert not torch.equal(narrow.weight, plain.weight)
    # Moments round by up to eps / 2, and keep what they rounded before: 10 updates are off by 1 %
    # of lr each.
    torch.testing.assert_close(narrow.weight, plain.weight, rtol=0, atol=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_bf16_state_is_updated_together_as_weight_by_weight(fused, monkeypatch):
    """In groups of a few weights, bit for bit; nothing changes where the device skips."""
    monkeypatch.setattr(optimizer_module, "_UPDATED_ELEMENTS", 30)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 20))
    kind = "fused" if fused else "foreach"
    settings = Optimizer(lr=0.1, weight_decay=0.2, state_dtype="bfloat16", implementation=kind)
    optimizer = build_optimizer([model], settings)
    assert optimizer.clips == fused
    state = [
        (p.detach().clone(), *torch.zeros(2, *p.shape, dtype=torch.bfloat16), torch.tensor(0.0))
        for p in model.parameters()
    ]
    for step in range(3):
        skipped = fused and step == 1
        for param, (expected, mean, square, count) in zip(model.parameters(), state, strict=True):
            param.grad = torch.full_like(param, torch.nan) if skipped else torch.randn_like(param)
            wide = [mean.float(), square.float()]
            decay = 0.2 if param.dim() > 1 else 0.0
            if not skipped:
                adamw(
                    *([x] for x in (expected, param.grad, *wide)),
                    [],
                    [count],
                    fused=fused,
                    foreach=not fused,
                    amsgrad=False,
                    maximize=False,
                    lr=0.1,
                    beta1=0.9,
                    beta2=0.95,
                    eps=1e-8,
                    weight_decay=decay,
                )
            mean.copy_(wide[0])
            square.copy_(wide[1])
        optimizer.step(skip=torch.tensor(skipped) if fused else None)
        for param, (*expected, _) in zip(model.parameters(), state, strict=True):
            found = optimizer.state[param]
            ours = (param, found["exp_avg"], found["exp_avg_sq"])
            assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize(
    ("name", "reference"), [("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam)]
)
def test_update_divides_gradients_and_skips_on_the_device(name, reference):
    """What `train_step` asks for before the host knows the norm, against torch's optimizer and a
    plain division.
    """
    torch.manual_seed(0)
    config = Optimizer(name=name, lr=0.1, weight_decay=0.25, implementation="fused")
    start = nn.Linear(4, 3)
    models = [copy.deepcopy(start), copy.deepcopy(start)]
    groups = [
        {"params": [p], "weight_decay": 0.25 if p.dim() > 1 else 0.0}
        for p in models[1].parameters()
    ]
    ours = build_optimizer(models[:1], config)
    theirs = reference(groups, lr=0.1, betas=(0.9, 0.95))
    for step in range(4):
        skipped = step == 2
        for mine, his in zip(*(model.parameters() for model in models), strict=True):
            mine.grad = torch.randn_like(mine)
            his.grad = mine.grad / 3
            if skipped:
                mine.grad.fill_(torch.nan)
        ours.step(divisor=torch.tensor(3.0, dtype=torch.float64), skip=torch.tensor(skipped))
        if not skipped:
            theirs.step()
        for mine, his in zip(*(model.parameters() for model in models), strict=True):
            assert_rounds(mine.detach(), his.detach(), terms=1, chain=16 * (step + 1))


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_muon_takes_as_many_kernels_for_many_matrices_as_for_few():
    def kernels(count):
        model = nn.ModuleDict({"layers": nn.ModuleDict()})
        for i in range(count):
            model.layers[str(i)] = nn.Linear(4, 6, bias=False)
        optimizer = build_optimizer([model], Optimizer(name="Muon"))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        with Kernels() as found:
            optimizer.step()
        return found.names

    assert kernels(30) == kernels(3)


@pytest.mark.parametrize("shape", [(3, 8, 12), (2, 10, 4)])
def test_muon_updates_each_matrix_of_a_stack_on_its_own(shape):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.Module()})
    stack = model.layers.w1 = nn.Parameter(torch.randn(shape))
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    settings = {"lr": 0.1, "weight_decay": 0.2}
    ours = build_optimizer([model], Optimizer(name="Muon", **settings))
    theirs = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings)
    directions = torch.linalg.qr(
        torch.randn(shape).mT if shape[1] < shape[2] else torch.randn(shape)
    ).Q
    directions = (
        directions.mT if shape[1] < shape[2] else directions
    )  # small singular values would amplify rounding
    for size in (1.0, 3.0):
        stack.grad = size * directions
        for matrix, gradient in zip(matrices, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        ours.step()
        theirs.step()
    # Two updates, of 0.2 lr in the root mean square; each is off by at most a few eps of bf16.
    expected = torch.stack([matrix.detach() for matrix in matrices])
    assert (stack.detach() - expected).square().mean().sqrt() < 2 * 0.2 * 0.1 * 4 * torch.finfo(
        torch.bfloat16
    ).eps
