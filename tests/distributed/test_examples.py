"""The examples of the documentation: packages that change the model without a fork."""

import logging

import pytest
import torch

from tests.examples import gated_attention
from torchtitan.lab import parity
from torchtitan.models import get_spec
from torchtitan.models.layers import attention_backend

GATED = [f"--experimental.custom_import={gated_attention.__name__}", "--model.name=llama3_gated"]


def check(argv):
    logging.getLogger("torchtitan").setLevel("ERROR")
    return parity.check(argv)


@pytest.mark.parametrize(("world", "axes"), [(2, ["tensor"]), (4, ["tensor", "pipeline"])])
def test_gated_attention_trains_as_on_one_process(ranks, world, axes):
    degrees = [f"--parallelism.{axis}_parallel_degree=2" for axis in axes]
    for passed, text in ranks(world, check, [*GATED, *degrees, "--training.local_batch_size=2"], timeout=240):
        assert passed, text


def test_open_gates_are_llama():
    """A gate whose scores are zero is one half."""
    torch.manual_seed(0)
    args = get_spec("llama3").args("debugmodel", {"n_layers": 2})
    plain = get_spec("llama3").build(args, attention_backend("cpu"))
    gated = get_spec("llama3_gated").build(args, attention_backend("cpu"))
    missing = gated.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == [f"layers.{i}.attention.gate.weight" for i in range(2)]
    tokens = torch.randint(0, args.vocab_size, (2, 64))
    with torch.no_grad():
        ungated = gated(tokens)
        for block in gated.layers.values():
            block.attention.gate.weight.zero_()
            block.attention.wo.weight.mul_(2)
        torch.testing.assert_close(gated(tokens), plain(tokens), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(ungated, plain(tokens), atol=1e-2)
