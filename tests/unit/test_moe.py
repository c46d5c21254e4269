"""Mixture of experts: routing, grouped products, dispatch, combine and auxiliary losses against
their definitions.
"""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.rounding import assert_rounds, fp32_products
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.decoder.model import MoEBlock
from torchtitan.models.moe import grouped
from torchtitan.models.moe import router as router_module
from torchtitan.models.moe.grouped import grouped_mm, grouped_swiglu
from torchtitan.models.moe.moe import MoE
from torchtitan.models.moe.router import Balance, Router, top_k

SPEC = get_spec("qwen3_moe")
SIZES = {
    "n_layers": 1,
    "dim": 16,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_size": 8,
    "vocab_size": 32,
    "ffn_dim": 16,
}
ENDS = torch.tensor([3, 3, 8, 8], dtype=torch.int32)
"""Of four groups, of which the second and the last have no rows."""


def args(n_experts=6, k=2, **more):
    return SPEC.args(
        "debugmodel",
        SIZES | {"n_experts": n_experts, "experts_per_token": k, "expert_dim": 12} | more,
    )


def moe(**balance):
    torch.manual_seed(0)
    made = MoE(args())
    for param in made.parameters():
        torch.nn.init.normal_(param, std=0.5)
    made.router.balance = Balance(**balance)
    return made


# ---- grouped products


def by_loop(rows, weight):
    starts = [0, *ENDS.tolist()]
    return torch.cat([rows[a:b] @ w.T for a, b, w in zip(starts, starts[1:], weight, strict=False)])


def test_grouped_product_and_its_gradients_are_those_of_a_loop():
    rows = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(grouped_mm(rows, weight, ENDS), by_loop(rows, weight))
    assert torch.autograd.gradcheck(lambda x, w: grouped_mm(x, w, ENDS), (rows, weight))
    grouped_mm(rows, weight, ENDS).sum().backward()  # an expanded gradient
    assert not weight.grad[[1, 3]].any(), "a group without rows has no gradient"


def test_swiglu_of_groups_and_its_gradients_are_those_of_a_loop():
    rows = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    shapes = (4, 3, 5), (4, 5, 3), (4, 3, 5)
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    w1, w2, w3 = weights
    expected = by_loop(F.silu(by_loop(rows, w1)) * by_loop(rows, w3), w2)
    torch.testing.assert_close(grouped_swiglu(rows, *weights, ENDS), expected)
    assert torch.autograd.gradcheck(lambda *inputs: grouped_swiglu(*inputs, ENDS), (rows, *weights))


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_operations_are_registered_correctly(transposed):
    rows = torch.randn(8, 5)
    gradient = torch.randn(8, 3)
    inputs = (
        torch.randn(8, 3 if transposed else 5, requires_grad=True),
        torch.randn(4, 3, 5, requires_grad=True),
    )
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.torchtitan.grouped_mm, (*inputs, ENDS, transposed), test_utils=checks
    )
    torch.library.opcheck(
        torch.ops.torchtitan.grouped_outer, (gradient, rows, ENDS), test_utils=checks[::2]
    )


