"""The planner's formulas: sizes, FLOPs, memory, collectives and time, against real modules and hand
arithmetic.
"""

import dataclasses
import weakref
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.plan_counts import collectives, hardware_flops
from tests.plans import FULL, H100, NONE, ONE_ROW, OP, SPEC, TINY, product_seconds, workload
from torchtitan.config import load_config
from torchtitan.config.registry import model_families
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.costs import cost_of
from torchtitan.models.decoder.model import Attention, Block
from torchtitan.models.layers.feed_forward import FeedForward
from torchtitan.optim.loss import LOGIT_BYTES, cross_entropy
from torchtitan.parallel.kinds import Stage, kinds_of
from torchtitan.parallel.memory.checkpoint import apply_activation_checkpoint
from torchtitan.tools.planner.block_time import LAUNCHES, block_time
from torchtitan.tools.planner.comm_time import context_parallel
from torchtitan.tools.planner.costs import step_time
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.tools.planner.memory import GIB, memory_of
from torchtitan.tools.planner.planner import make_plan
from torchtitan.tools.planner.predict import derived_workload, memory_band, predict
from torchtitan.tools.planner.render import as_text, run_of
from torchtitan.utils.errors import UserError
from torchtitan.utils.torch_compat import torch_is_before_2_13

# ---- sizes, FLOPs and activations, against the real model


@pytest.mark.parametrize("name", sorted(model_families.built_in))
def test_parameters_of_every_family(name):
    spec = get_spec(name)
    config = load_config([f"--model.name={spec.name}"]).config
    w = derived_workload(config, spec, 1)
    with torch.device("meta"):
        model = spec.build(w.args, attention_backend("cpu"))
    assert sum(map(w.params, w.stages)) == sum(p.numel() for p in model.parameters())


class Looped(FeedForward):
    def forward(self, x):
        return super().forward(super().forward(x))


class Headless(Attention):
    def cost(self, seq_len):
        return dataclasses.replace(super().cost(seq_len), heads=None)


class Priced(Looped):
    def cost(self, seq_len):
        once = super().cost(seq_len)
        return once + once


class Unpriced(Looped):
    def cost(self, seq_len):
        return None


