"""Experts in 8 bits: emulated products against their definitions, padding, and what is refused."""

import pytest
import torch
from torch import nn

from torchtitan.config import resolve
from torchtitan.config.rules import Facts, problems
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.moe.grouped import grouped_mm
from torchtitan.models.moe.moe import Experts
from torchtitan.parallel.precision.dense import check_hardware, quantize
from torchtitan.parallel.precision.experts import emulated_float8, mxfp8, pad_groups
from torchtitan.utils.errors import ConfigError

SPEC = get_spec("qwen3_moe")
SIZES = {
    "n_layers": 2,
    "dim": 32,
    "head_size": 16,
    "expert_dim": 32,
    "n_experts": 4,
    "experts_per_token": 2,
}
FLOAT8 = [
    "--model.converters=quantize.grouped_mm.float8",
    "--quantize.grouped_mm.float8.fqns=experts",
]
EMULATED = [*FLOAT8, "--quantize.grouped_mm.float8.emulate"]
MX = ["--model.converters=quantize.grouped_mm.mx", "--quantize.grouped_mm.mx.fqns=experts"]
ENDS = torch.tensor([30, 30, 96, 104], dtype=torch.int32)


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    rows = torch.randn(104, 64) * torch.logspace(-3, 3, 104)[:, None]
    return rows.requires_grad_(), torch.randn(4, 48, 64, requires_grad=True), torch.randn(104, 48)


def gradients(product, rows, weight, upstream):
    out = product(rows, weight, ENDS)
    return out, *torch.autograd.grad(out, (rows, weight), upstream)


def e4m3(x, dim):
    """Scaled by the power of two that brings the largest closest to 448 from below, rounded, and
    back.
    """
    scale = 2 ** (448 / x.abs().amax(dim, keepdim=True).clamp(min=1e-12)).log2().floor()
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


def mx(x, dim):
    """Blocks of 32 along `dim` share the smallest power of two that brings the largest below
    448.
    """
    blocks = x.movedim(dim, -1).unflatten(-1, (-1, 32))
    scale = 2 ** (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=2**-127).log2().ceil()
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).movedim(-1, dim)


def by_expert(rounded, rows, weight, upstream):
    """The three products of each expert, with operands rounded along the summed dimension."""
    starts = [0, *ENDS.tolist()]
    parts = []
    for start, end, matrix in zip(starts, starts[1:], weight.detach(), strict=False):
        x = rows.detach()[start:end]
        g = upstream[start:end]
        out = rounded(x, 1) @ rounded(matrix, 1).T
        of_x = rounded(g, 1) @ rounded(matrix, 0)
        fill = torch.zeros(32 - len(x) % 32, 1)  # in blocks
        of_w = rounded(torch.cat([g, fill.expand(-1, g.shape[1])]), 0).T @ rounded(
            torch.cat([x, fill.expand(-1, x.shape[1])]), 0
        )
        parts.append((out, of_x, of_w if end > start else torch.zeros_like(matrix)))
    outs, of_rows, of_weights = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(of_rows), torch.stack(of_weights)


def assert_same_products(ours, theirs, inputs):
    """Each element, in whatever order its products are added: at most 104, each of which rounds by
    eps / 2.
    """
    rows, weight, upstream = (x.detach().abs() for x in inputs)
    sizes = gradients(grouped_mm, rows.requires_grad_(), weight.requires_grad_(), upstream)
    for one, other, size in zip(ours, theirs, sizes, strict=True):
        assert ((one - other).abs() <= 104 * torch.finfo(torch.float32).eps * size).all()


def test_emulated_float8_is_the_definition_in_all_three_products(inputs):
    assert_same_products(gradients(emulated_float8, *inputs), by_expert(e4m3, *inputs), inputs)


def test_error_of_float8_is_within_that_of_its_rounding(inputs):
    """Each operand is at most 2^-4 off, so a sum of products is at most 2^-3 + 2^-8 of the sum of
    their sizes.
    """
    rows, weight, upstream = inputs
    sizes = gradients(
        grouped_mm, rows.detach().abs().requires_grad_(), weight.abs(), upstream.abs()
    )
    exact = gradients(grouped_mm, *inputs)
    for rounded, whole, size in zip(gradients(emulated_float8, *inputs), exact, sizes, strict=True):
        assert (
            (rounded - whole).abs() <= (2**-3 + 2**-8) * size + 1e-3 * size.amax(-1, keepdim=True)
        ).all()
        assert not torch.equal(rounded, whole)


def test_emulated_mxfp8_is_the_definition_in_all_three_products():
    torch.manual_seed(0)
    rows = torch.randn(104, 64)
    weight = torch.randn(4, 96, 64)
    upstream = torch.randn(104, 96).bfloat16().float()
    rows, weight = (x.bfloat16().float().requires_grad_() for x in (rows, weight))
    ours = gradients(pad_groups(mxfp8(emulate=True), 32), rows, weight, upstream)
    for one, other in zip(ours, by_expert(mx, rows, weight, upstream), strict=True):
        assert (one - other).norm() < 2**-8 * other.norm()  # multiplied in bf16


