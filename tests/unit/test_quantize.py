"""Which layers are converted, and the numbers of emulated Float8 and MXFP8 against their
definitions.
"""

import pytest
import torch
from torch import nn

from tests.rounding import assert_rounds
from torchtitan.config import resolve
from torchtitan.config.derive import replace
from torchtitan.config.sections.quantize import Quantize
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.precision.dense import check_hardware, quantize
from torchtitan.utils.errors import ConfigError

SPEC = get_spec("llama3")
FLOAT8 = ("--model.converters=float8", "--quantize.linear.float8.emulate")
MX = ("--model.converters=mx", "--quantize.linear.mx.recipe_name=mxfp8_emulated")


def converted(*argv, flavor="8B", tp_degree=1, **overrides):
    with torch.device("meta"):
        model = SPEC.build(SPEC.args(flavor, {"n_layers": 1} | overrides), attention_backend("cpu"))
    config = resolve(list(argv), 1).config
    quantize(model, replace(config, "parallelism.tensor_parallel_degree", tp_degree))
    return {
        name.removeprefix("layers.0.")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear
    }


ALL = (
    {f"attention.{w}" for w in ("wq", "wk", "wv", "wo")}
    | {f"feed_forward.w{i}" for i in (1, 2, 3)}
    | {"output"}
)


def test_layers_are_left_out_by_name_and_by_size():
    assert converted(*FLOAT8) == ALL
    assert converted(*FLOAT8, "--quantize.linear.float8.filter_fqns=output,attention.w") == ALL - {
        "output",
        *(f"attention.{w}" for w in ("wq", "wk", "wv", "wo")),
    }
    narrow = {"dim": 64, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 96, "vocab_size": 100}
    assert converted(*FLOAT8, **narrow) == ALL - {"output"}
    assert converted(*FLOAT8, tp_degree=4, **narrow) == {
        f"attention.{w}" for w in ("wq", "wk", "wv", "wo")
    }
    assert converted(*MX) == ALL - {"output"}
    assert converted(*MX, tp_degree=2, **narrow) == {
        f"attention.{w}" for w in ("wq", "wk", "wv", "wo")
    }


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("flavor", ["1B", "8B", "70B"])
def test_small_layers_are_those_that_torchao_names(recipe, flavor):
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    worth_it = _auto_filter_for_recipe(recipe, [])
    with torch.device("meta"):
        model = SPEC.build(SPEC.args(flavor, {"n_layers": 1}), attention_backend("cpu"))
    expected = {
        name.removeprefix("layers.0.")
        for name, module in model.named_modules()
        if worth_it(module, name)
    }
    options = (
        f"--quantize.linear.float8.recipe_name={recipe}",
        "--float8.filter_fqns=auto_filter_small_kn",
    )
    assert converted(*FLOAT8, *options, flavor=flavor) == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model.converters=float8"], "compute capability 8.9"),
        (["--model.converters=float8", "--float8.recipe_name=rowwise"], "compute capability 9.0"),
        (["--model.converters=mx"], "compute capability 10.0"),
    ],
)
def test_hardware_without_the_type_is_refused_with_the_way_out(argv, words):
    with pytest.raises(ConfigError, match=words) as error:
        check_hardware(resolve(argv, 1).config, torch.device("cpu"))
    assert "this is a CPU; set quantize.linear." in str(error.value)
    way_out = FLOAT8 if "float8" in argv[0] else MX
    check_hardware(resolve([*argv, *way_out], 1).config, torch.device("cpu"))


def test_nothing_is_asked_of_the_hardware_by_default():
    assert Quantize().linear.float8.recipe_name is None
    check_hardware(resolve([], 1).config, torch.device("cpu"))


def linear(argv):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    quantize(model, resolve(list(argv), 1).config)
    assert type(model[0]) is not nn.Linear
    return model[0]


def float8(x, amax):
    """Scaled to the range of e4m3 (448), rounded, and back."""
    scale = 448 / amax.double()
    return ((x.double() * scale).float().to(torch.float8_e4m3fn).double() / scale).float()


def test_emulated_float8_rounds_with_one_scale_for_the_tensor():
    layer = linear(FLOAT8)
    x = torch.randn(32, 64)
    expected = float8(x, x.abs().max()) @ float8(layer.weight, layer.weight.abs().max()).T
    assert_rounds(layer(x), expected, terms=64, chain=1)


def mxfp8(x):
    """Blocks of 32 along the last axis share 2^(floor(log2(max)) - 8), 8 being e4m3's largest
    exponent.
    """
    blocks = x.unflatten(-1, (-1, 32))
    scale = 2 ** (blocks.abs().amax(-1, keepdim=True).log2().floor() - 8)
    return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def test_emulated_mxfp8_is_the_definition_in_all_three_products():
    layer = linear(MX)
    x = torch.randn(32, 64, requires_grad=True)
    upstream = torch.randn(32, 96)
    out = layer(x)
    out.backward(upstream)
    weight = layer.weight.detach()
    assert_rounds(out, mxfp8(x.detach()) @ mxfp8(weight).T, terms=64, chain=1)
    assert_rounds(x.grad, mxfp8(upstream) @ mxfp8(weight.T).T, terms=96, chain=1)
    assert_rounds(layer.weight.grad, mxfp8(upstream.T) @ mxfp8(x.detach().T).T, terms=32, chain=1)
