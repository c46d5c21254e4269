"""The model against published sizes, torch's FLOP counter, and Hugging Face's implementation."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.families import as_ours, build, twin
from tests.rounding import assert_rounds
from torchtitan.models import get_spec, parameter_names
from torchtitan.models.attention import backend
from torchtitan.models.attention.backend import attention_backend, document_mask, window_masks
from torchtitan.models.attention.interface import Scores
from torchtitan.models.layers.norms import RMSNorm
from torchtitan.models.layers.rope import apply_rope, rope_cache
from torchtitan.models.rope_scaling import RopeScaling
from torchtitan.optim.loss import cross_entropy
from torchtitan.utils.errors import ConfigError

SPEC = get_spec("llama3")
SCALING = RopeScaling(factor=8.0, original_max_seq_len=32).model_dump()
CASES = {
    "llama3": ("llama3", {"rope_scaling": SCALING}),
    "llama3 tied": ("llama3", {"rope_scaling": None, "tie_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2_5": ("qwen2_5", {}),
    "qwen3 tied": ("qwen3", {"tie_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe whole": ("qwen3_moe", {"normalize_expert_weights": False}),
}


def llama(**overrides):
    return build("llama3", **overrides)


PUBLISHED = {
    # Numbers of elements in the published safetensors, a tied embedding once.
    "llama3": {
        # With 32,000 entries, 41,689,600 as llama2.c's 42M; with 49,152, 134,515,008 and
        # 361,821,120 as SmolLM's.
        "30M": 41_689_600 - (32_000 - 8192) * 512,
        "125M": 134_515_008 - (49_152 - 32_000) * 576,
        "350M": 361_821_120 - (49_152 - 32_000) * 960,
        "1B": 1_235_814_400,
        "3B": 3_212_749_824,
        "8B": 8_030_261_248,
        "70B": 70_553_706_496,
        "405B": 405_853_388_800,
        "Llama-2-7B": 6_738_415_616,
        "Llama-2-13B": 13_015_864_320,
        "Llama-2-70B": 68_976_648_192,
        "CodeLlama-7B": 6_738_546_688,
        "CodeLlama-13B": 13_016_028_160,
        "CodeLlama-34B": 33_743_970_304,
        "CodeLlama-70B": 68_976_910_336,
    },
    "mistral": {
        "7B-v0.1": 7_241_732_096,
        "7B-v0.3": 7_248_023_552,
        "Nemo-12B": 12_247_782_400,
        "Small-24B": 23_572_403_200,
    },
    "mixtral": {"8x7B": 46_702_792_704, "8x22B": 140_620_634_112},
    "phi4": {
        "14B": 14_659_507_200,
        "Phi-3-mini-4k": 3_821_079_552,
        "Phi-3-medium-4k": 13_960_238_080,
    },
    # the larger one's as transformers' class has it
    "qwen2_moe": {"A2.7B": 14_315_784_192, "57B-A14B": 57_408_658_944},
    "qwen2_5": {
        "0.5B": 494_032_768,
        "1.5B": 1_543_714_304,
        "3B": 3_085_938_688,
        "7B": 7_615_616_512,
        "14B": 14_770_033_664,
        "32B": 32_763_876_352,
        "72B": 72_706_203_648,
        "Coder-0.5B": 494_032_768,
        "Coder-1.5B": 1_543_714_304,
        "Coder-3B": 3_085_938_688,
        "Coder-7B": 7_615_616_512,
        "Coder-14B": 14_770_033_664,
        "Coder-32B": 32_763_876_352,
        "Math-1.5B": 1_543_714_304,
        "Math-7B": 7_615_616_512,
        "Math-72B": 72_706_203_648,
    },
    "qwen3": {
        "0.6B": 596_049_920,
        "1.7B": 1_720_574_976,
        "4B": 4_022_468_096,
        "8B": 8_190_735_360,
        "14B": 14_768_307_200,
        "32B": 32_762_123_264,
    },
    "qwen3_moe": {"30B-A3B": 30_532_122_624, "235B-A22B": 235_093_634_560},
    "gpt_oss": {"20b": 20_914_757_184, "120b": 116_829_156_672},
    "olmo2": {
        "1B": 1_484_916_736,
        "7B": 7_298_617_344,
        "13B": 13_716_198_400,
        "32B": 32_234_279_936,
    },
    "olmo3": {
        "7B": 7_298_011_136,
        "32B": 32_233_522_176,
        "7B-64k": 7_298_011_136,
        "32B-64k": 32_233_522_176,
    },
    "gemma3": {
        # without the vision tower
        "1b": 999_885_952,
        "4b": 3_880_263_168,
        "12b": 11_766_034_176,
        "27b": 27_009_346_304,
    },
    "smollm3": {"3B": 3_075_098_624},
}
ACTIVE = {
    "30B-A3B": 3.3,
    "235B-A22B": 22,
    "20b": 3.6 + 0.58,
    "120b": 5.1 + 0.58,
    "8x7B": 12.9,
    "8x22B": 39,
    "A2.7B": 2.7,
    "57B-A14B": 14.2,
}
"""Billions, from the model cards; gpt-oss's leaves out the input embedding."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_parameter_counts_are_the_published_ones(family):
    spec = get_spec(family)
    assert PUBLISHED[family].keys() == spec.flavors.keys() - {"debugmodel"}
    for flavor, published in PUBLISHED[family].items():
        args = spec.args(flavor, {})
        with torch.device("meta"):
            model = spec.build(args, attention_backend("cpu"))
        assert {name for name, _ in model.named_parameters()} == set(parameter_names(spec, args))
        sizes = {name: param.numel() for name, param in model.named_parameters()}
        assert sum(sizes.values()) == published, flavor
        if args.n_experts:
            unused = 1 - args.experts_per_token / args.n_experts
            active = published - unused * sum(
                size for name, size in sizes.items() if ".experts." in name
            )
            assert active / 1e9 == pytest.approx(ACTIVE[flavor], rel=0.02)


