"""Schedules that compute the gradients of weights after those of inputs, in one process."""

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.spec import all_families
from torchtitan.utils.distributed_compat import lay_out_gradients

SEQ = 16


def blocks_of(spec):
    """The last stage of a tiny model, whose input is hidden states `[b, s, dim]`."""
    args = spec.flavors["debugmodel"]
    args = spec.args("debugmodel", spec.tiny(args, 3, 4) | {"vocab_size": 64}, max_seq_len=SEQ)
    model = spec.build(args, attention_backend("cpu"))
    model.tok_embeddings = None
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3, generator=random)
    model.init_buffers()
    return model


def gradients(model, spec, split):
    """The weights' gradients of two microbatches."""
    model.zero_grad()
    args = model.args
    for seed in range(2):
        random = torch.Generator().manual_seed(seed)
        hidden = torch.randn(2, SEQ, args.dim, generator=random, requires_grad=True)
        options = {"token_weights": torch.ones(2, SEQ)} if spec.expert_sizes(args) else {}
        out = model(hidden, torch.arange(SEQ), None, **options)
        loss = out.float().logsumexp(-1).square().mean()
        if split:
            _, groups = stage_backward_input([loss], None, [hidden], model.parameters())
            stage_backward_weight(model.parameters(), groups)
            lay_out_gradients(model.parameters())
        else:
            loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("spec", all_families(), ids=lambda spec: spec.name)
def test_no_weight_of_a_family_is_missed_or_left_in_another_layout(spec):
    """Fused optimizers read a gradient as if it had its weight's strides."""
    model = blocks_of(spec)
    whole = gradients(model, spec, split=False)
    halves = gradients(model, spec, split=True)
    for name, gradient in whole.items():
        assert gradient is not None, name
        torch.testing.assert_close(halves[name], gradient, rtol=1e-5, atol=0, msg=name)
        assert halves[name].stride() == model.get_parameter(name).stride(), name
