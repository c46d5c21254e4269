"""The chunked loss against the loss of all logits at once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rounding import assert_rounds, fp32_products
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.optim import loss as losses
from torchtitan.optim.loss import add_z_loss, chunked_loss, cross_entropy

SPEC = get_spec("llama3")
TINY = {
    "vocab_size": 512,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "max_seq_len": 16,
}
TOKENS = torch.arange(32).view(2, 16)
LABELS = torch.where(TOKENS % 5 == 0, IGNORE_INDEX, TOKENS + 1)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that comes into being."""

    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def build(**overrides):
    torch.manual_seed(0)
    return SPEC.build(SPEC.args("8B", TINY | overrides), attention_backend("cpu"))


def chunked(model, chunks, labels=LABELS, loss=cross_entropy):
    hidden = model(TOKENS, project=False)
    total, rows = chunked_loss(
        hidden,
        model.output_weight,
        labels,
        project=model.project,
        loss=loss,
        chunks=chunks,
        tp_degree=1,
    )
    assert total.item() == pytest.approx(rows.sum().item(), rel=1e-5)
    return total


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_loss_and_gradients_are_those_of_all_logits_at_once(tied, chunks):
    whole = build(tie_embeddings=tied)
    sliced = build(tie_embeddings=tied)
    expected = 3 * cross_entropy(whole(TOKENS), LABELS).sum()
    expected.backward()
    loss = 3 * chunked(sliced, chunks)
    # a backward in two parts runs it twice
    torch.autograd.grad(loss, sliced.output_weight, retain_graph=True)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(sliced.parameters(), whole.parameters(), strict=True):
        assert_rounds(ours.grad, theirs.grad)
    with torch.no_grad():
        assert 3 * chunked(sliced, chunks).item() == pytest.approx(expected.item(), rel=1e-5)


def test_only_one_slice_of_the_logits_exists():
    model = build()
    weight = model.output_weight.numel()
    with Largest() as whole:
        cross_entropy(model(TOKENS), LABELS).sum().backward()
    assert whole.elements == max(TOKENS.numel() * 512, weight)
    with Largest() as sliced:
        chunked(model, 2).backward()
    assert sliced.elements == max(TOKENS.numel() * 512 // 2, weight)


def test_the_weights_gradient_is_added_up_in_fp32():
    """In bf16 the sum over many slices would lose their small parts. Where products return fp32,
    slices lose nothing.
    """
    exact = build().bfloat16().double()
    cross_entropy(exact(TOKENS), LABELS).sum().backward()

    def error(backward):
        model = build().bfloat16()
        backward(model)
        return (model.output.weight.grad.double() - exact.output.weight.grad).norm().item()

    whole = error(lambda model: cross_entropy(model(TOKENS), LABELS).sum().backward())
    assert error(lambda model: chunked(model, 16).backward()) < 1.2 * whole
    with fp32_products(losses) as calls:
        assert error(lambda model: chunked(model, 16).backward()) < 1.001 * whole
    assert calls == ["mm", *["addmm"] * 15]


def test_a_bias_by_keyword_is_added_in_chunks():
    model = build().bfloat16()
    bias = torch.linspace(-2, 2, model.output_weight.shape[0]).bfloat16()
    model.project = lambda x, weight: torch.nn.functional.linear(x, weight, bias=bias)
    logits = model.project(model(TOKENS, project=False), model.output_weight)
    with fp32_products(losses):
        assert chunked(model, 2).item() == pytest.approx(
            cross_entropy(logits, LABELS).sum().item(), rel=1e-2
        )


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_z_loss_adds_its_gradient_and_not_its_value(chunks):
    """2 c log(Z) softmax for each logit of a predicted token (PaLM, section 5)."""
    torch.manual_seed(1)
    logits = torch.randn(2, 16, 9, dtype=torch.float64, requires_grad=True)
    labels = torch.where(TOKENS % 5 == 0, IGNORE_INDEX, TOKENS % 9)
    loss = add_z_loss(cross_entropy, 0.3)
    (plain,) = torch.autograd.grad(cross_entropy(logits, labels).sum(), logits)
    rows = loss(logits, labels)
    (both,) = torch.autograd.grad(rows.sum(), logits)
    assert torch.equal(rows, cross_entropy(logits, labels))
    with torch.no_grad():
        log_z = logits.exp().sum(-1, keepdim=True).log()
        expected = 2 * 0.3 * log_z * (logits - log_z).exp() * (labels != IGNORE_INDEX)[..., None]
    torch.testing.assert_close(both - plain, expected, rtol=1e-4, atol=1e-5)
    whole = build()
    sliced = build()
    add_z_loss(cross_entropy, 0.3)(whole(TOKENS), LABELS).sum().backward()
    chunked(sliced, chunks, loss=loss).backward()
    for ours, theirs in zip(sliced.parameters(), whole.parameters(), strict=True):
        assert_rounds(ours.grad, theirs.grad)
