"""The traced step: against memory measured on real ranks, and against FLOPs and collectives counted
by hand.
"""

import gc
import math
from itertools import accumulate
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from tests.plan_counts import collectives
from tests.plans import H100, OP
from tests.runs import arguments, storages
from tests.traced_step.cuda import recording
from tests.traced_step.trace import trace_ranks
from torchtitan.config import resolve
from torchtitan.config.derive import axis_degrees
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.layers.norms import RMSNorm
from torchtitan.tools.planner.comm_time import data_parallel
from torchtitan.tools.planner.memory import CATEGORIES, memory_of
from torchtitan.tools.planner.predict import derived_workload
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight
from torchtitan.train.step import HostUpdate, forward_backward

SIZES = {
    "dim": 128,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 256,
    "vocab_size": 2048,
}
SEQ = 256
ROWS = 4
STEPS = 5  # each measured
P = "--parallelism."
FULL = ["--activation_checkpoint.mode=full"]
LAYOUTS = {
    "one rank": (1, ["--training.loss_chunks=4"]),
    "fsdp, by operation": (2, [*OP, "--ema.enable"]),
    "hsdp, full": (4, [f"{P}data_parallel_replicate_degree=2", *FULL]),
    "tensor": (2, [f"{P}tensor_parallel_degree=2"]),
    "context, a ring": (
        2,
        [f"{P}context_parallel_degree=2", f"{P}context_parallel_rotate_method=alltoall", *FULL],
    ),
    "context, gathered": (2, [f"{P}context_parallel_degree=2"]),
    "1F1B": (2, [f"{P}pipeline_parallel_degree=2"]),
    "interleaved, tensor": (
        4,
        [f"{P}pipeline_parallel_degree=2", f"{P}tensor_parallel_degree=2", *FULL]
        + [f"{P}pipeline_parallel_schedule=Interleaved1F1B"],
    ),
    "split backward": (
        2,
        [f"{P}pipeline_parallel_degree=2", f"{P}pipeline_parallel_schedule=ZBVZeroBubble"],
    ),
    "split backward, full": (
        2,
        [f"{P}pipeline_parallel_degree=2", f"{P}pipeline_parallel_schedule=ZBVZeroBubble", *FULL],
    ),
    "accumulated, every second block": (
        2,
        ["--training.global_batch_size=32", "--activation_checkpoint.mode=selective"],
    ),
    "experts": (
        2,
        [
            "--model.name=qwen3_moe",
            "--model.overrides.expert_dim=64",
            "--debug.moe_force_load_balance",
        ]
        + [f"{P}expert_parallel_degree=2"],
    ),
    "experts, tensor, full": (
        4,
        [
            "--model.name=qwen3_moe",
            "--model.overrides.expert_dim=64",
            "--debug.moe_force_load_balance",
        ]
        + [f"{P}expert_parallel_degree=2", f"{P}tensor_parallel_degree=2", *FULL],
    ),
    "compiled loss, tensor": (
        2,
        [
            "--compile.enable",
            "--compile.components=loss",
            "--training.mixed_precision_param=bfloat16",
        ]
        + [f"{P}tensor_parallel_degree=2"],
    ),
    "optimizer in backward": (2, ["--optimizer.early_step_in_backward", "--training.max_norm=0"]),
}
SUITE = ("one rank", "fsdp, by operation")
REST = [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in SUITE]


def command(folder, world, extra=()):
    """Arguments of a run that is large enough for its tensors to be what counts."""
    settings = {
        f"--{arg.lstrip('-').partition('=')[0]}": arg.partition("=")[2] for arg in arguments(folder)
    }
    settings |= {f"--model.overrides.{name}": value for name, value in SIZES.items()}
    settings |= {"--training.seq_len": SEQ, "--training.local_batch_size": ROWS}
    settings["--training.global_batch_size"] = -1
    for arg in extra:
        name, _, value = arg.partition("=")
        settings[name] = value or "true"
    return [f"{name}={value}" for name, value in settings.items()]


def traced(folder, world, *extra, pp_ranks=(0,), device_type="cuda"):
    config = resolve(command(folder, world, extra), world).config
    return trace_ranks(config, world, pp_ranks, device_type=device_type)