class Adapted(FeedForward):
    """Computes with a matrix of which its cost doesn't know."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adapter = torch.nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("attribute", "part", "match"),
    [
        ("feed_forward_class", Adapted, "layers.0 can't be planned: its parts declare products of"),
        ("attention_class", Headless, "its parts declare no heads that mix tokens"),
    ],
)
def test_blocks_whose_costs_are_incomplete_are_refused(monkeypatch, attribute, part, match):
    monkeypatch.setattr(Block, attribute, part)
    kinds_of.cache_clear()
    with pytest.raises(UserError, match=match):
        workload()


def test_a_forward_without_a_cost_is_refused():
    with pytest.raises(UserError, match=r"test_plan\.Looped declares no cost, so a plan would be"):
        cost_of(Looped(8, 16), 64)
    assert [x.name for x in cost_of(Priced(8, 16), 64, "ffn").products[:3]] == [
        *("ffn.w1", "ffn.w3", "ffn.w2")
    ]
    with pytest.raises(UserError, match=r"test_plan\.Unpriced declares no cost"):
        cost_of(Unpriced(8, 16), 64)
    assert cost_of(Priced(8, 16), 64).saved == 2 * cost_of(FeedForward(8, 16), 64).saved


def test_stages_share_the_parameters_out():
    w = workload(
        "--model.flavor=8B",
        "--parallelism.pipeline_parallel_degree=4",
        "--training.local_batch_size=4",
        world=4,
    )
    assert sum(map(w.params, w.stages)) == 8_030_261_248


def real_model(w):
    torch.manual_seed(0)
    model = SPEC.build(w.args, attention_backend("cpu"))
    apply_activation_checkpoint(model, w.config.activation_checkpoint)
    return model, torch.randint(0, w.vocab, (2, 64))


@pytest.mark.parametrize("mode", [[NONE], OP, [FULL], ["--activation_checkpoint.mode=selective"]])
def test_flops_are_those_that_run(mode):
    """Matrix products of one eager step, recomputation included, as torch counts them."""
    w = workload(*TINY, *mode, "--training.seq_len=64", "--training.local_batch_size=2")
    model, tokens = real_model(w)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(
        n
        for operation, n in counts.items()
        if str(operation) in ("aten.mm", "aten.addmm", "aten.bmm")
    )
    assert hardware_flops(w)["matmul", "bfloat16"] == pytest.approx(products, rel=1e-6)


@pytest.mark.parametrize("mode", [[NONE], OP, [FULL], ["--activation_checkpoint.mode=selective"]])
def test_activations_are_those_that_stay(mode):
    """Bytes that two more layers leave alive after the forward, exactly."""
    alive = []
    planned = []
    for layers in (2, 4):
        shape = [
            "--training.seq_len=64",
            "--training.local_batch_size=2",
            "--training.mixed_precision_param=float32",
        ]
        w = workload(*TINY, *mode, f"--model.overrides.n_layers={layers}", *shape)
        alive.append(left_alive(*real_model(w)))
        planned.append(memory_of(w, 0).by_category["activations"])
    # On the CPU a norm keeps its scale too, and torch's its normalized input; CUDA's fused one does
    # not.
    whole_layers = (
        {NONE: 2, "--activation_checkpoint.mode=selective": 1}.get(mode[0], 0) if mode != OP else 0
    )
    norms = whole_layers * 2 * (65 if torch_is_before_2_13() else 1) * 4 * 128
    assert planned[1] - planned[0] == alive[1] - alive[0] - norms


def tiny_model(name, layers):
    """A record of a small model of a family, the model, and arguments of its forward."""
    spec = get_spec(name)
    config = load_config([f"--model.name={name}", NONE, "--training.seq_len=64"]).config
    small = spec.tiny(spec.flavors[config.model.flavor], layers, 2)
    model = config.model.model_copy(update={"overrides": small})
    t = config.training.model_copy(
        update={"local_batch_size": 2, "mixed_precision_param": "float32"}
    )
    w = derived_workload(config.model_copy(update={"model": model, "training": t}), spec, 1)
    torch.manual_seed(0)
    real = spec.build(w.args, attention_backend("cpu"))
    for weight in real.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    return w, partial(real, token_weights=torch.ones(2, 64)), torch.randint(0, w.vocab, (2, 64))


@pytest.mark.parametrize("name", sorted(model_families.built_in))
def test_products_of_every_family(name):
    """FLOPs of all products of activations with weights, and of Gated DeltaNet's chunks."""
    w, model, tokens = tiny_model(name, 2)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for operation, n in counts.items() if "attention" not in str(operation))
    planned = sum(n for (kind, _), n in hardware_flops(w).items() if kind == "matmul")
    # The gradients of gpt-oss' stacked biases are products, too.
    tolerance = {"gpt_oss": 0.01, "qwen3_next": 0.2}.get(name, 1e-6)
    assert planned == pytest.approx(products, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(model_families.built_in - {"gemma3", "qwen3_next"}))
def test_activations_of_every_family(name):
    """Bytes that two more layers leave alive, nearly: on the CPU a norm keeps its scale too, and
    experts in one operation keep a product less. Gemma's norms and Gated DeltaNet keep fp32 there.
    """
    alive, planned = zip(
        *(
            (left_alive(model, tokens), memory_of(w, 0).by_category["activations"])
            for w, model, tokens in (tiny_model(name, layers) for layers in (2, 4))
        ),
        strict=True,
    )
    assert alive[1] - alive[0] == pytest.approx(planned[1] - planned[0], rel=0.1)


def left_alive(model, tokens):
    """Bytes of what the forward makes and something still holds at its end."""
    storages = weakref.WeakValueDictionary()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in filter(torch.is_tensor, tree_leaves(out)):
                storages[x.untyped_storage()._cdata] = x.untyped_storage()
            return out

    with Watch():
        out = model(tokens)
    module = getattr(model, "func", model)
    for held in (*module.parameters(), *module.buffers(), out):
        storages.pop(held.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in storages.values())


