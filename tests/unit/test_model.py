"""The model against published sizes, torch's FLOP counter, and Hugging Face's implementation."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models import get_spec, layers
from torchtitan.models.layers import attention_backend, block_mask, document_mask
from torchtitan.models.decoder_args import RopeScaling
from torchtitan.optim.loss import cross_entropy_sum
from torchtitan.utils.errors import ConfigError

SPEC = get_spec("llama3")
TINY = {"vocab_size": 160, "dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 96, "max_seq_len": 128}


def build(**overrides):
    return SPEC.build(SPEC.args("8B", TINY | overrides), attention_backend("cpu"))


@pytest.mark.parametrize(
    ("flavor", "published"),
    [
        # Meta's model cards; the sizes of 1B and 3B count the tied embedding once.
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_parameter_count_is_the_published_one(flavor, published):
    with torch.device("meta"):
        model = SPEC.build(SPEC.args(flavor, {}), attention_backend("cpu"))
    assert sum(p.numel() for p in model.parameters()) == published
    assert {name for name, _ in model.named_parameters()} == set(SPEC.hf.names(model.args))


@pytest.mark.parametrize("tied", [False, True])
def test_flops_formula_matches_torchs_counter(tied):
    """The counter sees the full square of attention, as the formula's convention does, if SDPA is spelled out."""
    model, seq_len = build(tie_embeddings=tied), 96
    tokens = torch.randint(0, 160, (2, seq_len))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        cross_entropy_sum(model(tokens), tokens).backward()
    per_token = counter.get_total_flops() / tokens.numel()
    assert SPEC.flops_per_token(model.args, seq_len) == pytest.approx(per_token, rel=1e-6)


def hf_model(args):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig.from_dict(SPEC.hf.config(args, "float32"))
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.08) if param.dim() > 1 else param.uniform_(0.5, 1.5)
    return model


SCALING = RopeScaling(factor=8.0, original_max_seq_len=32).model_dump()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, SCALING])
def test_logits_and_loss_equal_transformers(scaling, tied):
    torch.manual_seed(0)
    ours = build(rope_scaling=scaling, tie_embeddings=tied)
    theirs = hf_model(ours.args)
    weights = theirs.state_dict()
    ours.load_state_dict({name: weights[hf_name] for name, hf_name in SPEC.hf.names(ours.args).items()})
    tokens = torch.randint(0, 160, (2, 128))
    with torch.no_grad():
        expected, actual = theirs(tokens, labels=tokens), ours(tokens)
    assert (actual - expected.logits).abs().max() <= 1e-4 * expected.logits.abs().max()
    loss = cross_entropy_sum(actual[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-4)


def test_rope_scaling_changes_the_logits():
    """Guards the test above: the scaling must matter at this size, or agreeing on it proves nothing."""
    torch.manual_seed(0)
    plain, scaled = build(rope_scaling=None), build(rope_scaling=SCALING)
    scaled.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, 160, (1, 128))
    assert (plain(tokens) - scaled(tokens)).abs().max() > 1e-3


def test_a_part_of_the_model_passes_hidden_states():
    """Cutting a model at any layer and chaining the parts gives the whole model's logits."""
    torch.manual_seed(0)
    whole, first, second = build(), build(), build()
    for part in (first, second):
        part.load_state_dict(whole.state_dict())
    first.norm = first.output = None
    second.tok_embeddings = None
    del first.layers["2"], second.layers["0"], second.layers["1"]
    tokens = torch.randint(0, 160, (2, 16))
    assert torch.equal(second(first(tokens)), whole(tokens))


def test_initial_loss_is_that_of_a_uniform_guess():
    torch.manual_seed(0)
    from torchtitan.parallel.init import materialize

    model = build(vocab_size=4096)
    materialize(model, torch.device("cpu"), torch.device("cpu"), 0, lambda fqn: SPEC.init(fqn, model.args))
    tokens = torch.randint(0, 4096, (4, 128))
    loss = cross_entropy_sum(model(tokens), torch.randint(0, 4096, (4, 128))) / tokens.numel()
    # Logits of unit variance over a uniform guess add half a variance.
    assert loss.item() == pytest.approx(math.log(4096) + 0.5, abs=0.15)


@pytest.mark.parametrize(
    ("flavor", "overrides", "text"),
    [
        ("8b", {}, "did you mean '8B'"),
        ("8B", {"n_layer": 2}, "n_layers"),
        ("8B", {"n_layers": "2"}, "model.overrides.n_layers"),
        ("8B", {"n_heads": 12}, "n_heads"),
    ],
)
def test_bad_model_arguments_are_named(flavor, overrides, text):
    with pytest.raises(ConfigError, match=text):
        SPEC.args(flavor, overrides)


def test_unknown_family():
    with pytest.raises(ConfigError, match="llama3"):
        get_spec("llama9")


DOCUMENTS = [5, 1, 17, 9]
"""Lengths of the documents in a row."""


def packed():
    torch.manual_seed(2)
    tokens = torch.randint(0, 160, (2, sum(DOCUMENTS)))
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    return tokens, torch.stack([ids, ids])


def test_under_a_document_mask_each_document_is_alone():
    """RoPE is relative, so a document gives the same logits wherever in the row it begins."""
    model = build()
    tokens, documents = packed()
    mask = document_mask(documents, torch.arange(tokens.shape[1]), torch.float32)
    whole = model(tokens, None, mask).split(DOCUMENTS, dim=1)
    for part, logits in zip(tokens.split(DOCUMENTS, dim=1), whole, strict=True):
        torch.testing.assert_close(model(part), logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(tokens)[:, -1], whole[-1][:, -1]), "without the mask they see each other"


def test_flex_attentions_mask_is_the_dense_one():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens, documents = packed()
    positions = torch.tensor([3, 2, 30, 8])
    q, k, v = torch.randn(2, 4, 4, 16), torch.randn(2, 2, tokens.shape[1], 16), torch.randn(2, 2, tokens.shape[1], 16)
    dense = attention_backend("cpu")(q, k, v, document_mask(documents, positions, torch.float32))
    flex = flex_attention(q, k, v, block_mask=block_mask(documents, positions, create_block_mask), enable_gqa=True)
    torch.testing.assert_close(flex, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("installed", "capability", "expected"), [(True, 9, ["FA3"]), (True, 8, []), (False, 9, [])])
def test_flash_attention_3_replaces_2_on_hopper_if_installed(monkeypatch, installed, capability, expected):
    activated = []
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activated.append)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(layers, "find_spec", lambda name: installed and name == "flash_attn_interface")
    layers._activate_flash_attention_3.cache_clear()
    attention_backend("cuda")
    layers._activate_flash_attention_3.cache_clear()
    assert activated == expected
