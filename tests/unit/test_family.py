"""Families with code of their own: what a run computes is what `forward` says, and what it reports
is true.
"""

import pytest
import torch
from torch import nn

from tests.examples import gated_attention, relu_squared, soft_cap
from torchtitan.commands import config as config_command
from torchtitan.commands import plan
from torchtitan.config import resolve
from torchtitan.models import all_families, get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.decoder.model import Block, Decoder
from torchtitan.models.layers.feed_forward import FeedForward
from torchtitan.models.moe.moe import Experts
from torchtitan.train.family import Findings, check_family
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

LLAMA = get_spec("llama3")
MOE = get_spec("qwen3_moe")
PP = "--parallelism.pipeline_parallel_degree=2"


def check(spec, *argv, world=1):
    """Problems and warnings of a family, of its debugmodel."""
    config = resolve([f"--model.name={spec.name}", *argv], world).config
    args = spec.args("debugmodel", config.model.overrides, max_seq_len=config.training.seq_len)
    found = check_family(config, spec, args)
    return found.problems, found.warnings


def variant(build, spec=LLAMA, **changes):
    return spec.variant(spec.name, build=build, **changes)


@pytest.mark.parametrize("spec", all_families(), ids=lambda spec: spec.name)
def test_the_families_pass(spec):
    assert check(spec, PP, world=2) == ([], [])


@pytest.mark.parametrize("spec", [LLAMA, MOE], ids=lambda spec: spec.name)
def test_a_family_passes_with_modules_that_predict_further_tokens(spec):
    assert check(spec, PP, "--model.overrides.n_mtp=2", world=2) == ([], [])


# ---- logits


class CappedAfterwards(Decoder):
    """Caps the result of `forward`, which a loss in chunks doesn't ask for."""

    def forward(self, *inputs, project=True):
        x = super().forward(*inputs, project=project)
        return x if not project or self.output is None else torch.tanh(x)


class Scaled(Decoder):
    """Scales the embedding on every stage."""

    def forward(self, tokens, *inputs, **options):
        return super().forward(tokens if self.tok_embeddings else 2 * tokens, *inputs, **options)


class Whole(Decoder):
    def forward(self, tokens, *inputs, **options):
        assert self.tok_embeddings is not None
        return super().forward(tokens, *inputs, **options)


def test_a_forward_that_projects_otherwise_than_project():
    (problem,), warnings = check(variant(CappedAfterwards))
    assert problem.startswith("model.name llama3: forward returns other logits than project()")
    assert "Override project() instead of forward" in problem
    assert warnings == []


class Standalone(nn.Module):
    """No `Decoder`, and without all that one has."""

    def __init__(self, args, attend):
        super().__init__()
        self.layers = nn.ModuleDict()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def init_buffers(self):
        pass

    def forward(self, tokens, positions, mask, project=True):
        x = self.tok_embeddings(tokens)
        return self.output(x) if project else x


def test_a_family_that_lacks_project():
    (problem,), _ = check(variant(Standalone))
    assert (
        "project(forward(tokens, project=False), output_weight) doesn't run: AttributeError"
        in problem
    )


def test_logits_changed_in_project_are_those_of_forward():
    spec = get_spec("llama3_capped")
    assert check(spec, "--model.overrides.cap=0.5", PP, world=2) == ([], [])
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


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (Scaled, "two pipeline stages return other logits than the whole model"),
        (
            Whole,
            "forward doesn't run on a pipeline stage, where tok_embeddings, norm or "
            "output may be None",
        ),
    ],
)
def test_a_forward_that_is_another_on_pipeline_stages(build, text):
    assert check(variant(build)) == ([], [])
    (problem,), _ = check(variant(build), PP, world=2)
    assert text in problem


# ---- parameters and buffers


class Unused(Decoder):
    def __init__(self, args, attend):
        super().__init__(args, attend)
        self.temperature = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(args.dim))


class Slopes(Decoder):
    def __init__(self, args, attend):
        super().__init__(args, attend)
        self.register_buffer("slopes", torch.arange(args.n_heads).float(), persistent=False)


def test_parameters_without_a_gradient():
    (problem,), _ = check(variant(Unused))
    assert problem == (
        "model.name llama3: forward gives temperature and 1 other parameter no gradient; "
        "use them there, or delete "
        "them in __init__"
    )