@pytest.mark.parametrize(
    ("family", "flavor", "seq_len", "published"),
    [
        # GFLOPs per token: vendors' TFLOP/s over tokens/s. They count half of attention's square,
        # as it is masked.
        ("llama3", "8B", 8192, 51.5),
        ("llama3", "70B", 8192, 449.2),
        ("llama3", "405B", 8192, 2524.4),
        ("qwen3_moe", "30B-A3B", 4096, 23.0),
        ("qwen3_moe", "235B-A22B", 4096, 148.0),
        ("gpt_oss", "120b", 4096, 32.6),
    ],
)
def test_flops_are_the_published_ones(family, flavor, seq_len, published):
    spec = get_spec(family)
    args = spec.flavors[flavor]
    spans = [
        2 * args.window - args.window**2 / seq_len if args.kind(i) == "window" else seq_len
        for i in range(args.n_layers)
    ]
    masked = 6 * args.n_heads * args.head_dim * sum(spans)
    assert (spec.flops_per_token(args, seq_len) - masked) / 1e9 == pytest.approx(
        published, rel=0.01
    )


@pytest.mark.parametrize("case", [*CASES, "gpt_oss", "olmo3", "gemma3", "smollm3"])
def test_flops_formula_matches_torchs_counter(case):
    """The counter sees the full square of attention, as the formula's convention does, if SDPA is
    spelled out. Of a window, it sees twice the tokens in it.
    """
    kinds = {"layer_pattern": ("window", "nope", "full"), "window": 64}
    # biases don't count; the gradients of those of experts are products
    family, overrides = CASES.get(case, (case, kinds | {"ffn_bias": False}))
    model = build(family, **overrides)
    seq_len = 96
    tokens = torch.randint(0, 160, (2, seq_len))
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.1, 0.1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        cross_entropy(model(tokens), tokens).sum().backward()
    per_token = counter.get_total_flops() / tokens.numel()
    assert get_spec(family).flops_per_token(model.args, seq_len) == pytest.approx(
        per_token, rel=1e-6
    )


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_transformers(case):
    family, overrides = CASES[case]
    torch.manual_seed(0)
    ours = build(family, **overrides)
    theirs = twin(family, ours)
    tokens = torch.randint(0, 160, (2, 128))
    expected = theirs(tokens, labels=tokens)
    actual = ours(tokens)
    assert_rounds(actual.detach(), expected.logits.detach(), terms=160, chain=24, of="logits")
    loss = cross_entropy(actual[:, :-1], tokens[:, 1:]).sum() / tokens[:, 1:].numel()
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = as_ours(get_spec(family).hf.names(ours.args), theirs, gradients=True)
    for name, param in ours.named_parameters():
        assert_rounds(param.grad, gradients[name], terms=256, chain=48, of=name)