def test_padding_changes_nothing_but_the_sizes_of_the_groups(inputs):
    def product(rows, weight, ends):
        assert not (ends % 16).any()
        assert ends[-1] == len(rows)
        return grouped_mm(rows, weight, ends)

    assert_same_products(
        gradients(pad_groups(product, 16), *inputs), gradients(grouped_mm, *inputs), inputs
    )


def test_float8_on_cuda_calls_torchao_with_groups_that_it_takes(inputs, monkeypatch):
    from torchao.prototype.moe_training import fp8_grouped_mm

    def product(rows, weight_t, ends, *, pad_token_groups_for_grouped_mm):
        assert not pad_token_groups_for_grouped_mm
        assert weight_t.stride(-2) == 1
        assert not (ends % 16).any()
        return grouped_mm(rows, weight_t.transpose(-2, -1), ends)

    monkeypatch.setattr(fp8_grouped_mm, "_to_fp8_rowwise_then_scaled_grouped_mm", product)
    model = nn.Module()
    model.experts = Experts(4, 64, 48)
    quantize(model, resolve(FLOAT8, 1).config)
    assert_same_products(
        gradients(model.experts.product, *inputs), gradients(grouped_mm, *inputs), inputs
    )


def test_experts_are_converted_by_name_and_nothing_else():
    argv = [*EMULATED, "--quantize.grouped_mm.float8.fqns=layers.1.moe", "--model.name=qwen3_moe"]
    with torch.device("meta"):
        model = SPEC.build(SPEC.args("debugmodel", SIZES), attention_backend("cpu"))
    before = {name: type(module) for name, module in model.named_modules()}
    quantize(model, resolve(argv, 1).config)
    assert {name: type(module) for name, module in model.named_modules()} == before
    products = {
        name: module.product
        for name, module in model.named_modules()
        if isinstance(module, Experts)
    }
    assert products == {"layers.0.moe.experts": grouped_mm, "layers.1.moe.experts": emulated_float8}


def test_float8_of_linear_layers_leaves_router_and_experts_alone():
    with torch.device("meta"):
        model = SPEC.build(SPEC.args("debugmodel", SIZES), attention_backend("cpu"))
    argv = ["--model.converters=float8", "--quantize.linear.float8.emulate"]
    quantize(model, resolve(argv, 1).config)
    block = model.layers["0"]
    assert type(block.attention.wq) is not nn.Linear
    assert block.moe.experts.product is grouped_mm
    assert not any(isinstance(module, nn.Linear) for module in block.moe.modules())


@pytest.mark.parametrize(
    ("argv", "sizes", "words"),
    [
        (FLOAT8[:1], {}, 'fqns names no experts; set it to ["experts"]'),
        (
            [FLOAT8[0], "--quantize.grouped_mm.float8.fqns=expert,atention"],
            {},
            "'atention' is in the name of no",
        ),
        (
            FLOAT8,
            {"expert_dim": 40},
            "expert_dim 40 of model.flavor debugmodel of qwen3_moe must be a multiple of 16",
        ),
        (MX, {"expert_dim": 48}, "must be a multiple of 32"),
        (MX, {"n_experts": 0}, "has no experts; remove it"),
    ],
)
def test_what_cannot_be_converted_is_refused(argv, sizes, words):
    config = resolve([*argv, "--model.name=qwen3_moe"], 1).config
    args = SPEC.args("debugmodel", SIZES | sizes)
    facts = Facts(expert_sizes=SPEC.expert_sizes(args), parameters=SPEC.hf.names(args))
    found = problems(config, facts)
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 8), ("float32", 4)])
def test_widths_that_gpus_do_not_multiply_are_refused(dtype, unit, monkeypatch):
    """By the rows' bytes, of a model that isn't converted."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "an H100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    config = resolve([f"--training.mixed_precision_param={dtype}"], 1).config
    cuda = torch.device("cuda")
    sizes = {"n_experts": 6, "dim": 64, "expert_dim": 32 + unit // 2}
    with pytest.raises(
        ConfigError, match=f"multiples of {unit}, and expert_dim.*set it to {32 + unit}"
    ):
        check_hardware(config, cuda, sizes)
    check_hardware(config, torch.device("cpu"), sizes)
    check_hardware(config, cuda, sizes | {"expert_dim": 32 + unit})
    check_hardware(config, cuda)


@pytest.mark.parametrize(
    ("argv", "words", "way_out"),
    [
        (FLOAT8, "compute capability 9.0", "--quantize.grouped_mm.float8.emulate"),
        (MX, "compute capability 10.0", "--quantize.grouped_mm.mx.recipe_name=mxfp8_emulated"),
    ],
)
def test_hardware_without_the_type_is_refused_with_the_way_out(argv, words, way_out):
    with pytest.raises(ConfigError, match=words):
        check_hardware(resolve(argv, 1).config, torch.device("cpu"))
    check_hardware(resolve([*argv, way_out], 1).config, torch.device("cpu"))
