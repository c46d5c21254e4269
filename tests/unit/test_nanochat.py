"""nanochat is a file of flags: its forward and gradients are those of a model written out."""

import pytest
import torch
import torch.nn.functional as F

from tests.doc_blocks import ROOT
from torchtitan.config import resolve
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.init import materialize
from torchtitan.train.preflight import preflight

FILE = [
    f"--config={ROOT / 'train_configs/nanochat_d20.toml'}",
    f"--model.hf_assets_path={ROOT / 'tests/assets/tokenizer'}",
    "--training.dataset=demo",
]
EPS = 1.2e-7


def norm(x):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def rotate(x):
    """Rotary positions of `[b, s, h, d]`."""
    steps, half = x.shape[1], x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(steps)[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def nanochat(weights, tokens, layers, heads):
    """Logits by nanochat's description: norms without weights, also on embeddings and, after
    rotation, on queries and keys; squared ReLU; no biases; an output of its own, capped at 15.
    """
    x = norm(weights["tok_embeddings.weight"][tokens])
    rows, steps, dim = x.shape
    future = torch.ones(steps, steps, dtype=torch.bool).triu(1)
    for i in range(layers):
        w = {
            name: weights[f"layers.{i}.{name}.weight"]
            for name in (*(f"attention.w{x}" for x in "qkvo"), "feed_forward.w1", "feed_forward.w2")
        }
        read = norm(x)
        q, k, v = ((read @ w[f"attention.w{x}"].T).view(rows, steps, heads, -1) for x in "qkv")
        q, k = norm(rotate(q)), norm(rotate(k))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (dim // heads) ** 0.5
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", shares, v).reshape(rows, steps, dim)
        x = x + mixed @ w["attention.wo"].T
        hidden = (norm(x) @ w["feed_forward.w1"].T).relu() ** 2
        x = x + hidden @ w["feed_forward.w2"].T
    return 15 * torch.tanh(norm(x) @ weights["output.weight"].T / 15)


@pytest.fixture(scope="module")
def setup():
    return preflight(resolve(FILE, 1).config, output=False)


def test_it_has_as_many_parameters_as_nanochats_d20(setup):
    with torch.device("meta"):
        model = setup.spec.build(setup.args, None)
    matrices = 20 * (4 + 2 * 4) * 1280**2
    assert sum(p.numel() for p in model.parameters()) == 2 * 65_536 * 1280 + matrices == 560_988_160


def test_it_computes_what_nanochats_description_says(setup):
    spec = get_spec("llama3")
    sizes = {"n_layers": 3, "dim": 48, "n_heads": 3, "n_kv_heads": 3, "ffn_dim": 192}
    args = type(setup.args).model_validate(
        setup.args.model_dump() | sizes | {"vocab_size": 40, "max_seq_len": 24, "init_std": 0.2}
    )
    model = spec.build(args, attention_backend("cpu"))
    cpu = torch.device("cpu")
    materialize(model, cpu, cpu, 0, lambda fqn: spec.init(fqn, args))
    tokens = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(0))
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = nanochat(weights, tokens, layers=3, heads=3)
    logits = model(tokens)
    assert logits.abs().max() > 2  # where the cap bends
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for out in (logits, expected):
        F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, param in model.named_parameters():
        largest = weights[name].grad.abs().max().item()
        torch.testing.assert_close(param.grad, weights[name].grad, rtol=0, atol=1e-5 * largest)
