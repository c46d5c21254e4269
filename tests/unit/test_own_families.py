"""Families with code of their own: what the examples of the documentation compute, by hand, and
the FLOPs that a family declares.
"""

import pytest
import torch

from tests.examples import relu_squared, soft_cap  # noqa: F401, they register families
from torchtitan.models import all_families, get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.decoder.model import Block, Decoder
from torchtitan.models.layers.feed_forward import FeedForward
from torchtitan.testing.flops import flops_mismatch

LLAMA = get_spec("llama3")


def test_logits_changed_in_project_are_those_of_forward():
    spec = get_spec("llama3_capped")
    args = spec.args("debugmodel", {"n_layers": 1, "cap": 0.5})
    torch.manual_seed(0)
    capped = spec.build(args, attention_backend("cpu"))
    plain = LLAMA.build(LLAMA.args("debugmodel", {"n_layers": 1}), attention_backend("cpu"))
    plain.load_state_dict(capped.state_dict())
    tokens = torch.arange(32).view(2, 16)
    logits = capped(tokens)
    expected = plain(tokens)
    torch.testing.assert_close(logits, 0.5 * torch.tanh(expected / 0.5))
    assert logits.abs().max() < 0.5 < expected.abs().max()


def test_experts_of_ones_own():
    spec = get_spec("qwen3_moe_relu2")
    args = spec.args("debugmodel", {"n_layers": 1})
    torch.manual_seed(0)
    model = spec.build(args, attention_backend("cpu"))
    block = model.layers["0"]
    assert [name for name, _ in block.moe.experts.named_parameters()] == ["w1", "w2"]
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.1)
        x = torch.randn(2, 16, args.dim)
        chosen, weights, _ = block.moe.router(x, None)
        expected = torch.zeros_like(x)
        for row, token in ((row, token) for row in range(2) for token in range(16)):
            for expert, weight in zip(chosen[row, token], weights[row, token], strict=True):
                hidden = (block.moe.experts.w1[expert] @ x[row, token]).relu() ** 2
                expected[row, token] += weight * (block.moe.experts.w2[expert] @ hidden)
        routed = block.moe.dispatch(x, None)
        rows = block.moe.experts(routed.rows, routed.ends)
        torch.testing.assert_close(
            block.moe.combine(rows, routed, like=x), expected, rtol=1e-4, atol=1e-5
        )
        shifted = model(tokens, torch.arange(16) + 5)
        torch.testing.assert_close(model(tokens), shifted)  # no positions


class ReluSquared(FeedForward):
    def __init__(self, dim, hidden_dim):
        super().__init__(dim, hidden_dim)
        del self.w3

    def forward(self, x):
        return self.w2(self.w1(x).relu().square())


class ReluBlock(Block):
    feed_forward_class = ReluSquared


class ReluLlama(Decoder):
    block_class = ReluBlock


def test_flops_that_are_declared_wrongly():
    """By hand: six layers with two instead of three matrices of 256 x 768, four of 256 x 256, 512 x
    2 x 256 products of queries with keys and of their results with values; and 2,048 x 256 of the
    output.
    """
    args = LLAMA.flavors["debugmodel"]
    spec = LLAMA.variant("llama3_relu", build=ReluLlama)
    warning = flops_mismatch(spec, args, 512)
    products = {n: 6 * (n * 256 * 768 + 4 * 256 * 256 + 2 * 512 * 256) + 2048 * 256 for n in (2, 3)}
    assert f"declares {6 * products[3]:.4g} FLOPs per token" in warning
    assert f"{products[3] / products[2] - 1:+.0%} to the {6 * products[2]:.4g} of" in warning
    assert "pass module_flops= to its ModelSpec" in warning

    def flops(args, seq_len):
        by_module = LLAMA.module_flops(args, seq_len)
        return {
            name: cost - 6 * args.dim * args.ffn_dim * ("layers" in name)
            for name, cost in by_module.items()
        }

    spec = LLAMA.variant("llama3_relu", build=ReluLlama, module_flops=flops)
    assert flops_mismatch(spec, args, 512) is None


@pytest.mark.parametrize("spec", all_families(), ids=lambda spec: spec.name)
def test_flops_of_the_families_are_those_of_their_products(spec):
    args = spec.args("debugmodel", {}, max_seq_len=256)
    assert flops_mismatch(spec, args, 256) is None


@pytest.mark.parametrize("spec", [LLAMA, get_spec("qwen3_moe")], ids=lambda spec: spec.name)
def test_flops_of_modules_that_predict_further_tokens(spec):
    args = spec.args("debugmodel", {"n_mtp": 2}, max_seq_len=256)
    assert flops_mismatch(spec, args, 256) is None