@pytest.mark.parametrize("family", PUBLISHED)
def test_missing_keys_mean_what_they_do_in_transformers(family):
    transformers = pytest.importorskip("transformers")
    spec = get_spec(family)
    sizes = {"vocab_size": 99, "hidden_size": 4096, "intermediate_size": 64, "num_hidden_layers": 2}
    short = {"model_type": spec.hf.model_type, "num_attention_heads": 32, **sizes}
    if family == "mistral":
        short["sliding_window"] = None
    whole = transformers.AutoConfig.for_model(**short).to_dict()
    assert spec.hf.args(short) == spec.hf.args(whole)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama3", {"attention_bias": True}, "attention_bias: got True, must be False"),
        ("llama3", {"mlp_bias": True}, "mlp_bias: got True, must be False"),
        ("llama3", {"hidden_act": "gelu"}, "hidden_act: got 'gelu', must be 'silu'"),
        (
            "llama3",
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "RoPE scaling of type 'longrope'",
        ),
        (
            "llama3",
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "RoPE scaling .* lacks some",
        ),
        ("llama3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, must be 1"),
        ("llama3", {"model_type": "qwen2"}, "model_type: got 'qwen2', must be 'llama'"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "full_attention"]},
            "the kinds of 2 layers are given, must be of num_hidden_layers 6",
        ),
        (
            "qwen3",
            {"layer_types": ["chunked_attention"] * 6},
            "layer_types: got 'chunked_attention', must be one of 'full_attention', 'sliding_a",
        ),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit: got 6.0, must be 7.0"),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                }
            },
            "rope_parameters.sliding_attention: must be plain RoPE, or scaled like full",
        ),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50.0, must be"),
        ("smollm3", {"no_rope_layers": [1]}, "the kinds of 1 layers are given"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window: got True, must be False"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: got 2, must be 1"),
        (
            "phi4",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}},
            "rope_scaling.rope_type: got 'longrope', must be 'default'",
        ),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 99},
            "num_experts_per_tok 99 must be 1 to num_experts 16",
        ),
    ],
)
def test_what_a_family_cannot_represent_is_refused(family, changes, message):
    spec = get_spec(family)
    config = spec.hf.config(spec.flavors["debugmodel"], "float32")
    with pytest.raises(ConfigError, match=f"^config.json: {message}") as error:
        spec.hf.args(config | changes)
    assert len(error.value.problems) == 1


