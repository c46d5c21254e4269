"""Gathered inputs that are kept as shards: equal numbers, fewer bytes, and one more gather each."""

from contextlib import ExitStack, nullcontext
from operator import itemgetter
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.runs import EXPERTS, arguments, losses, train
from torchtitan.config import resolve
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.memory import regather
from torchtitan.parallel.mesh import build_mesh
from torchtitan.parallel.precision import dense as quantize
from torchtitan.parallel.tensor import styles as tensor

P = "--parallelism."
TP = f"{P}tensor_parallel_degree=2"
AOT = ["--compile.enable", "--compile.backend=aot_eager"]
MODE = "--activation_checkpoint.mode="
FLOAT8 = ["--model.converters=float8", "--quantize.linear.float8.emulate"]
LATENT = [
    "--model.name=deepseek_v3",
    *(
        f"--model.overrides.{key}={value}"
        for key, value in {
            "n_kv_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "rope_head_size": 8,
            "n_experts": 4,
            "experts_per_token": 2,
            "expert_dim": 32,
            "n_dense_layers": 1,
        }.items()
    ),
]
ZERO_BUBBLE = [f"{P}pipeline_parallel_degree=2", "--model.overrides.n_layers=4"]
ZERO_BUBBLE += [f"{P}pipeline_parallel_schedule=ZBVZeroBubble"]
CASES = {
    "tp 2": (2, [TP]),
    "experts": (2, [TP, *EXPERTS]),
    "tp 4": (4, [f"{P}tensor_parallel_degree=4", "--model.overrides.n_kv_heads=4"]),
    "tp 2, cp 2": (4, [TP, f"{P}context_parallel_degree=2"]),
    "latent attention": (2, [TP, *LATENT]),
    "compiled": (2, [TP, *AOT]),
    "full": (2, [TP, f"{MODE}full"]),
    "every second block": (2, [TP, f"{MODE}selective"]),
    "offloaded": (2, [TP, "--activation_checkpoint.offload_blocks=1"]),
    "split backward": (4, [TP, *ZERO_BUBBLE]),
    "split backward, compiled": (4, [TP, *ZERO_BUBBLE, *AOT]),
    "tied": (2, [TP, "--model.overrides.tie_embeddings=true"]),
    "Float8": (2, [TP, *FLOAT8]),
    "Float8, compiled": (2, [TP, *FLOAT8, *AOT]),
    "Float8 by rows": (2, [TP, *FLOAT8, "--quantize.linear.float8.recipe_name=rowwise"]),
    "asynchronous": (2, [TP, "--compile.enable", f"{P}enable_async_tensor_parallel"]),
}
SUITE = ("tp 2",)
REST = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in SUITE]


def keeping_whole():
    """A context in which layers keep what was gathered, as autograd does by itself."""
    stack = ExitStack()
    for module in (tensor, quantize):
        stack.enter_context(mock.patch.object(module, "gather_sequence", regather._gather))
    return stack


def trained(argv, whole):
    with keeping_whole() if whole else nullcontext():
        return train(argv)


@pytest.mark.parametrize("name", [*SUITE, *REST])
def test_numbers_are_those_of_kept_whole_inputs(ranks, tmp_path, name):
    world, extra = CASES[name]
    runs = []
    for whole in (True, False):
        argv = arguments(tmp_path, *extra, f"--job.dump_folder={tmp_path / str(whole)}")
        runs.append(ranks(world, trained, argv, whole, timeout=250)[0])
    before, after = runs
    assert losses(after) == losses(before)
    for weight, value in before["weights"].items():
        assert torch.equal(after["weights"][weight], value), weight


ROWS = 2
SEQ = 128
DIM = 64
FORWARDS = 30
"""Forwards whose least bytes count: of a buffer that gloo's thread frees, which is by chance, the
profiler of the main thread sees no end.
"""


def kept_by(block, x):
    """Bytes that the allocator holds after a block's forward, and its output."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        out = block(x, None, None, None)
    events = forward.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]"), out


def block_of_a_rank(argv, whole):
    """Bytes that the allocator holds after a block's forward, gathers in its backward, and its
    gradients.
    """
    spec = get_spec("llama3")
    sizes = {"dim": DIM, "n_layers": 1, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 128}
    args = spec.args("debugmodel", sizes, max_seq_len=SEQ)
    config = resolve(argv, 4).config
    mesh = build_mesh(config, "cpu").tp
    torch.manual_seed(0)
    model = spec.build(args, attention_backend("cpu"))
    with keeping_whole() if whole else nullcontext():
        styles = spec.tensor_parallel_styles
        tensor.apply_tensor_parallel(model, mesh, styles, sharded_loss=True, float8=False)
        apply_compile(model, config)
        block = model.layers["0"]
        x = torch.randn(ROWS, SEQ // 4, DIM, requires_grad=True)
        block(x, None, None, None).sum().backward()  # compiles, and makes the gradients
        kept, out = min((kept_by(block, x) for _ in range(FORWARDS)), key=itemgetter(0))
        with profile(activities=[ProfilerActivity.CPU]) as backward:
            out.sum().backward()
    names = [event.name() for event in backward.profiler.kineto_results.events()]
    gradients = [x.grad, *(weight.grad.full_tensor() for weight in block.parameters())]
    return kept, names.count("_c10d_functional::all_gather_into_tensor"), gradients


@pytest.mark.parametrize(
    "extra", [[], pytest.param(AOT, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_a_block_keeps_shards_and_gathers_them_again(ranks, extra):
    """Both inputs of `[b, s, dim]` in fp32, of which an eager block keeps a quarter. A compiled one
    keeps nothing of them: it recomputes the shard from the norm's input.
    """
    argv = [f"{P}tensor_parallel_degree=4", *extra]
    (before, few, expected), *_ = ranks(4, block_of_a_rank, argv, True)
    (after, many, gradients), *_ = ranks(4, block_of_a_rank, argv, False)
    inputs = 2 * ROWS * SEQ * DIM * 4
    assert before - after == (inputs if extra else inputs * 3 // 4)
    assert (few, many) == (2, 4)
    assert all(map(torch.equal, gradients, expected))
