"""Gated DeltaNet against transformers' layer and against its own definition."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.delta_layers import ARGS, GRADIENT, SEQ, filled, relative, trained
from torchtitan.config import resolve
from torchtitan.config.rules import Accelerator, Facts, problems
from torchtitan.models.delta.args import TENSOR_PARALLEL_STYLES, delta_flops, delta_init
from torchtitan.models.delta.layer import GatedDeltaNet, use_fla
from torchtitan.models.delta.rule import (
    chunk_states,
    chunked_delta_rule,
    normalize,
    recurrent_delta_rule,
)

LIMIT = 1e-5


def rule_inputs(seq, heads=2, group=3, key_size=16, value_size=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)

    def make(*shape):
        return torch.randn(2, seq, *shape, generator=generator, dtype=torch.float64)

    values = heads * group
    g = -torch.nn.functional.softplus(make(values)) * torch.linspace(0.01, 16, values)
    inputs = make(heads, key_size), make(heads, key_size), make(values, value_size)
    return [x.to(dtype).requires_grad_() for x in (*inputs, g, make(values).sigmoid())]


def results(rule, inputs):
    """The output of `rule` and the gradients of its inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = rule(*inputs)
    out.backward(torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out))
    return [out.detach(), *(x.grad for x in inputs)]


def chunked(q, k, v, g, beta):
    return chunked_delta_rule(normalize(q) * q.shape[-1] ** -0.5, normalize(k), v, g, beta)[0]


def recurrent(q, k, v, g, beta):
    state = torch.zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=v.dtype)
    q = normalize(q) * q.shape[-1] ** -0.5
    return recurrent_delta_rule(q, normalize(k), v, g, beta, state)[0]


# ---- the rule


@pytest.mark.parametrize("seq", [200, 64, 7])
def test_both_forms_are_the_rule_of_transformers(seq):
    """Forward and gradients, also of heads that decay fast: there, its chunks are off by 2e-5."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    def reference(*inputs):
        return theirs.torch_recurrent_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

    def their_chunks(*inputs):
        return theirs.torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

    inputs = rule_inputs(seq)
    exact = results(recurrent, [x.double() for x in inputs])
    expected = results(reference, inputs)
    loosely = results(their_chunks, inputs)
    for rule in (chunked, recurrent):
        for i, actual in enumerate(results(rule, inputs)):
            assert relative(actual, exact[i]) < LIMIT
            assert relative(actual, expected[i]) < LIMIT
            assert relative(actual, loosely[i]) < 10 * LIMIT


def test_a_state_continues_a_sequence():
    """In pieces of any length, each in either form, as in one piece."""
    q, k, v, g, beta = rule_inputs(150)
    expected, last = chunked_delta_rule(q, normalize(k), v, g, beta)
    parts = []
    state = torch.zeros_like(last)
    for i, piece in enumerate(torch.arange(150).split([70, 1, 79])):
        rule = recurrent_delta_rule if i == 1 else chunked_delta_rule
        own = (x[:, piece] for x in (q, normalize(k), v, g, beta))
        out, state = rule(*own, state)
        parts.append(out)
    assert relative(torch.cat(parts, 1), expected) < LIMIT
    assert relative(state, last) < LIMIT


def test_the_operator_between_chunks():
    """Its gradients, and what the compiler is told about it."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(3, 2, 4, 5), (3, 2, 4, 6), (3, 2, 4, 5), (3, 2), (2, 5, 6)]
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    assert torch.autograd.gradcheck(chunk_states, inputs)
    torch.library.opcheck(chunk_states, inputs)
    transposed = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs]
    torch.library.opcheck(chunk_states, transposed)
    results = chunk_states(*transposed)
    assert all(x.is_contiguous() for x in results)


# ---- the layer