def test_buffers_that_are_lost_on_the_meta_device():
    (problem,), _ = check(variant(Slopes))
    assert "init_buffers() doesn't compute the buffer slopes" in problem


# ---- FLOPs


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
    _, (warning,) = check(variant(ReluLlama), "--training.seq_len=512")
    products = {n: 6 * (n * 256 * 768 + 4 * 256 * 256 + 2 * 512 * 256) + 2048 * 256 for n in (2, 3)}
    assert f"declares {6 * products[3]:.4g} FLOPs per token" in warning
    assert f"{products[3] / products[2] - 1:.0%} more than the {6 * products[2]:.4g} of" in warning
    assert "pass module_flops= to its ModelSpec" in warning

    def flops(args, seq_len):
        found = LLAMA.module_flops(args, seq_len)
        return {
            name: cost - 6 * args.dim * args.ffn_dim * ("layers" in name)
            for name, cost in found.items()
        }

    assert check(variant(ReluLlama, module_flops=flops)) == ([], [])


# ---- experts


def test_experts_of_ones_own():
    spec = get_spec("qwen3_moe_relu2")
    ep = "--parallelism.expert_parallel_degree=2"
    assert check(spec, ep, world=2) == ([], [])
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


class OwnForward(Experts):
    def forward(self, rows, ends):
        return super().forward(rows, ends).neg()


def test_experts_whose_forward_expert_parallelism_would_replace():
    class OwnMoE(relu_squared.MoE):
        experts_class = OwnForward

    class OwnBlock(relu_squared.MoEBlock):
        moe_class = OwnMoE

    class OwnDecoder(Decoder):
        moe_block_class = OwnBlock

    spec = variant(OwnDecoder, MOE)
    assert check(spec, "--parallelism.tensor_parallel_degree=2", world=2) == ([], [])
    (problem,), _ = check(spec, "--parallelism.expert_parallel_degree=2", world=2)
    assert (
        "OwnForward overrides forward, which expert parallelism replaces; override "
        "compute() instead" in problem
    )


# ---- where it is checked


class NeedsCuda(Decoder):
    def forward(self, tokens, *inputs, **options):
        raise RuntimeError("this kernel needs CUDA\nand more")


def test_what_does_not_run_on_the_cpu_is_said():
    problems, warnings = check(variant(NeedsCuda))
    assert problems == []
    assert warnings == [
        "model.name llama3: not checked, because a small copy of it doesn't run on the "
        "CPU: RuntimeError: this kernel "
        "needs CUDA",
        "model.name llama3: TFLOP/s and MFU rest on an unchecked module_flops, as FLOPs "
        "can't be counted: "
        "RuntimeError: this kernel needs CUDA",
    ]


def test_preflight_checks_families_with_code_of_their_own(monkeypatch):
    checked = []
    monkeypatch.setattr(
        "torchtitan.train.family.check_family", lambda *about: checked.append(about) or wrong
    )
    wrong = check_family(resolve([], 1).config, variant(Unused), LLAMA.flavors["debugmodel"])
    for name in (spec.name for spec in all_families() if spec.build is LLAMA.build):
        preflight(resolve([f"--model.name={name}"], 1).config, output=False)
    assert checked == []
    for module, name in ((gated_attention, "llama3_gated"), (soft_cap, "llama3_capped")):
        argv = [f"--experimental.custom_import={module.__name__}", f"--model.name={name}"]
        with pytest.raises(ConfigError, match="no gradient"):
            preflight(resolve(argv, 1).config, output=False)
    assert len(checked) == 2


def test_warnings_are_printed(monkeypatch, capsys):
    found = Findings([], ["model.name llama3_gated: MFU is off"])
    monkeypatch.setattr("torchtitan.train.family.check_family", lambda *about: found)
    argv = [f"--experimental.custom_import={gated_attention.__name__}", "--model.name=llama3_gated"]
    assert config_command.main(argv) == plan.main(["--world=1", "--hardware=h100-sxm", *argv]) == 0
    assert capsys.readouterr().err.count("warning: model.name llama3_gated: MFU is off") == 2