def measured_peak(argv):
    """Bytes that PyTorch's CPU allocator holds at most in a step, and this rank's place along `pp`.

    The profiler doesn't see a gloo thread free a message, which happens on a busy machine, and
    would count that message for ever after. So a step counts from the bytes that are held between
    steps, and the lowest of several is taken.
    """
    config = resolve(argv, dist.get_world_size()).config
    gc.collect()  # what earlier tests have left, whose addresses may be used again
    before = storages()
    engine = build(config, preflight(config), torch.device("cpu"))
    batches = iter(engine.loader)

    def step():
        forward_backward(engine, next(batches), HostUpdate(engine, config.training.max_norm))
        engine.optimizer.step()
        engine.optimizer.zero_grad(set_to_none=True)
        if engine.average is not None:
            engine.average.update(1)

    step()
    gc.collect()
    gc.disable()  # as the trainer does
    peaks = []
    for _ in range(STEPS):
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            step()
        events = (
            event
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
        )
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        peaks.append(max(accumulate(changes)))
    gc.enable()
    between = sum(nbytes for address, nbytes in storages().items() if address not in before)
    engine.loader.close()
    return engine.mesh.rank("pp"), between + min(peaks)


@pytest.mark.parametrize("name", [*SUITE, *REST])
def test_peak_is_what_the_allocator_measures(ranks, tmp_path, name):
    world, extra = LAYOUTS[name]
    argv = command(tmp_path, world, extra)
    peaks = sorted(ranks(world, measured_peak, argv, timeout=250), reverse=True)
    measured = dict(peaks)  # of each pipeline rank, the lowest
    traces = traced(tmp_path, world, *extra, pp_ranks=measured, device_type="cpu")
    for trace in traces:
        assert trace.peak_active == pytest.approx(measured[trace.pp_rank], rel=0.05), trace
        assert trace.peak_active == sum(trace.memory.values())


# ---- against numbers worked out by hand


def parameters():
    d = SIZES["dim"]
    f = SIZES["ffn_dim"]
    v = SIZES["vocab_size"]
    kv = d * SIZES["n_kv_heads"] // SIZES["n_heads"]
    matrices = 2 * d * d + 2 * d * kv + 3 * d * f
    return SIZES["n_layers"], matrices, 2 * d, v * d


def test_flops_are_the_formulas(tmp_path):
    layers, matrices, _, ends = parameters()
    tokens = ROWS * SEQ
    forward = 2 * tokens * layers * matrices
    (plain,) = traced(tmp_path, 2, "--training.mixed_precision_param=bfloat16")
    assert plain.flops["matmul", "bfloat16"] == 3 * forward + 6 * tokens * ends
    # Two products forward and five backward over half of the pairs, each of 2 FLOPs for every
    # element of a head.
    attention = layers * 2 * (2 + 5) * ROWS * SIZES["dim"] * SEQ * SEQ / 2
    assert plain.flops["attention", "bfloat16"] == attention
    (full,) = traced(tmp_path, 2, *FULL, "--training.global_batch_size=40")
    assert full.flops["matmul", "float32"] == 5 * (
        4 * forward + 6 * tokens * ends
    )  # five batches, of which three run
    assert full.flops["attention", "float32"] == 5 * attention * 9 / 7


@pytest.mark.slow
def test_what_reducing_once_costs(tmp_path):
    """At the peak: the whole gradients in fp32 of all that the last backward has not reached."""
    many = [
        "--training.global_batch_size=40",
        "--training.local_batch_size=1",
        "--training.loss_chunks=8",
    ]
    once, each = (
        traced(tmp_path, 2, *many, *more)[0] for more in ([f"{P}fsdp_reduce_once_per_step"], [])
    )
    layers, matrices, norms, ends = parameters()
    whole = 4 * (layers * (matrices + norms) + 2 * ends + SIZES["dim"])
    assert once.peak_active - each.peak_active == pytest.approx(
        whole / 2, rel=0.1
    )  # in place of the shards
    assert (
        once.collectives["fsdp"]["reduce_scatter"][0],
        each.collectives["fsdp"]["reduce_scatter"][0],
    ) == (6, 120)


def test_copies_of_the_weights_on_one_rank(tmp_path):
    """2 bytes of every weight in bf16, from the forward to the end of the backward."""
    bf16 = "--training.mixed_precision_param=bfloat16"
    (trace,) = traced(tmp_path, 1, bf16)
    layers, matrices, norms, ends = parameters()
    copies = 2 * (layers * (matrices + norms) + 2 * ends + SIZES["dim"])
    assert trace.memory["unsharded"] == copies
    # Weights once, each batch's gradients, and the sum to which the second's are added.
    for rows, moved in ((ROWS, 6), (2 * ROWS, 11)):
        argv = command(tmp_path, 1, [bf16, f"--training.global_batch_size={rows}"])
        w = derived_workload(resolve(argv, 1).config, get_spec("llama3"), 1)
        assert memory_of(w, 0).by_category["unsharded"] == copies
        seconds = data_parallel(w, H100, [(0.0, 0.0)], w.stages[0])["FSDP's copies"]
        assert seconds == pytest.approx(copies * moved / H100.bytes_per_s)