@pytest.mark.parametrize(("seq", "values"), [(SEQ, 8), (40, 4)])
def test_layer_is_that_of_transformers(seq, values, monkeypatch):
    """With its token-by-token form: the sums of decays of its chunks are off by 2e-5."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    exact = modeling.torch_recurrent_gated_delta_rule
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", exact)

    args = SimpleNamespace(**vars(ARGS) | {"delta_value_heads": values})
    config = Qwen3NextConfig(
        hidden_size=args.dim,
        linear_num_key_heads=args.delta_key_heads,
        linear_num_value_heads=args.delta_value_heads,
        linear_key_head_dim=args.delta_key_size,
        linear_value_head_dim=args.delta_value_size,
        linear_conv_kernel_dim=args.delta_conv_size,
        rms_norm_eps=args.norm_eps,
    )
    theirs = modeling.Qwen3NextGatedDeltaNet(config, 0)
    ours = filled(args)
    theirs.load_state_dict(as_theirs({name: p.data for name, p in ours.named_parameters()}))

    x, out = trained(ours, seq)
    their_x, their_out = trained(theirs, seq)
    assert relative(out, their_out) < LIMIT
    assert relative(x.grad, their_x.grad) < LIMIT
    gradients = as_theirs({name: p.grad for name, p in ours.named_parameters()})
    for name, parameter in theirs.named_parameters():
        assert relative(gradients.pop(name), parameter.grad) < LIMIT, name
    assert not gradients


def as_theirs(values):
    """Ours by name, in the names and shapes of transformers."""
    convs = [values.pop(name) for name in ("q_conv.weight", "k_conv.weight", "v_conv.weight")]
    theirs = {"A_log.weight": "A_log", "dt_bias.weight": "dt_bias"}
    rest = {theirs.get(name, name): value for name, value in values.items()}
    return rest | {"conv1d.weight": torch.cat(convs).unsqueeze(1)}


def test_layer_in_bf16_is_that_in_fp32():
    """Root mean square within a few roundings, of 2^-8; the norm of small outputs adds to them."""
    weights = filled().bfloat16()
    x, out = trained(weights, SEQ, dtype=torch.bfloat16)
    exact = filled()
    with torch.no_grad():
        for parameter, rounded in zip(exact.parameters(), weights.parameters(), strict=True):
            parameter.copy_(rounded)
    expected = trained(exact, SEQ)[1]
    assert out.dtype == x.grad.dtype == torch.bfloat16
    assert x.grad.isfinite().all()
    assert (out - expected).norm() < 2**-5 * expected.norm()


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 90 + [2] * 2 + [0] * 43, [3] * 64 + [4] * 75 + [5]])


def test_documents_are_computed_as_if_alone():
    """Wherever they begin in a chunk, and shorter than the convolution; gradients, too."""
    layer = filled()
    x, out = trained(layer, SEQ, documents=DOCUMENTS)
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    # A document alone has other chunks, so products of fp32 are summed in another order.
    limit = 10 * LIMIT
    for row, documents in enumerate(DOCUMENTS):
        bounds = (documents.diff(prepend=documents[:1] - 1) != 0).nonzero().flatten().tolist()
        for begin, end in zip(bounds, [*bounds[1:], SEQ], strict=True):
            own = x[row : row + 1, begin:end].detach().requires_grad_()
            alone = layer(own)
            alone.backward(GRADIENT[row : row + 1, begin:end])
            assert relative(out[row : row + 1, begin:end], alone) < limit
            assert relative(x.grad[row : row + 1, begin:end], own.grad) < limit
    for name, parameter in layer.named_parameters():
        assert relative(gradients[name], parameter.grad) < limit, name


@pytest.mark.parametrize("seq", [SEQ, 32])
def test_compiles_to_one_graph(seq):
    layer = filled()
    expected = [x.clone() for x in grads_of(layer, seq)]
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    for actual, value in zip(grads_of(layer, seq), expected, strict=True):
        assert relative(actual, value) < LIMIT


def grads_of(layer, seq):
    layer.zero_grad()
    x, out = trained(layer, seq, documents=DOCUMENTS[:, :seq])
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def test_flops_are_those_counted():
    """In forward and backward; torch doesn't count triangular systems by itself."""

    def system(_, right, *args, out_shape=None, **kwargs):
        *batch, size, columns = right
        return 2 * math.prod(batch) * size * size * columns

    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.linalg_solve_triangular: system}
    )
    with counter:
        trained(filled(), 128)
    assert counter.get_total_flops() == delta_flops(ARGS, 128) * 2 * 128


def test_every_parameter_has_a_style_and_an_initialization():
    """What has entries for a head is split by heads; projections by outputs, the last by inputs."""
    layer = GatedDeltaNet(ARGS)
    styles = []
    for name, parameter in layer.named_parameters():
        module = name.removesuffix(".weight")
        styles.append((module, TENSOR_PARALLEL_STYLES[f".{module}"].value))
        matrix = isinstance(layer.get_submodule(module), torch.nn.Linear)
        assert (delta_init(module, ARGS) is None) == matrix
        assert parameter.dim() <= 2
    per_head = ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias")
    assert sorted(styles) == sorted(
        [
            *(("in_proj_qkvz", "columns"), ("in_proj_ba", "columns"), ("out_proj", "rows")),
            *((name, "per_head") for name in per_head),
            ("norm", "head_norm"),
        ]
    )


# ---- flash-linear-attention


def their_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule` as documented, computed token by token."""
    assert use_qk_l2norm_in_kernel
    assert scale is initial_state is None
    if cu_seqlens is not None:
        assert len(q) == 1
        pieces = [slice(*bounds) for bounds in cu_seqlens.unfold(0, 2, 1).tolist()]
        inputs = [[x[:, piece] for x in (q, k, v, g, beta)] for piece in pieces]
        return torch.cat([recurrent(*x) for x in inputs], 1), None
    return recurrent(q, k, v, g, beta), None


@pytest.fixture
def fla(monkeypatch):
    """A stand-in, as its kernels need a GPU."""
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = their_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_layer_with_fla_is_the_layer(fla, documents, compiled):
    """Forward and gradients, within documents too, and compiled around the kernels."""

    def results_of(layer):
        if compiled:
            layer.forward = torch.compile(layer.forward, backend="aot_eager", dynamic=False)
        x, out = trained(layer, SEQ, documents=documents)
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]

    layer = filled()
    use_fla(layer)
    for actual, expected in zip(results_of(layer), results_of(filled()), strict=True):
        assert relative(actual, expected) < LIMIT


def test_fla_is_refused_where_it_is_missing_or_there_is_no_gpu():
    config = resolve(["--model.delta_rule=fla"], 1).config
    cpu, gpu = Accelerator("a CPU", (0, 0)), Accelerator("an H100", (9, 0))
    assert not problems(config, Facts(packages={"fla"}, device=gpu))
    assert problems(config, Facts(packages=(), device=cpu)) == [
        'model.delta_rule: "fla" needs the package flash-linear-attention: pip install '
        "'titan-pretrain[fla]', or set it to \"torch\"",
        'model.delta_rule: "fla" needs a GPU, this is a CPU; set it to "torch"',
    ]