def test_attention_counts_the_causal_half():
    """Forward 2 S q per token, and backward 2.5 times that; recomputed once by full
    checkpointing.
    """
    w = workload("--model.flavor=8B", NONE, *ONE_ROW)
    assert hardware_flops(w)["attention", "bfloat16"] == 3.5 * 2 * 8192 * 4096 * 32 * 8192
    full = workload("--model.flavor=8B", FULL, *ONE_ROW)
    assert hardware_flops(full)["attention", "bfloat16"] == 4.5 * 2 * 8192 * 4096 * 32 * 8192


# ---- communication


@pytest.mark.parametrize(
    ("mode", "gathers", "scatters"), [([NONE], 6, 4), (OP, 6, 4), ([FULL], 6, 6)]
)
def test_collectives_of_tensor_parallelism(mode, gathers, scatters):
    """Two of each forward and backward, which gathers inputs again; what is computed again also
    scatters its results again.
    """
    w = workload(
        "--model.flavor=8B", *mode, "--parallelism.tensor_parallel_degree=8", *ONE_ROW, world=8
    )
    made = collectives(w)
    assert (
        made.calls["tp", "all_gather"] == gathers * 32 + 2
    )  # the embedding's gradient, the output's input
    assert made.calls["tp", "reduce_scatter"] == scatters * 32 + 2
    assert made.bytes["tp", "reduce_scatter"] == (scatters * 32 + 2) * 8192 * 4096 * 2


def test_rings_take_the_narrowest_way():
    link = H100.link * H100.link_efficiency
    assert H100.bandwidth(8, 1) == link
    assert H100.bandwidth(16, 1) == pytest.approx(
        min(link, 8 * 50e9 * 0.84)
    )  # a node's 8 ports carry one ring
    assert H100.bandwidth(16, 8) == pytest.approx(50e9 * 0.84)  # one rank of each ring per node


def test_nothing_hides_the_first_block_and_the_embeddings():
    """Both are gathered in bf16 before anything computes, and reduced in fp32 when all else is
    done. Other blocks and the output hide behind a block.
    """
    w = workload("--model.flavor=8B", *ONE_ROW, "--training.global_batch_size=8", world=8)
    instant = H100.model_copy(update={"collective": 0.0})
    moved = (2 + 4) * (w.block_params + 128256 * 4096) * 7 / 8
    expected = pytest.approx(moved / H100.bandwidth(8, 1))
    assert step_time(w, instant).by_cause["communication: dp"] == expected


FLOAT8 = ["--model.converters=float8", "--quantize.linear.float8.filter_fqns=output"]
GATHERED = "--quantize.linear.float8.enable_fsdp_float8_all_gather"


def test_fsdps_copies_by_hand():
    """Per parameter 2 + 2 bytes out of each of two gathers, in 8 bits 1 + 1; and 2 + 4 into the
    reduction.
    """
    batches = "--training.global_batch_size=16"
    w = workload("--model.flavor=8B", *ONE_ROW, batches, world=8)
    copied = 2 * 14 * 8_030_261_248 / H100.bytes_per_s
    assert step_time(w, H100).by_cause["FSDP's copies"] == pytest.approx(copied)
    float8 = workload("--model.flavor=8B", *ONE_ROW, batches, *FLOAT8, GATHERED, world=8)
    less = 2 * 4 * 8_030_261_248 / H100.bytes_per_s
    assert step_time(float8, H100).by_cause["FSDP's copies"] == pytest.approx(copied - less)


# ---- time and memory


def test_long_sums_of_small_results_are_split():
    """The weight gradient of 768 x 768 over 65,536 tokens: its own waves, and one more that sums
    no more terms than `gemm_split`.
    """
    result, rate = 768**2, 989e12 * H100.gemm_bf16
    sums = 2 * (result * 65536 + H100.gemm_ramp * H100.gemm_split) / rate
    waves = (1 + result / H100.gemm_ramp) * H100.gemm_start
    assert H100.product_seconds(768, 768, 65536, rate) == pytest.approx(sums + waves)
    assert 2 * result * 65536 / (sums + waves) > 2 * 117e12  # planned once at 117 TFLOP/s


def test_attention_has_two_rates():
    """Documents and windows are not cuDNN's, nor is anything on an A100."""
    argv = ["--model.flavor=8B", *ONE_ROW]
    plain, documents = (
        workload(*argv, f"--training.document_mask={mask}", world=8) for mask in ("false", "true")
    )
    seconds = [step_time(w, H100).by_cause["attention"] for w in (documents, plain)]
    assert seconds[0] == pytest.approx(seconds[1] * H100.attention_cudnn)
    a100 = find_hardware("a100")
    same = [step_time(w, a100).by_cause["attention"] for w in (documents, plain)]
    assert same[0] == same[1]