def test_flops_of_groups_are_those_of_one_product():
    rows = torch.randn(8, 5, requires_grad=True)
    weight = torch.randn(4, 3, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        grouped_mm(rows, weight, ENDS).sum().backward()
    assert counter.get_total_flops() == 3 * (2 * 8 * 5 * 3)


# ---- routing


def test_top_k_breaks_ties_to_the_lower_index_as_a_stable_sort_does():
    scores = torch.randint(-3, 3, (512, 16)).float() / 2
    scores[0, :4] = torch.tensor([0.0, -0.0, float("-inf"), -1e-30])
    assert torch.equal(
        top_k(scores, 5), scores.sort(dim=-1, descending=True, stable=True).indices[:, :5]
    )
    wide = torch.randn(64, 40) * 10 ** torch.randint(-30, 30, (64, 1)).float()
    assert torch.equal(top_k(wide, 40), wide.sort(dim=-1, descending=True, stable=True).indices)


def test_bias_changes_the_choice_but_not_the_weights():
    made = moe()
    x = torch.randn(1, 4, 16)
    made.router.expert_bias[3] = 2.0
    chosen, weights, load = made.router(x, torch.ones(1, 4))
    assert (chosen[..., 0] == 3).all()
    assert load.tokens[3] == 4
    probabilities = made.router.gate(x).softmax(-1).gather(-1, chosen)
    torch.testing.assert_close(weights, probabilities / probabilities.sum(-1, keepdim=True))


def test_groups_are_those_of_transformers():
    """Also where the biases make the scores of the chosen groups negative."""
    theirs = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = theirs.DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    groups = {"n_expert_groups": 4, "expert_groups_per_token": 2, "route_scale": 2.5}
    ours = Router(args(12, 4, router_scores="sigmoid", **groups))
    expected = theirs.DeepseekV3TopkRouter(config)
    with torch.no_grad():
        ours.gate.weight.normal_()
        ours.expert_bias.uniform_(-1.5, -0.5)
        expected.weight.copy_(ours.gate.weight)
        expected.e_score_correction_bias.copy_(ours.expert_bias)
    x = torch.randn(2, 64, 16)
    chosen, weights, _ = ours(x, None)
    _, their_weights, their_chosen = expected(x)
    ours_dense, theirs_dense = (
        torch.zeros(128, 12).scatter(1, index.view(128, 4), value.view(128, 4))
        for index, value in ((chosen, weights), (their_chosen, their_weights))
    )
    torch.testing.assert_close(ours_dense, theirs_dense, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_router_of_a_model_in_bf16_computes_in_fp32(on_cuda):
    """Against fp64; scores rounded to bf16 would be off by up to 2^-9, and send some tokens to
    other experts. Gradients are rounded once, at their end.
    """
    torch.manual_seed(0)
    router = Router(args(router_bias=True))
    for param in router.parameters():
        torch.nn.init.normal_(param, std=0.5)
    x = torch.randn(4, 64, 16).bfloat16().requires_grad_()
    weight, bias = router.gate.bfloat16().parameters()
    with fp32_products(*[router_module] * on_cuda) as calls:
        chosen, weights, _ = router(x, None)
        weights.square().sum().backward()
    assert calls == ["mm"] * on_cuda
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    best = torch.nn.functional.linear(*exact).softmax(-1).topk(2)
    expected = best.values / best.values.sum(-1, keepdim=True)
    expected.square().sum().backward()
    assert torch.equal(chosen, best.indices)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=0)
    for ours, theirs in zip((x, weight, bias), exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2**-8, atol=1e-5)


def test_forced_balance_sends_tokens_to_the_experts_in_turn():
    made = moe(forced=True)
    chosen, _, load = made.router(torch.randn(2, 9, 16), torch.ones(2, 9))
    assert chosen.flatten().tolist() == [i % 6 for i in range(36)]
    assert load.tokens.tolist() == [6] * 6


def test_tokens_without_weight_are_not_counted():
    made = moe(sequence_loss=1.0, z_loss=1.0)
    x = torch.randn(2, 6, 16)
    weights = torch.ones(2, 6)
    weights[0, 4:] = weights[1, 1:] = 0
    chosen, _, load = made.router(x, weights)
    expected = torch.bincount(torch.cat([chosen[0, :4].flatten(), chosen[1, 0]]), minlength=6)
    assert torch.equal(load.tokens, expected)
    alone = sum(
        (made.router(x[i : i + 1, :n], torch.ones(1, n))[2].loss for i, n in ((0, 4), (1, 1))),
        torch.zeros(()),
    )
    assert_rounds(load.loss, alone, terms=16, chain=6)


# ---- dispatch and combine


def layer(made, x, token_weights=None):
    routed = made.dispatch(x, token_weights)
    return made.combine(made.experts(routed.rows, routed.ends), routed, like=x)


def test_layer_and_its_gradients_are_those_of_every_expert_on_every_token():
    made = moe()
    made.router.expert_bias[5] = -9.0  # never chosen
    x = torch.randn(2, 5, 16, requires_grad=True)
    upstream = torch.randn(2, 5, 16)
    inputs = (x, *made.parameters())
    chosen, weights, _ = made.router(x, None)
    w1 = made.experts.w1
    w2 = made.experts.w2
    w3 = made.experts.w3
    gates = torch.zeros(2, 5, 6).scatter(-1, chosen, weights)
    hidden = F.silu(torch.einsum("bsd,ehd->bseh", x, w1)) * torch.einsum("bsd,ehd->bseh", x, w3)
    expected = torch.einsum("bseh,edh,bse->bsd", hidden, w2, gates)
    out = layer(made, x)
    assert_rounds(out, expected, terms=16, chain=6)
    ours, theirs = (torch.autograd.grad(y, inputs, upstream) for y in (out, expected))
    assert_rounds(ours, theirs, terms=16, chain=12)
    assert not any(gradient[5].any() for gradient in ours[2:]), (
        "an expert without tokens has no gradient"
    )


def test_layer_in_bf16_is_as_close_as_its_type():
    made = moe()
    x = torch.randn(2, 5, 16)
    expected = layer(made, x)
    made.experts.bfloat16()
    found = made.router(x, None)
    made.router.forward = lambda *_: found  # the same experts
    out = layer(made, x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() < 2**-6 * expected.norm()


def test_number_of_operations_does_not_depend_on_the_number_of_experts():
    def count(n_experts):
        with torch.device("meta"):
            made = MoE(args(n_experts))
        with Operations() as operations:
            x = torch.empty(1, 8192, 16, device="meta", requires_grad=True)
            layer(made, x, torch.empty(1, 8192, device="meta")).backward(torch.empty_like(x))
        return operations.seen

    assert count(8) == count(256)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_body_of_a_grouped_product_is_one_kernel_on_cuda(monkeypatch, capability):
    """Blackwell's leaves the gradients of groups without rows unwritten."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        rows, gradient = (torch.empty(64, width, dtype=torch.bfloat16) for width in (16, 32))
        weight = torch.empty(256, 32, 16, dtype=torch.bfloat16)
        ends = torch.empty(256, dtype=torch.int32)
        with Operations() as operations:
            grouped._grouped_mm._init_fn(gradient, weight, ends, transposed=True)
            grouped._grouped_outer._init_fn(gradient, rows, ends)
    assert operations.seen["aten._grouped_mm.default"] == 2
    blackwell = capability == (10, 0)
    assert operations.seen["aten.masked_fill_.Scalar"] == blackwell
    assert blackwell or operations.seen.total() == 4  # and two transpositions


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_grouped_product_without_rows_has_zero_gradients(device):
    """CUDA's kernel can't be launched without rows. On CUDA, the shapes."""
    with FakeTensorMode() if device == "cuda" else nullcontext(), torch.device(device):
        rows, gradient = torch.empty(0, 16), torch.empty(0, 32)
        weight, ends = torch.ones(3, 32, 16), torch.zeros(3, dtype=torch.int32)
        with Operations() as operations:
            out = grouped._grouped_mm._init_fn(rows, weight, ends) if device == "cuda" else None
            products = grouped._grouped_outer._init_fn(gradient, rows, ends)
    assert "aten._grouped_mm.default" not in operations.seen
    assert products.shape == weight.shape
    if out is not None:
        assert out.shape == gradient.shape
        return
    leaves = [x.clone().requires_grad_() for x in (rows, weight)]
    grouped_mm(*leaves, ends).sum().backward()
    assert leaves[0].grad.shape == rows.shape
    assert torch.equal(leaves[1].grad, torch.zeros_like(weight))


def test_unwritten_products_of_groups_without_rows_become_zero():
    left, right = torch.randn(7, 4), torch.randn(7, 5)
    ends = torch.tensor([0, 3, 3, 7, 7], dtype=torch.int32)
    expected = torch.ops.torchtitan.grouped_outer(left, right, ends)
    unwritten = expected.clone()
    unwritten[[0, 2, 4]] = torch.nan
    assert torch.equal(grouped.zero_empty_groups(unwritten, ends), expected)


# ---- auxiliary losses


@pytest.mark.parametrize("kind", ["sequence_loss", "global_loss", "z_loss"])
def test_auxiliary_loss_and_its_gradients_are_those_of_its_formula(kind):
    made = moe(**{kind: 0.3})
    x = torch.randn(2, 5, 16)
    made.router.load = torch.tensor([4, 0, 1, 2, 3, 2])
    token_weights = torch.rand(2, 5)
    token_weights[1, 3:] = 0
    chosen, weights, load = made.router(x, token_weights)
    upstream = torch.randn_like(weights)
    ours = torch.autograd.grad(weights, made.router.gate.weight, upstream)[0]

    scores = made.router.gate(x)
    probabilities = scores.softmax(-1)
    if kind == "z_loss":
        losses = scores.exp().sum(-1).log() ** 2
    elif kind == "global_loss":
        losses = 6 * (probabilities * made.router.load / 12).sum(-1)
    else:
        hits = F.one_hot(chosen, 6).sum(2) * (token_weights > 0).unsqueeze(-1)
        shares = hits.sum(1) / hits.sum((1, 2)).unsqueeze(-1)
        losses = 6 * (probabilities * shares.unsqueeze(1)).sum(-1)
    expected = 0.3 * (losses * token_weights).sum()
    assert_rounds(load.loss, expected.detach(), terms=16, chain=6)
    picked = probabilities.gather(-1, chosen)
    picked = picked / picked.sum(-1, keepdim=True)
    theirs = torch.autograd.grad(expected + (picked * upstream).sum(), made.router.gate.weight)[0]
    assert_rounds(ours, theirs, terms=16, chain=6)


# ---- in a block


def test_recomputed_or_compiled_block_is_the_same_and_counts_once():
    torch.manual_seed(0)
    model = SPEC.build(args(), attention_backend("cpu"))
    block = model.layers["0"]
    assert isinstance(block, MoEBlock)
    for name, param in block.named_parameters():
        torch.nn.init.ones_(param) if "norm" in name else torch.nn.init.normal_(param, std=0.3)
    block.moe.router.balance = Balance(sequence_loss=0.1)
    x = torch.randn(2, 4, 16, requires_grad=True)
    rest = model.cos[:4], model.sin[:4], None, torch.ones(2, 4)

    def run(forward):
        out, load = forward(x, *rest)
        return (
            out,
            load.tokens,
            load.loss,
            *torch.autograd.grad(out.square().sum(), (x, *block.parameters())),
        )

    expected = run(block)
    assert expected[1].sum() == 2 * 4 * 2
    recomputed = run(lambda *inputs: checkpoint(block, *inputs, use_reentrant=False))
    for ours, theirs in zip(recomputed, expected, strict=True):
        assert torch.equal(ours, theirs)
    compiled = run(torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager"))
    assert torch.equal(compiled[1], expected[1])
    # Norms are other operations in a graph. Attention, experts, and the backward of both: two dozen
    # sums.
    assert_rounds(compiled[2:] + compiled[:1], expected[2:] + expected[:1], terms=16, chain=24)


def test_router_records_a_step_in_parts():
    router = Router(args())
    for _ in range(2):
        _, _, load = router(torch.randn(1, 3, 16), torch.ones(1, 3))
        router.record(load)
    assert router.step_load.sum() == 2 * 3 * 2
    assert router.step_loss == 0
    assert set(router.state_dict()) == {"gate.weight", "expert_bias", "load"}