def test_rope_scaling_changes_the_logits():
    """Guards the test above: the scaling must matter at this size, or agreeing on it proves
    nothing.
    """
    torch.manual_seed(0)
    plain = llama(rope_scaling=None)
    scaled = llama(rope_scaling=SCALING)
    scaled.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, 160, (1, 128))
    assert (plain(tokens) - scaled(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("mscale", [1.0, 0.707, 0.0])
def test_latent_scores_are_scaled_as_in_transformers(mscale):
    """By the head size, and the square of YaRN's magnitude."""
    theirs = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    scaling = {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }
    config = theirs.DeepseekV3Config(rope_parameters={"rope_type": "yarn", **scaling})
    with torch.device("meta"):
        expected = theirs.DeepseekV3Attention(config, 0).scaling
    ours = {
        "type": "yarn",
        "factor": 40.0,
        "original_max_seq_len": 4096,
        "mscale": mscale or None,
        "mscale_all_dim": mscale or None,
    }
    sizes = {"head_size": 192, "kv_lora_rank": 512, "rope_head_size": 64, "value_head_size": 128}
    args = SPEC.args("debugmodel", sizes | {"rope_scaling": ours})
    assert args.score_scale == pytest.approx(expected, rel=1e-9)


def test_a_part_of_the_model_passes_hidden_states():
    """Cutting a model at any layer and chaining the parts gives the whole model's logits."""
    torch.manual_seed(0)
    whole = llama()
    first = llama()
    second = llama()
    for part in (first, second):
        part.load_state_dict(whole.state_dict())
    first.norm = first.output = None
    second.tok_embeddings = None
    del first.layers["2"], second.layers["0"], second.layers["1"]
    tokens = torch.randint(0, 160, (2, 16))
    assert torch.equal(second(first(tokens)), whole(tokens))


def initial_loss(family, **overrides):
    """The first loss of random tokens, minus that of a uniform guess."""
    from torchtitan.parallel.init import materialize

    torch.manual_seed(0)
    spec = get_spec(family)
    model = build(family, **overrides)
    cpu = torch.device("cpu")
    materialize(model, cpu, cpu, 0, lambda fqn: spec.init(fqn, model.args))
    vocab = model.args.vocab_size
    tokens, labels = torch.randint(0, vocab, (2, 4, 128))
    with torch.no_grad():
        loss = cross_entropy(model(tokens), labels).sum() / tokens.numel()
    return loss.item() - math.log(vocab)


def test_initial_loss_is_that_of_a_uniform_guess():
    # Logits of unit variance over a uniform guess add half a variance.
    assert initial_loss("llama3", vocab_size=4096) == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "olmo3", "gemma3"])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_narrow_tied_model_does_not_predict_repetition(family, dim):
    """Its stream is mostly the embedding, whose product with itself is the token's own logit."""
    scale = {"embedding_scale": dim**0.5} if family == "gemma3" else {}
    loss = initial_loss(family, dim=dim, vocab_size=66, tie_embeddings=True, **scale)
    assert -0.05 < loss < 0.5


def test_a_wide_tied_embedding_is_no_larger_than_an_output_projection():
    sizes = {"dim": 6400, "n_heads": 64, "n_kv_heads": 64}
    args = SPEC.args("debugmodel", sizes | {"tie_embeddings": True})
    assert SPEC.init("tok_embeddings.weight", args).std == pytest.approx(1 / 80)