def test_rounding_weights_by_hand():
    """5 bytes each in the forward and in the backward, unless they are gathered in 8 bits."""
    argv = ["--model.flavor=8B", *ONE_ROW, NONE, "--compile.enable", *FLOAT8]
    gathered, rounded = (
        step_time(workload(*argv, *flags, world=8), H100).by_cause["8-bit casts"]
        for flags in ([GATHERED], [])
    )
    params = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    assert rounded - gathered == pytest.approx(2 * 5 * params / H100.bytes_per_s)


def test_a_plan_unlike_all_published_runs_notes_it():
    w = workload(*TINY, "--training.seq_len=128", "--training.local_batch_size=1", world=8)
    (note,) = [x for x in predict(w, SPEC, find_hardware("rtx-4090")).notes if "published" in x]
    for part in ("RTX 4090", "less than 124M parameters", "less than 4,096 tokens"):
        assert part in note
    like = predict(workload("--model.flavor=8B", *ONE_ROW, world=8), SPEC, H100)
    assert not any("published" in x for x in like.notes)


def test_matrix_products_by_hand():
    """6 FLOPs per weight of the blocks and token at the sustained rate, and what small sizes cost
    beside it.
    """
    w = workload("--model.flavor=8B", NONE, *ONE_ROW, world=8)
    q = (8192, 4096, 4096)
    kv = (8192, 4096, 1024)
    up = (8192, 4096, 14336)
    down = (8192, 14336, 4096)
    by_hand = 32 * product_seconds(H100, [q, kv, kv, q, up, up, down], 989e12 * H100.gemm_bf16)
    assert step_time(w, H100).by_cause["matrix products"] == pytest.approx(by_hand)
    blocks = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    large = H100.model_copy(update={"gemm_ramp": 0.0, "gemm_start": 0.0})
    assert step_time(w, large).by_cause["matrix products"] == pytest.approx(
        6 * blocks * 8192 / 989e12 / H100.gemm_bf16
    )


def test_splitting_products_costs_more_than_their_communication():
    """An eighth of each product takes more than an eighth of the time."""
    whole = workload("--model.flavor=8B", NONE, *ONE_ROW, world=8)
    split = workload(
        "--model.flavor=8B", NONE, *ONE_ROW, "--parallelism.tensor_parallel_degree=8", world=8
    )
    parts = [step_time(w, H100).by_cause["matrix products"] for w in (whole, split)]
    assert 1.2 * parts[0] / 8 < parts[1] < 2 * parts[0] / 8


def test_a_ring_on_a_mesh_uses_the_links_between_its_own():
    """Without a switch, two of four GPUs have a third of their links to each other."""
    mesh = H100.model_copy(update={"gpus_per_node": 4, "mesh": True})
    assert mesh.bandwidth(2, 1) == pytest.approx(H100.bandwidth(2, 1) / 3)
    assert mesh.bandwidth(4, 1) == pytest.approx(H100.bandwidth(4, 1))


def test_chance_to_fit():
    """Even when the plan takes all there is; 19 in 20 where that is the upper end of a band that
    holds 90 %.
    """
    plan = predict(workload("--model.flavor=8B", *ONE_ROW, world=8), SPEC, H100)

    def chance(usable):
        hw = H100.model_copy(update={"memory_gib": usable + H100.reserve_gib})
        return dataclasses.replace(plan, hardware=hw).chance_to_fit

    assert chance(plan.peak_gib) == pytest.approx(0.5)
    assert chance(plan.peak_gib * (1 + plan.memory_band)) == pytest.approx(0.95)
    assert chance(plan.peak_gib * (1 - plan.memory_band)) == pytest.approx(0.05)


