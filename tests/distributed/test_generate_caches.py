"""Each kind of cache: the text of forwards without one, on two ranks as well, and its size."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from torchtitan.inference.generator import SamplingSettings, TextGenerator
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.tensor.styles import apply_tensor_parallel

SPEC = get_spec("llama3")
TINY = {
    "vocab_size": 160,
    "dim": 64,
    "n_layers": 3,
    "n_heads": 8,
    "n_kv_heads": 2,
    "ffn_dim": 96,
    "max_seq_len": 96,
}
LATENT = {
    "n_kv_heads": 8,
    "kv_lora_rank": 20,
    "rope_head_size": 8,
    "head_size": 24,
    "value_head_size": 12,
}
DELTA = {
    "layer_pattern": ["delta", "delta", "full"],
    "delta_key_heads": 4,
    "delta_value_heads": 8,
    "delta_key_size": 16,
    "delta_value_size": 12,
}
KINDS = {
    "window": {"layer_pattern": ["window", "window", "full"], "window": 7},
    "sinks": {"layer_pattern": ["window", "full"], "window": 5, "sinks": True},
    "delta": DELTA,
    "latent": LATENT,
    "latent queries": LATENT | {"q_lora_rank": 28, "layer_pattern": ["nope", "full"]},
    "latent window": LATENT | {"layer_pattern": ["window"], "window": 6, "attention_scale": 0.3},
}
GREEDY = SamplingSettings(temperature=0)
PROMPTS = [[5, 9, 3], [7], list(range(20, 61)), [1, 2, 3, 4, 5, 6]]
SEQ = 64


def build(kind):
    torch.manual_seed(3)
    model = SPEC.build(SPEC.args("8B", TINY | KINDS.get(kind, {})), attention_backend("cpu"))
    for param in model.parameters():  # far from uniform, so that every token matters
        torch.nn.init.normal_(param, std=0.3) if param.dim() > 1 else torch.nn.init.uniform_(
            param, 0.5, 1.5
        )
    return model


def generator(model, mesh=None):
    return TextGenerator(
        model, torch.device("cpu"), rows=4, max_seq_len=SEQ, vocab_size=160, stop=(), mesh=mesh
    )


def without_cache(model, prompt, count):
    """The likeliest tokens, each from a forward over the whole text so far."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_whole_forwards(kind):
    model = build(kind)
    expected = [without_cache(model, prompt, 20) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 8, (
        "a model that repeats itself proves nothing"
    )
    generate = generator(model)
    assert [row.tokens for row in generate(PROMPTS, GREEDY, 20)] == expected
    assert [row.tokens for row in generate(PROMPTS[1:3], GREEDY, 20)] == expected[1:3], (
        "the cache is reused"
    )


def on_two_ranks(kind):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build(kind)
    styles = SPEC.tensor_parallel_styles
    apply_tensor_parallel(model, mesh, styles, sharded_loss=False, float8=False)
    generate = generator(model, mesh)
    return [row.tokens for row in generate(PROMPTS, GREEDY, 12)], generate.cache.bytes


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(x, marks=pytest.mark.slow)
        if x in ("window", "latent", "latent queries")
        else x
        for x in KINDS
    ],
)
def test_two_ranks_generate_the_same(ranks, kind):
    """With half the heads each. Latent vectors have none, so both keep them."""
    generate = generator(build(kind))
    expected = [row.tokens for row in generate(PROMPTS, GREEDY, 12)]
    for tokens, held in ranks(2, on_two_ranks, kind):
        assert tokens == expected
        share = 1 if "latent" in kind else 0.5
        assert held == pytest.approx(generate.cache.bytes * share, rel=0.02)


def bytes_held(kind):
    """Measured after a batch."""
    generate = generator(build(kind))
    generate(PROMPTS, GREEDY, 2)
    return generate.cache.bytes


def test_bytes_against_an_ordinary_cache():
    """4 rows of 64 positions, and one for padding."""
    places = SEQ + 1
    ordinary = 3 * 4 * places * 2 * (8 + 8) * 4
    assert bytes_held("ordinary") == ordinary
    # Two of three layers keep 7 positions.
    assert bytes_held("window") == ordinary * (places + 2 * 7) / (3 * places)
    # 28 elements for a token instead of 8 heads of 24 + 12.
    assert bytes_held("latent") == 3 * 4 * places * 28 * 4
    assert bytes_held("latent window") == 3 * 4 * 6 * 28 * 4
    # A state of each of 8 heads, and 3 inputs of the convolution over 2 x 4 x 16 + 8 x 12 channels.
    states = 2 * 4 * (8 * 16 * 12 + 3 * 224) * 4
    assert bytes_held("delta") == ordinary / 3 + states
