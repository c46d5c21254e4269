"""The examples of the documentation: packages that change the model without a fork."""

import logging

import pytest
import torch

from tests.examples import qk_norm
from torchtitan.lab import parity
from torchtitan.models import get_spec
from torchtitan.models.layers import attention_backend

QK_NORM = [f"--experimental.custom_import={qk_norm.__name__}", "--model.name=llama3_qk_norm"]


def check(argv):
    logging.getLogger("torchtitan").setLevel("ERROR")
    return parity.check(argv)


@pytest.mark.parametrize(("world", "axes"), [(2, ["tensor"]), (4, ["tensor", "pipeline"])])
def test_qk_norm_trains_as_on_one_process(ranks, world, axes):
    degrees = [f"--parallelism.{axis}_parallel_degree=2" for axis in axes]
    for passed, text in ranks(world, check, [*QK_NORM, *degrees, "--training.local_batch_size=2"], timeout=240):
        assert passed, text


def test_qk_norm_is_qwen3():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    spec = get_spec("llama3_qk_norm")
    args = spec.args("debugmodel", {"n_layers": 2, "n_kv_heads": 4})
    config = spec.hf.config(args, "float32")
    assert spec.hf.args(config) == args
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(config)).eval()
    with torch.no_grad():
        for param in theirs.parameters():
            param.normal_(std=0.08) if param.dim() > 1 else param.uniform_(0.5, 1.5)
    ours, weights = spec.build(args, attention_backend("cpu")), theirs.state_dict()
    ours.load_state_dict({name: weights[hf_name] for name, hf_name in spec.hf.names(args).items()})
    tokens = torch.randint(0, args.vocab_size, (2, 64))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()