def test_context_parallelism_shares_the_attention(tmp_path):
    (whole,) = traced(tmp_path, 1)
    (part,) = traced(tmp_path, 4, f"{P}context_parallel_degree=4")
    assert part.flops["attention", "float32"] == whole.flops["attention", "float32"] / 4
    layers = SIZES["n_layers"]
    kv = SIZES["dim"] * SIZES["n_kv_heads"] // SIZES["n_heads"]
    both = 2 * ROWS * SEQ * kv * 4  # keys and values of the whole sequence in fp32
    assert part.collectives["cp"] == {
        "all_gather": (2 * layers, 2 * layers * both),
        "reduce_scatter": (layers, layers * both),
    }


def test_ulysses_exchanges_heads(tmp_path):
    """4 query and 2 key heads on 4 ranks, to each of which a key head is sent: 4 copies of heads of
    32. The plan's formula says the same.
    """
    extra = [f"{P}context_parallel_degree=4", f"{P}context_parallel_method=ulysses"]
    (whole,) = traced(tmp_path, 1)
    (part,) = traced(tmp_path, 4, *extra)
    assert part.flops["attention", "float32"] == whole.flops["attention", "float32"] / 4
    layers = SIZES["n_layers"]
    head = ROWS * SEQ // 4 * 32 * 4
    calls = 4 * layers  # there and back, in the forward and the backward
    exchanged = (calls, 2 * layers * (3 * 4 + 4) * head)
    assert part.collectives["cp"] == {"all_to_all": exchanged}
    config = resolve(command(tmp_path, 4, extra), 4).config
    made = collectives(derived_workload(config, get_spec("llama3"), 4))
    assert (made.calls["cp", "all_to_all"], made.bytes["cp", "all_to_all"]) == exchanged


def test_a_window_is_counted_by_what_it_sees(tmp_path):
    """4 ranks with 2 chunks of 32; of rank 0 the first and the last, which sees 32 keys before."""
    window = ["--model.overrides.layer_pattern=['window']", "--model.overrides.window=33"]
    (part,) = traced(tmp_path, 4, *window, f"{P}context_parallel_degree=4")
    first = 32 * 32 / 2
    last = 32 * 33 - 1 / 2  # the half of a pair is the diagonal's, as in a square
    layers = SIZES["n_layers"]
    pairs = ROWS * SIZES["n_heads"] * (first + last)
    assert part.flops["attention", "float32"] == layers * (2 + 5) * 2 * 32 * pairs
    keys = ROWS * 32 * (SIZES["n_kv_heads"] * 32) * 2 * 4
    assert part.collectives["cp"] == {"all_to_all": (2 * layers, 2 * layers * keys)}


def test_collectives_of_fsdp(tmp_path):
    layers, matrices, norms, ends = parameters()
    (trace,) = traced(tmp_path, 2, "--training.mixed_precision_param=bfloat16")
    block = matrices + norms
    both = 2 * ends + SIZES["dim"]  # embeddings; norm and output
    found = trace.collectives["fsdp"]
    # In bf16: every block before its forward and again before its backward, but for the last; the
    # ends once.
    assert found["all_gather"] == (2 * layers - 1 + 2, 2 * ((2 * layers - 1) * block + both))
    assert found["reduce_scatter"] == (layers + 2, 4 * (layers * block + both))
    # Two batches reduce-scatter twice; replicas add up their shards, and are all-reduced once.
    hsdp = [f"{P}data_parallel_replicate_degree=2", "--training.global_batch_size=32"]
    (hybrid,) = traced(tmp_path, 4, *hsdp)
    assert hybrid.collectives["fsdp"]["reduce_scatter"] == (
        2 * (layers + 2),
        2 * 4 * (layers * block + both),
    )
    assert hybrid.collectives["dp_replicate"]["all_reduce"] == (
        layers + 2,
        4 * (layers * block + both) // 2,
    )


def test_collectives_of_tensor_parallelism(tmp_path):
    layers = SIZES["n_layers"]
    (trace,) = traced(
        tmp_path, 2, f"{P}tensor_parallel_degree=2", "--training.mixed_precision_param=bfloat16"
    )
    hidden = 2 * ROWS * SEQ * SIZES["dim"]
    # A block gathers before attention and feed-forward and scatters after them, and the reverse in
    # the backward, which also gathers the inputs again; so do the ends: the embedding scatters, the
    # output gathers.
    gathers = 6 * layers + 2
    calls = 4 * layers + 2
    assert trace.collectives["tp"]["all_gather"] == (gathers, gathers * hidden)
    assert trace.collectives["tp"]["reduce_scatter"] == (calls, calls * hidden)


