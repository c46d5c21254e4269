"""Learning rate against its closed form; weight decay on matrices only."""

import copy
import math

import pytest
import torch
from torch import nn

from torchtitan.config.schema import LRScheduler, Optimizer, ParamGroup
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.schedule import LRSchedule, lr_factor


def curve(total, **kwargs):
    schedule = LRScheduler(total_steps=total, **kwargs)
    return [lr_factor(step, schedule) for step in range(total)]


def test_warmup_rises_linearly_to_the_peak():
    assert curve(10, warmup_steps=4, decay_ratio=0.0) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)


def test_stable_phase_then_decay_over_the_last_share():
    factors = curve(20, warmup_steps=2, decay_ratio=0.25)
    assert factors[2:15] == [1.0] * 13
    assert factors[15:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@pytest.mark.parametrize(
    ("decay_type", "shape"),
    [
        ("linear", lambda t: 1 - t),
        ("sqrt", lambda t: 1 - math.sqrt(t)),
        ("cosine", lambda t: 0.5 * (1 + math.cos(math.pi * t))),
    ],
)
def test_decay_shapes_end_at_the_floor(decay_type, shape):
    factors = curve(9, warmup_steps=0, decay_type=decay_type, min_lr_factor=0.1)
    assert factors == pytest.approx([0.1 + 0.9 * shape((i + 1) / 10) for i in range(9)])
    beyond = lr_factor(50, LRScheduler(total_steps=9, warmup_steps=0, decay_type=decay_type, min_lr_factor=0.1))
    assert beyond == pytest.approx(0.1)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize(("name", "decayed"), [("AdamW", 1 - 0.5 * 0.25), ("Adam", None)])
def test_weight_decay_spares_vectors(name, decayed, implementation):
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer([model], Optimizer(name=name, lr=0.5, weight_decay=0.25, implementation=implementation))
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(before)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    after = dict(model.named_parameters())
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert torch.equal(after["0.bias"], before["0.bias"])
    if decayed:
        torch.testing.assert_close(after["0.weight"].detach(), before["0.weight"] * decayed)
    else:
        assert not torch.equal(after["0.weight"], before["0.weight"])


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
    groups = [ParamGroup(pattern="0.*", lr_scale=0.5), ParamGroup(pattern="?.weight", weight_decay=0.3)]
    optimizer = build_optimizer([model], Optimizer(weight_decay=0.1, param_groups=groups))
    rate = LRSchedule(optimizer, 1.0, LRScheduler(total_steps=9, warmup_steps=2)).apply()
    assert rate == pytest.approx(0.5)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    own = {name: found[id(p)] for name, p in model.named_parameters()}
    assert own == {"0.weight": (0.25, 0.1), "0.bias": (0.25, 0.0), "1.weight": (0.5, 0.3), "2.weight": (0.5, 0.3)}


def test_bf16_state_is_bf16_and_follows_adamw():
    torch.manual_seed(0)
    plain, narrow = nn.Linear(8, 8), nn.Linear(8, 8)
    narrow.load_state_dict(plain.state_dict())
    pair = [
        build_optimizer([m], Optimizer(lr=1e-2, state_dtype=d)) for m, d in ((plain, "float32"), (narrow, "bfloat16"))
    ]
    for _ in range(10):
        gradient = torch.randn(8, 8)
        for model, optimizer in zip((plain, narrow), pair, strict=True):
            model.weight.grad = gradient.clone()
            optimizer.step()
    assert pair[1].state[narrow.weight]["exp_avg"].dtype == torch.bfloat16
    assert not torch.equal(narrow.weight, plain.weight)
    torch.testing.assert_close(narrow.weight, plain.weight, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("name", "reference"), [("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam)])
def test_update_divides_gradients_and_skips_on_the_device(name, reference):
    """What `train_step` asks for before the host knows the norm, against torch's optimizer and a plain division."""
    torch.manual_seed(0)
    config = Optimizer(name=name, lr=0.1, weight_decay=0.25, implementation="fused")
    start = nn.Linear(4, 3)
    models = [copy.deepcopy(start), copy.deepcopy(start)]
    groups = [{"params": [p], "weight_decay": 0.25 if p.dim() > 1 else 0.0} for p in models[1].parameters()]
    ours, theirs = build_optimizer(models[:1], config), reference(groups, lr=0.1, betas=(0.9, 0.95))
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
            torch.testing.assert_close(mine, his)


@pytest.mark.parametrize("shape", [(3, 8, 12), (2, 10, 4)])
def test_muon_updates_each_matrix_of_a_stack_on_its_own(shape):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.Module()})
    stack = model.layers.w1 = nn.Parameter(torch.randn(shape))
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    settings = {"lr": 0.1, "weight_decay": 0.2}
    ours = build_optimizer([model], Optimizer(name="Muon", **settings))
    theirs = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(2):
        stack.grad = torch.randn(shape)
        for matrix, gradient in zip(matrices, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(stack.detach(), torch.stack([m.detach() for m in matrices]), rtol=0, atol=1e-3)