@pytest.mark.parametrize(
    ("flavor", "overrides", "text"),
    [
        ("8b", {}, "did you mean '8B'"),
        ("8B", {"n_layer": 2}, "n_layers"),
        ("8B", {"foo": 2}, r"unknown key; torchtitan\.models\.args\.DecoderArgs declares"),
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
    model = llama()
    tokens, documents = packed()
    mask = document_mask(documents, torch.arange(tokens.shape[1]), torch.float32)
    whole = model(tokens, None, mask).split(DOCUMENTS, dim=1)
    for part, logits in zip(tokens.split(DOCUMENTS, dim=1), whole, strict=True):
        assert_rounds(model(part).detach(), logits.detach(), terms=96, chain=24)
    assert not torch.allclose(model(tokens)[:, -1], whole[-1][:, -1]), (
        "without the mask they see each other"
    )


def test_flex_attentions_mask_is_the_dense_one():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens, documents = packed()
    positions = torch.tensor([3, 2, 30, 8])
    q = torch.randn(2, 4, 4, 16)
    k = torch.randn(2, 2, tokens.shape[1], 16)
    v = torch.randn(2, 2, tokens.shape[1], 16)
    dense = attention_backend("cpu")(
        q, k, v, Scores(document_mask(documents, positions, torch.float32))
    )
    flex = flex_attention(
        q,
        k,
        v,
        block_mask=window_masks(documents, positions, (None,), create_block_mask).masks[0],
        enable_gqa=True,
    )
    assert_rounds(flex, dense, terms=32, chain=2)


@pytest.mark.parametrize(
    ("installed", "capability", "expected"), [(True, 9, ["FA3"]), (True, 8, []), (False, 9, [])]
)
def test_flash_attention_3_replaces_2_on_hopper_if_installed(
    monkeypatch, installed, capability, expected
):
    activated = []
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activated.append)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(
        backend, "find_spec", lambda name: installed and name == "flash_attn_interface"
    )
    backend._activate_flash_attention_3.cache_clear()
    attention_backend("cuda")
    backend._activate_flash_attention_3.cache_clear()
    assert activated == expected


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_pairs_in_the_complex_plane(interleaved, monkeypatch):
    """Forward by the angle, backward by its negative; and where a compiler or a DTensor sees each
    operation, bit for bit the same.
    """
    torch.manual_seed(0)
    cos, sin = rope_cache(8, 1e4, None, 5)
    x = torch.randn(2, 5, 3, 10, requires_grad=True)  # the last two features are not rotated
    upstream = torch.randn(2, 5, 3, 10)

    def run():
        out = apply_rope(x, cos, sin, interleaved=interleaved)
        return out.detach(), *torch.autograd.grad(out, x, upstream)

    def pairs(values, interleaved=False):
        rotated = values[..., :8].double()
        if interleaved:
            return torch.view_as_complex(rotated.unflatten(-1, (4, 2)))
        return torch.complex(*rotated.chunk(2, dim=-1))

    out, gradient = run()
    turn = torch.polar(torch.ones(5, 4).double(), torch.atan2(sin, cos)[:, :4].double())[:, None]
    for got, expected in (
        (pairs(out), pairs(x.detach(), interleaved) * turn),
        (pairs(gradient, interleaved), pairs(upstream) * turn.conj()),
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert torch.equal(gradient[..., 8:], upstream[..., 8:])
    monkeypatch.setattr("torchtitan.models.layers.rope.runs_eagerly", lambda x: False)
    for a, b in zip((out, gradient), run(), strict=True):
        assert torch.equal(a, b)


def test_rms_norm_is_torchs():
    torch.manual_seed(0)
    ours = RMSNorm(16, eps=1e-6)
    theirs = torch.nn.RMSNorm(16, eps=1e-6)
    ours.weight = theirs.weight
    torch.nn.init.normal_(theirs.weight)
    # Small enough for eps to matter, whether it is added below the root or after it.
    x = (1e-3 * torch.randn(2, 3, 16)).requires_grad_()
    upstream = torch.randn(2, 3, 16)
    results = [
        (out, *torch.autograd.grad(out, (x, theirs.weight), upstream))
        for out in (ours(x), theirs(x))
    ]
    assert_rounds(*results, terms=16, chain=2)


def test_rms_norm_in_bf16_computes_in_fp32():
    """Input and weight are rounded, the result and the gradients once more, nothing in between."""
    torch.manual_seed(0)
    norm = RMSNorm(16, eps=1e-6).bfloat16()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 16).bfloat16().requires_grad_()
    upstream = torch.randn(2, 3, 16).bfloat16()
    exact = [t.detach().double().requires_grad_() for t in (x, norm.weight)]
    out = norm(x)
    expected = torch.nn.functional.rms_norm(exact[0], (16,), exact[1], 1e-6)
    gradients = torch.autograd.grad(out, (x, norm.weight), upstream)
    exact_gradients = torch.autograd.grad(expected, exact, upstream.double())
    for a, b in zip([out, *gradients], [expected, *exact_gradients], strict=True):
        assert a.dtype == torch.bfloat16
        assert ((a - b).abs() <= 2**-8 * b.abs() + 1e-5).all()  # half a unit is at most 2^-9