def test_compiled_loss_keeps_logits_and_their_gradient_in_their_own_type():
    """What the compiler keeps from forward to backward, and the gradient, are `LOGIT_BYTES`."""
    kept = []

    def keep(graph, inputs):
        (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        kept.extend(x.meta["val"] for x in results)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    logits = torch.randn(2, 16, 512, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(cross_entropy, backend=backend)(
        logits, torch.zeros(2, 16).long()
    ).sum().backward()
    wide = sum(x.numel() * x.itemsize for x in kept if x.numel() >= logits.numel())
    assert (wide + logits.grad.nbytes) / logits.numel() == LOGIT_BYTES["compiled"]


def test_runs_with_a_compiled_loss_held_6_bytes_per_logit():
    """8 of 14 less than with an eager one, and no wider band."""
    argv = ["--model.flavor=8B", "--training.seq_len=8192", NONE, "--compile.enable"]
    fused, eager = (
        workload(*argv, f"--compile.components={parts}", world=8)
        for parts in ("model,loss", "model")
    )
    more = memory_of(eager, 0).reserved - memory_of(fused, 0).reserved
    assert more == pytest.approx(8 * fused.tokens * fused.vocab)
    assert memory_band(fused) == memory_band(eager) == 0.06


class Launches(TorchDispatchMode):
    """Counts operations that compute."""

    VIEWS = frozenset(
        {
            *("view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze"),
            *("squeeze", "split", "detach", "alias", "unbind", "permute", "as_strided", "empty"),
            *("empty_like", "new_empty", "new_empty_strided", "split_with_sizes", "is_same_size"),
        }
    )

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._overloadpacket.__name__ not in self.VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch_is_before_2_13(), reason="2.11 launches half as many again backward")
@pytest.mark.parametrize("name", ["llama3", "qwen3_moe"])
def test_launches_of_an_eager_block(name):
    """Those of two layers less those of one: forward, and backward."""
    counts = []
    for layers in (1, 2):
        spec = get_spec(name)
        flags = [f"--model.name={name}", f"--model.overrides.n_layers={layers}"]
        w = derived_workload(load_config(flags).config, spec, 1)
        model = spec.build(w.args, attention_backend("cpu"))
        for weight in model.parameters():
            torch.nn.init.zeros_(weight)
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        with Launches() as forward:
            out = model(tokens)
        with Launches() as backward:
            out.sum().backward()
        counts.append((forward.count, backward.count))
    for direction, (one, two) in enumerate(zip(*counts, strict=True)):
        assert w.launches[direction] == pytest.approx(two - one, rel=0.25)


def test_small_batches_are_bound_by_the_host():
    """Eager blocks of 28 and 39 operations, and FSDP's hooks, at 20 us each."""
    argv = [*TINY, NONE, "--training.seq_len=128", "--training.local_batch_size=1"]
    w = workload(*argv, world=8)
    plan = predict(w, SPEC, H100)
    host = 4 * (28 + 39 + 2 * 20) * 20e-6
    block = block_time(w, H100)
    device = 4 * sum(sum(both) for part, both in block.by_cause.items() if part != LAUNCHES)
    assert plan.time.by_cause[LAUNCHES] == pytest.approx(host - device)
    assert any("bound by the host" in note and "compile" in note for note in plan.notes)
    compiled = predict(workload(*argv, "--compile.enable", world=8), SPEC, H100)
    assert compiled.time.by_cause[LAUNCHES] < 0.7 * plan.time.by_cause[LAUNCHES]
    large = predict(workload("--model.flavor=8B", *ONE_ROW, NONE, world=8), SPEC, H100)
    assert LAUNCHES not in large.time.by_cause
    assert large.speed_band < 0.1 < compiled.speed_band < plan.speed_band


def test_eager_tensor_parallelism_copies_along_the_sequence_of_several_rows():
    """4 gathers and 2 reductions of d per block in the backward, 2 and 2 in the forward: read and
    written.
    """
    argv = ["--model.flavor=8B", NONE, "--training.seq_len=8192"]
    tp = "--parallelism.tensor_parallel_degree=8"
    one, two = (
        workload(*argv, tp, f"--training.local_batch_size={rows}", world=8) for rows in (1, 2)
    )
    seconds = [step_time(w, H100).by_cause["communication: tp"] for w in (one, two)]
    sync = 32 * 10 * H100.collective
    copied = 32 * 10 * 2 * 2 * (2 * 8192) * 4096 / H100.bytes_per_s
    assert seconds[1] == pytest.approx(2 * (seconds[0] - sync) + sync + copied)


def test_host_memory():
    """12 bytes per parameter for copies of the state, 16 offloaded; and what blocks keep."""
    params = 8_030_261_248 / GIB
    argv = ["--model.flavor=8B", *ONE_ROW, NONE, "--checkpoint.enable"]

    def host(*extra, hw=H100):
        return predict(workload(*argv, *extra, world=8), SPEC, hw)

    mode = "--checkpoint.async_mode=async_with_pinned_mem"
    assert host().host_gib == {}
    assert "Host memory" not in as_text(host())
    assert host(mode).host_gib == pytest.approx({"copies for saves": 12 * params})
    assert host("--training.enable_cpu_offload").host_gib == pytest.approx(
        {"parameters, gradients, optimizer": 16 * params}
    )
    whole = predict(workload("--model.flavor=8B", *ONE_ROW, NONE, world=8), SPEC, H100)
    blocks = host("--activation_checkpoint.offload_blocks=-1").host_gib["activations"]
    assert blocks == pytest.approx(8 * 32 * whole.workload.offloaded_per_block / GIB)
    assert host("--training.dataloader.num_workers=2").host_gib == {"data workers": 8 * 2 * 0.25}
    assert f"fits in 2,048; {12 * params:.1f} (copies for saves" in as_text(host(mode))
    small = H100.model_copy(update={"host_memory_gib": 64.0})
    assert "DOES NOT FIT in 64" in as_text(host(mode, hw=small))


def test_time_of_an_average():
    """AdamW's 40 bytes per parameter, and 12 in every update of the average."""
    seconds = [
        step_time(workload("--model.flavor=8B", *argv, world=8), H100).by_cause["optimizer"]
        for argv in ([], ["--ema.enable"], ["--ema.enable", "--ema.every=4"])
    ]
    assert seconds == pytest.approx([seconds[0], seconds[0] * 52 / 40, seconds[0] * 43 / 40])


def test_state_is_sharded_and_optimizers_differ():
    """16 bytes a parameter with AdamW in fp32, over the shards."""

    def state(*argv, world=8):
        parts = memory_of(workload("--model.flavor=8B", *argv, world=world), 0).by_category
        return (parts["parameters"] + parts["gradients"] + parts["optimizer"]) / 8_030_261_248

    assert state() == pytest.approx(16 / 8)
    assert state(world=64) == pytest.approx(16 / 64)
    assert state("--optimizer.state_dtype=bfloat16") == pytest.approx(12 / 8)
    assert state("--optimizer.early_step_in_backward", "--training.max_norm=0") == pytest.approx(
        12 / 8
    )
    assert 12 / 8 < state("--optimizer.name=Muon") < 13 / 8
    assert state("--ema.enable") == pytest.approx(20 / 8)
    assert state("--ema.enable", "--optimizer.state_dtype=bfloat16") == pytest.approx(16 / 8)
    assert state("--training.enable_cpu_offload", "--ema.enable") == 0


def test_a_ring_by_hand():
    """Of 4 ranks: keys and values travel 3 times in bf16, and their gradients in fp32."""
    ring = workload(
        NONE, "--model.flavor=8B", *ONE_ROW, "--parallelism.context_parallel_degree=4", world=4
    )
    once = 2048 * 2 * 1024 * 3 / H100.bandwidth(4, 1)  # 2,048 tokens' keys and values of 8 heads
    assert context_parallel(ring, H100, 0.0) == pytest.approx((2 * once, 2 * once + 4 * once))
    # A gather hides behind attention to a quarter of the keys.
    hidden, _ = context_parallel(ring, H100, 2 * once)
    assert hidden == pytest.approx(1.5 * once)


def test_an_exchange_of_heads_by_hand():
    """Of 4 ranks, each keeps a quarter of queries, keys and values, and of the output."""
    cp = (
        "--parallelism.context_parallel_degree=4",
        "--parallelism.context_parallel_method=ulysses",
    )
    heads = workload(NONE, "--model.flavor=8B", *ONE_ROW, *cp, world=4)
    size = 2 * 2048 * (4096 + 2 * 1024 + 4096) * 3 / 4
    once = size / H100.bandwidth(4, 1) + 2 * H100.collective
    assert context_parallel(heads, H100, 0.0) == pytest.approx((once, once))


@pytest.mark.parametrize("axis", ["data_parallel_shard", "tensor_parallel"])
def test_ranks_share_whole_matrices_of_muon(axis):
    """By hand: 32 blocks of the 8B over 8 ranks, 5 iterations, whatever splits the matrices."""
    seconds = [
        step_time(
            workload(
                "--model.flavor=8B",
                f"--optimizer.name={name}",
                f"--parallelism.{axis}_degree=8",
                world=8,
            ),
            H100,
        ).by_cause["optimizer"]
        for name in ("Muon", "AdamW")
    ]
    flops = 0
    for matrices, short, long in ((2, 4096, 4096), (2, 1024, 4096), (3, 4096, 14336)):
        flops += 32 / 8 * matrices * (4 * short**2 * long + 2 * short**3)
    assert seconds[0] - seconds[1] == pytest.approx(5 * flops / (H100.bf16 * H100.gemm_bf16))


ONCE = "--parallelism.fsdp_reduce_once_per_step"
HSDP = [
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=4",
]
DDP = [
    "--parallelism.data_parallel_replicate_degree=8",
    "--parallelism.data_parallel_shard_degree=1",
]
OFFLOAD = "--training.enable_cpu_offload"


@pytest.mark.parametrize(
    ("argv", "more"),
    [
        ([], 0),
        ([ONCE], 4),
        (HSDP, 0),
        ([*HSDP, OFFLOAD], 0),
        ([*HSDP, ONCE], 4),
        (DDP, 0),  # a rank's gradients are whole
        ([*DDP, OFFLOAD], 0),
    ],
)
def test_accumulation(argv, more):
    """Bytes per parameter that four batches take beyond those of one."""
    one, four = (
        workload("--model.flavor=8B", *ONE_ROW, f"--training.global_batch_size={n}", *argv, world=8)
        for n in (8, 32)
    )
    assert memory_of(four, 0).reserved - memory_of(one, 0).reserved == more * 8_030_261_248
    once = workload(
        "--model.flavor=8B", *ONE_ROW, "--training.global_batch_size=32", *argv, ONCE, world=8
    )
    assert step_time(once, H100).seconds <= step_time(four, H100).seconds


def test_tensor_parallelism_splits_all_that_a_dense_block_keeps():
    one, four = (
        workload("--model.flavor=8B", NONE, f"--parallelism.tensor_parallel_degree={tp}", world=tp)
        for tp in (1, 4)
    )
    assert one.offloaded_per_block == 4 * four.offloaded_per_block


def test_z_loss_keeps_logits_in_fp32():
    one, more = (workload("--model.flavor=8B", *argv) for argv in ([], ["--training.z_loss=1e-4"]))
    kept = memory_of(more, 0).by_category["logits"] - memory_of(one, 0).by_category["logits"]
    assert kept == 4 * one.tokens * one.vocab


def test_embeddings_travel_with_hidden_states_if_further_tokens_are_predicted():
    argv = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"]
    one, two, three = (
        workload(*argv, f"--model.overrides.n_mtp={n}", world=2).hidden_bytes for n in (0, 1, 2)
    )
    assert (two, three) == (2 * one, 3 * one)


def test_weights_that_are_not_freed_stay_gathered():
    """All blocks in bf16 instead of two, and the embeddings."""
    freed, kept = (
        workload(
            "--model.flavor=8B",
            *ONE_ROW,
            f"--parallelism.fsdp_reshard_after_forward={reshard}",
            world=8,
        )
        for reshard in ("default", "never")
    )
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    more = 2 * (30 * block + 128256 * 4096)
    assert memory_of(kept, 0).reserved - memory_of(freed, 0).reserved == more


@pytest.mark.parametrize(
    ("argv", "world", "copied"),
    [
        ([], 1, False),
        (["--training.mixed_precision_param=bfloat16"], 1, True),
        (["--parallelism.data_parallel_replicate_degree=2"], 2, True),
        (["--parallelism.tensor_parallel_degree=2"], 2, True),
        (["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"], 2, False),
    ],
)
def test_one_rank_in_one_type_copies_no_weight(argv, world, copied):
    """Where FSDP has nothing to gather, cast or reduce, it manages no weight."""
    fp32 = [f"--training.mixed_precision_{what}=float32" for what in ("param", "reduce")]
    w = workload("--model.flavor=8B", *ONE_ROW, *fp32, *argv, world=world)
    assert (memory_of(w, 0).by_category["unsharded"] > 0) == copied


def test_earlier_pipeline_ranks_keep_more():
    argv = [
        "--model.flavor=8B",
        NONE,
        "--parallelism.pipeline_parallel_degree=4",
        "--training.local_batch_size=8",
    ]
    w = workload(*argv, "--training.seq_len=8192", world=4)
    sizes = [memory_of(w, rank).by_category["activations"] for rank in range(4)]
    assert sizes[0] > sizes[1] > sizes[2]
    assert [stage.has_output for stage in w.stages] == [False, False, False, True]
    assert w.stages[0] == Stage(0, (8,), True, False)


@pytest.mark.skipif(torch_is_before_2_13(), reason="refused with torch before 2.13")
@pytest.mark.parametrize(("extra", "size"), [([], 4), (["--compile.enable"], 2)])
def test_a_breadth_first_schedule_keeps_every_loss(extra, size):
    """Of the eager loss the log-softmax in fp32, of the compiled one logits in bf16, as traced."""
    pipeline = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4", *extra]
    breadth, depth = (
        workload(*pipeline, f"--parallelism.pipeline_parallel_schedule={name}", world=2)
        for name in ("GPipe", "1F1B")
    )
    more = memory_of(breadth, 1).by_category["logits"] - memory_of(depth, 1).by_category["logits"]
    assert more == 3 * size * breadth.tokens * breadth.vocab


@pytest.mark.skipif(torch_is_before_2_13(), reason="refused with torch before 2.13")
def test_compiled_blocks_run_a_split_backward_twice():
    """Autograd sees a compiled block as one operation: both parts of its backward are all of it."""
    argv = [
        "--model.flavor=8B",
        NONE,
        "--parallelism.pipeline_parallel_degree=4",
        "--training.local_batch_size=16",
        "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
    ]
    eager, compiled = (
        step_time(workload(*argv, *more, world=4), H100) for more in ([], ["--compile.enable"])
    )
    whole = step_time(workload(*argv[:-1], "--compile.enable", world=4), H100)
    assert eager.seconds < compiled.seconds
    assert compiled.seconds > 1.2 * whole.seconds


def test_each_stage_of_longer_rows_is_planned():
    """Memory is that of the stage that needs most, time that of all; each as if planned alone."""
    flags = [*TINY, NONE, "--training.seq_len=1024", "--training.local_batch_size=2"]
    stage = "--training.stages=[{from_step = 11, seq_len = 8192, local_batch_size = 1}]"
    argv = [*flags, "--training.global_batch_size=16", "--training.steps=30"]
    short = make_plan(argv, 4, H100)
    changes = ["--training.seq_len=8192", "--training.local_batch_size=1"]
    long = make_plan([*argv, *changes], 4, H100)
    both = make_plan([*argv, stage], 4, H100)
    back = "--training.stages=[{from_step = 11, seq_len = 1024, local_batch_size = 2}]"
    assert make_plan([*argv, *changes, back], 4, H100).memory == long.memory
    assert both.memory == long.memory
    assert both.peak_gib > short.peak_gib
    assert both.time == short.time
    run = run_of(both)
    assert run.tokens == 16 * (10 * 1024 + 20 * 8192)
    assert run.hours * 3600 == pytest.approx(10 * short.time.seconds + 20 * long.time.seconds)
    assert any("from step 11: 16 x 8192 tokens per step, 1 row" in note for note in both.notes)
    assert not any("compiles" in note for note in both.notes)
    again = f"{stage[:-1]}, {{from_step = 21, seq_len = 1024, local_batch_size = 2}}]"
    compiled = make_plan([*argv, again, "--compile.enable"], 4, H100)
    notes = [note for note in compiled.notes if note.startswith("from step")]
    compiling = [note.split(":")[0] for note in notes if "compiles its blocks" in note]
    assert (len(notes), compiling) == (3, ["from step 1", "from step 11"])
