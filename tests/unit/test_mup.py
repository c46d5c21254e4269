"""muP: what it scales, and the coordinate check that shows when something is not."""

from unittest import mock

import pytest
import torch

from examples import coordinate_check
from examples.coordinate_check import check_widths, slope
from torchtitan.config import resolve
from torchtitan.config.sections.optim import Optimizer, ParamGroup
from torchtitan.models import export_problems, get_spec
from torchtitan.models.args import DecoderArgs
from torchtitan.models.attention.backend import attention_backend
from torchtitan.optim import optimizer as optimizers
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.parallel.init import materialize
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

WIDTHS = [32, 64, 128, 256]
MUP = "--model.overrides.mup_base_dim=64"
DENSE = get_spec("llama3")


def check(*argv, widths=WIDTHS):
    config = resolve(list(argv), 1).config
    with mock.patch.object(coordinate_check, "SEEDS", 2):
        return check_widths(config, preflight(config, output=False), widths)


# ---- the coordinate check


@pytest.mark.parametrize(
    "argv",
    [
        [],
        pytest.param(["--optimizer.name=Muon"], marks=pytest.mark.slow),
        ["--model.name=qwen3_moe", "--model.overrides.shared_expert_dim=64"],
        pytest.param(
            ["--model.overrides.tie_embeddings", "--optimizer.weight_decay=1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["--model.name=qwen3_moe", "--optimizer.name=Muon"], marks=pytest.mark.slow),
    ],
    ids=lambda argv: " ".join(word.rpartition(".")[2] for word in argv) or "dense",
)
def test_sizes_stay_in_mup_and_grow_in_the_standard_parametrization(argv):
    passed, text = check(*argv, MUP)
    assert passed, text
    passed, text = check(*argv)
    assert not passed
    logits = next(line for line in text.splitlines() if "logits" in line and "change" in line)
    assert "moves" in logits
    assert float(logits.split()[-2]) > 0.5


def unscaled_init(patch):
    patch.setattr("torchtitan.models.decoder.mup.std_factor", lambda fqn, args: 1.0)


def unscaled_rates(patch):
    real = optimizers._settings
    patch.setattr(
        optimizers, "_settings", lambda name, param, config, ratio: real(name, param, config, 1.0)
    )


def unscaled_logits(patch):
    patch.setattr(DecoderArgs, "logit_factor", 1.0)


def output_rate_scaled_too(patch):
    """As a hidden matrix's would be, which with the multiplier is once too often."""
    real = optimizers._settings

    def settings(name, param, config, ratio):
        of_block = real("layers.0.attention.wq.weight", param, config, ratio)["lr_scale"]
        ratio = 1 / of_block if name != "output.weight" else param.shape[1] / 64
        return real(name, param, config, ratio)

    patch.setattr(optimizers, "_settings", settings)


@pytest.mark.parametrize(
    ("mistake", "moving"),
    [
        (unscaled_init, "layers.0.attention       start"),
        (unscaled_rates, "layers.1.feed_forward    change"),
        (unscaled_logits, "logits                   change"),
        (output_rate_scaled_too, "logits                   change"),
    ],
)
def test_each_scale_is_needed(monkeypatch, mistake, moving):
    mistake(monkeypatch)
    passed, text = check(MUP)
    assert not passed
    assert any(moving in line and line.endswith("moves") for line in text.splitlines()), text


def test_a_slope_is_the_exponent_of_a_power_law():
    assert slope([64, 128, 512], [3.0, 6.0, 24.0]) == pytest.approx(1.0)
    assert slope([64, 128, 256], [8.0, 4.0, 2.0]) == pytest.approx(-1.0)
    assert slope([64, 128], [0.0, 0.0]) == 0.0
    assert slope([64, 128], [0.0, 1.0]) == float("inf")
    assert slope([64, 128], [1.0, float("nan")]) == float("inf")


def test_the_command_exits_by_the_verdict(capsys):
    assert coordinate_check.main(["32,256", MUP]) == 0
    assert "PASS" in capsys.readouterr().out
    assert coordinate_check.main(["32,256"]) == 1
    assert "mup_base_dim turns muP on" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="width 40: a width of a small llama3 debugmodel is"):
        coordinate_check.main(["40,64"])


# ---- what follows from the base's width, against table 8 of the paper


def args(dim, name="llama3", **overrides):
    sizes = {"dim": dim, "n_heads": dim // 16, "n_kv_heads": dim // 32, "ffn_dim": 3 * dim}
    return get_spec(name).args("debugmodel", sizes | overrides, max_seq_len=64)


def test_deviations_are_those_of_the_paper():
    """Of hidden weights in proportion to the root of 1 / fan-in, of a router 1 / fan-in; others
    don't depend on the width, and the logits' multiplier is 1 / fan-in.
    """
    experts = {"n_experts": 8, "experts_per_token": 2, "expert_dim": 64, "shared_expert_dim": 32}
    base, wide = (
        args(dim, **experts, shared_expert_gate=True, mup_base_dim=64) for dim in (64, 256)
    )
    expected = {
        "tok_embeddings.weight": 1.0,
        "output.weight": 1.0,
        "layers.1.attention.wq.weight": 0.5,
        "layers.1.attention.wo.weight": 0.5,
        "layers.1.moe.experts.w2": 0.5,
        "layers.1.moe.shared.w1.weight": 0.5,
        "layers.1.moe.router.gate.weight": 0.25,
        "layers.1.moe.shared_gate.weight": 0.25,
    }
    found = {name: DENSE.init(name, wide).std / DENSE.init(name, base).std for name in expected}
    assert found == pytest.approx(expected)
    assert wide.logit_factor / base.logit_factor == 0.25


@pytest.mark.parametrize(
    ("name", "wide", "decay"), [("AdamW", 0.25, 0.4), ("Adam", 0.25, 0.1), ("Muon", 0.5, 0.2)]
)
def test_rates_are_those_of_the_paper(name, wide, decay):
    """Adam's of hidden weights are in proportion to 1 / fan-in; the rate times decoupled decay
    stays.
    """
    sizes = args(256, mup_base_dim=64, qk_norm=True, qkv_bias=True)
    model = DENSE.build(sizes, attention_backend("cpu"))
    group = ParamGroup(pattern="*.wk.weight", lr_scale=3)
    optimizer = build_optimizer(
        [model],
        Optimizer(name=name, weight_decay=0.1, param_groups=[group]),
        width_ratio=lambda fqn: DENSE.width_ratio(fqn, sizes),
    )
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = {
        fqn: (of[id(p)]["lr_scale"], of[id(p)]["weight_decay"])
        for fqn, p in model.named_parameters()
    }
    assert found["tok_embeddings.weight"] == found["output.weight"] == (1.0, 0.1)
    assert found["layers.0.attention.wq.bias"] == found["norm.weight"] == (1.0, 0.0)
    assert found["layers.0.attention.wq.weight"] == pytest.approx((wide, decay))
    assert found["layers.0.feed_forward.w2.weight"] == pytest.approx((wide, decay))
    assert found["layers.0.attention.wk.weight"] == pytest.approx((3 * wide, decay))


def test_scores_are_divided_by_the_head_size():
    def scale(**sizes):
        return args(256, **sizes).score_scale

    assert scale(mup_base_dim=64) == 16**-0.5  # more heads, of the same size
    assert scale(mup_base_dim=64, mup_base_head_size=16) == 16**-0.5
    heads = {"n_heads": 4, "n_kv_heads": 4}
    assert scale(mup_base_dim=64, mup_base_head_size=16, **heads) == 16**0.5 / 64
    assert scale(mup_base_dim=64, attention_scale=0.3, **heads) == 0.3
    both = {"mup_base_dim": 64, "mup_base_head_size": 16, "attention_scale": 0.3}
    with pytest.raises(ConfigError, match="both set the scale of scores: set one"):
        args(256, **both)


def test_it_is_not_exported_as_a_class_that_lacks_it():
    assert export_problems(DENSE, args(64)) == []
    (problem,) = export_problems(DENSE, args(64, mup_base_dim=32))
    assert "model.overrides.mup_base_dim: Hugging Face's llama has no such setting" in problem


def test_the_base_model_is_the_standard_one():
    tokens = torch.arange(32)[None]
    logits = []
    for base in (None, 64):
        sizes = args(64, mup_base_dim=base, mup_base_head_size=base and 16)
        model = DENSE.build(sizes, attention_backend("cpu"))
        cpu = torch.device("cpu")
        materialize(model, cpu, cpu, 0, lambda fqn, sizes=sizes: DENSE.init(fqn, sizes))
        logits.append(model(tokens))
    assert torch.equal(*logits)


LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "head_size": 24,
    "rope_head_size": 8,
    "value_head_size": 16,
}
EXPERTS = {
    "n_experts": 4,
    "experts_per_token": 2,
    "router_bias": True,
    "ffn_bias": True,
    "shared_expert_gate": True,
}


@pytest.mark.parametrize(
    "kinds",
    [
        {"gated_attention": True, "sinks": True, "qk_norm": True, "wo_bias": True},
        {**EXPERTS, "qk_norm": True, "qk_norm_whole": True, "norm_placement": "both"},
        {**LATENT, **EXPERTS, "n_dense_layers": 1, "embedding_norm": True},
    ],
    ids=["heads", "experts", "latent"],
)
def test_rates_follow_the_width_exactly_where_the_inputs_do(kinds):
    """Of all matrices of the blocks: those whose last dimension grows with the model."""

    def shapes(dim):
        grow = {"n_heads": dim // 16, "n_kv_heads": dim // 16}
        if "n_experts" in kinds:
            grow |= {"expert_dim": 2 * dim, "shared_expert_dim": dim}
        sizes = args(dim, **(kinds | grow), mup_base_dim=64)
        with torch.device("meta"):
            model = DENSE.build(sizes, None)
        return sizes, {name: p.shape for name, p in model.named_parameters()}

    _, narrow = shapes(64)
    sizes, wide = shapes(128)
    for name, shape in wide.items():
        vector = name.endswith("bias") or name.rpartition(".")[2] in ("b1", "b2", "b3")
        matrix = len(shape) > 1 and not vector and name.startswith("layers.")
        grows = matrix and shape[-1] == 2 * narrow[name][-1]
        if len(shape) > 1:
            assert DENSE.width_ratio(name, sizes) == (2.0 if grows else 1.0), name