def test_collectives_of_a_pipeline(tmp_path):
    first, last = traced(tmp_path, 2, f"{P}pipeline_parallel_degree=2", pp_ranks=(0, 1))
    hidden = SEQ * SIZES["dim"] * 4
    for trace in (first, last):
        assert (
            trace.collectives["pp"]["send"]
            == trace.collectives["pp"]["receive"]
            == (ROWS, ROWS * hidden)
        )
    assert last.memory["logits"] > 0 == first.memory["logits"]


def test_memory_on_cuda(tmp_path):
    bf16 = "--training.mixed_precision_param=bfloat16"
    (eager,) = traced(tmp_path, 2, *OP, bf16)
    assert list(eager.memory) == list(CATEGORIES)
    assert eager.peak_reserved > eager.peak_active
    layers, matrices, norms, ends = parameters()
    shard = (layers * (matrices + norms) + 2 * ends + SIZES["dim"]) / 2
    assert eager.memory["parameters"] == pytest.approx(4 * shard, rel=1e-3)
    assert eager.memory["optimizer"] == pytest.approx(8 * shard, rel=1e-3)
    (compiled,) = traced(tmp_path, 2, *OP, bf16, "--compile.enable", "--compile.components=model")
    # Only w2's result is kept for nothing, but not at the peak by the last block, whose backward
    # has begun.
    unneeded = 2 * ROWS * SEQ * SIZES["dim"]
    saved = eager.peak_active - compiled.peak_active
    assert (layers - 1) * unneeded <= saved <= layers * unneeded
    (fused,) = traced(tmp_path, 2, *OP, bf16, "--compile.enable")
    assert (
        fused.memory["logits"] == 4 * ROWS * SEQ * SIZES["vocab_size"]
    )  # themselves and their gradient, in bf16
    (offloaded,) = traced(tmp_path, 2, *OP, bf16, "--training.enable_cpu_offload")
    assert offloaded.memory["parameters"] == offloaded.memory["optimizer"] == 0
    assert offloaded.peak_active < eager.peak_active - 11 * shard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_only_the_cpu_does_is_not_traced(dtype):
    """Attention in fp32, and a norm of several kernels."""
    x = torch.randn(1, 2, 260, 8, dtype=dtype)
    norm = RMSNorm(8, dtype=dtype)
    names = ("attention.backend.attend_variant", "layers.norms._RMSNorm.apply")
    own = [f"torchtitan.models.{name}" for name in names]
    with (
        recording(MagicMock(), cuda=True),
        patch(own[0], side_effect=AssertionError),
        patch(own[1], side_effect=AssertionError),
    ):
        norm(attention_backend("cpu")(x, x, x))


def test_budgets_lie_between(tmp_path):
    none, full, half = (
        traced(tmp_path, 1, f"--activation_checkpoint.mode={mode}", "--compile.enable")[0]
        for mode in ("none", "full", "memory_budget")
    )
    assert half.peak_active == pytest.approx((none.peak_active + full.peak_active) / 2, abs=2)
    assert full.peak_active < half.peak_active < none.peak_active


def test_eight_bit_products_are_told_apart(tmp_path):
    layers, matrices, _, ends = parameters()
    float8 = ["--model.converters=float8", "--quantize.linear.float8.filter_fqns=output"]
    (trace,) = traced(tmp_path, 2, f"{P}tensor_parallel_degree=2", *float8)
    assert trace.flops["matmul", "float8"] == 6 * ROWS * SEQ * layers * matrices / 2
    assert trace.flops["matmul", "float32"] == 6 * ROWS * SEQ * ends / 2


def test_a_large_cluster(tmp_path):
    """A mesh of 512 ranks with five axes, and its last pipeline rank."""
    degrees = dict.fromkeys(("pipeline_parallel", "tensor_parallel", "context_parallel"), 2)
    extra = [f"{P}{axis}_degree={degree}" for axis, degree in degrees.items()]
    extra += [f"{P}data_parallel_replicate_degree=4"]
    config = resolve(command(tmp_path, 512, extra), 512).config
    assert math.prod(axis_degrees(config.parallelism).values()) == 512
    (trace,) = trace_ranks(config, 512, [1])
    assert trace.rank == 256
    assert set(trace.collectives) == {"batch", "cp", "dp_replicate", "fsdp", "loss", "pp", "tp"}


def test_a_family_of_ones_own(tmp_path):
    """Another process traces, which has to register it too. Capped logits add no products."""
    own = ["--experimental.custom_import=tests.examples.soft_cap", "--model.name=llama3_capped"]
    configs = [resolve(arguments(tmp_path, *flags), 1).config for flags in ([], own)]
    plain, capped = (trace_ranks(config, 1, [0])[0] for config in configs)
    assert capped.flops == plain.flops
