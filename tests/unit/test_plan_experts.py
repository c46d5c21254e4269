"""The planner's formulas for a mixture of experts, against the real model, real layouts and hand
arithmetic.
"""

import importlib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.plan_counts import collectives, hardware_flops
from tests.plans import FULL, H100, NONE, OP, product_seconds
from torchtitan.config import load_config, resolve
from torchtitan.config.derive import layout_degrees
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.memory.checkpoint import apply_activation_checkpoint
from torchtitan.tools.planner.advice import smaller
from torchtitan.tools.planner.block_time import EXPERT_TILE
from torchtitan.tools.planner.comm_time import HOST_WAIT
from torchtitan.tools.planner.costs import step_time
from torchtitan.tools.planner.memory import _reduced_bytes, memory_of
from torchtitan.tools.planner.predict import derived_workload, predict
from torchtitan.tools.planner.search import search
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

SPEC = get_spec("qwen3_moe")
LARGE = [
    "--model.name=qwen3_moe",
    "--model.flavor=30B-A3B",
    "--training.seq_len=4096",
    "--training.local_batch_size=1",
]
PARAMETERS = 30_532_122_624
ATTENTION = 2048 * 128 * (2 * 32 + 2 * 4)
EXPERTS = 8 * 3 * 2048 * 768
ROUTER = 2048 * 128
"""Of a block, the parameters that a token passes."""
EP = "--parallelism.expert_parallel_degree="
TP = "--parallelism.tensor_parallel_degree="


def workload(*argv, world=1):
    return derived_workload(load_config(list(argv)).config, SPEC, world)


def test_parameters_are_those_of_the_model():
    w = workload(*LARGE)
    with torch.device("meta"):
        model = SPEC.build(w.args, attention_backend("cpu"))
    assert w.params(w.stages[0]) == sum(p.numel() for p in model.parameters()) == PARAMETERS
    experts = 48 * 128 * 3 * 2048 * 768
    for argv, kept in (
        ([EP + "8"], experts / 8),
        ([EP + "4", TP + "2"], experts / 4),
        ([TP + "2"], experts),
    ):
        split = workload(*LARGE, *argv, world=16)
        assert 48 * split.expert_params == kept
        assert split.shard(split.stages[0]) == pytest.approx(
            PARAMETERS / 16, rel=2e-3
        )  # norms, router: whole on tp


def test_whole_experts_are_padded():
    """FSDP gives each of 256 ranks a whole one of 128 matrices or none, unless it may split
    them.
    """
    whole, split = (workload(*LARGE, *argv, world=256) for argv in ([], [TP + "2"]))
    assert (whole.expert_padding, split.expert_padding) == (2.0, 1.0)
    state = [memory_of(w, 0).by_category["parameters"] for w in (whole, split)]
    assert state[0] > 1.9 * state[1]


@pytest.mark.parametrize("mode", [[NONE], OP, [FULL]])
def test_flops_are_those_that_run(mode):
    """Products of one eager step: the router's in fp32, and those of a token's own experts
    alone.
    """
    sizes = {
        "dim": 64,
        "n_layers": 2,
        "vocab_size": 512,
        "n_experts": 8,
        "experts_per_token": 2,
        "expert_dim": 48,
    }
    shape = [
        "--training.seq_len=32",
        "--training.local_batch_size=2",
        "--training.mixed_precision_param=float32",
    ]
    tiny = [f"--model.overrides.{key}={value}" for key, value in sizes.items()]
    w = workload("--model.name=qwen3_moe", "--model.flavor=debugmodel", *tiny, *shape, *mode)
    torch.manual_seed(0)
    model = SPEC.build(w.args, attention_backend("cpu"))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    apply_activation_checkpoint(model, w.config.activation_checkpoint)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 512, (2, 32))).square().sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(
        n
        for operation, n in counted.items()
        if str(operation).endswith((".mm", "grouped_mm", "_outer"))
    )
    assert hardware_flops(w)["matmul", "float32"] == products


def test_state_and_reduced_gradients_by_hand():
    """16 ranks, of which 4 share the same 32 experts of a block, and all its other weights."""
    split = [*LARGE, NONE, EP + "4"]
    matrices = 48 * (ATTENTION + ROUTER + 128 // 8 * EXPERTS)
    for optimizer, moments in (("AdamW", 2 * PARAMETERS), ("Muon", 2 * PARAMETERS - matrices)):
        w = workload(*split, f"--optimizer.name={optimizer}", world=16)
        assert memory_of(w, 0).by_category["optimizer"] == pytest.approx(4 * moments / 16)
    norms = 2 * 2048 + 2 * 128
    dense, experts = ATTENTION + ROUTER + norms, 32 // 8 * EXPERTS
    assert _reduced_bytes(w) == pytest.approx(4 * (dense / 16 + experts / 4))


def test_tensor_parallel_ranks_share_the_rows_of_experts():
    for tp in (1, 2, 4):
        w = workload(*LARGE, f"{TP}{tp}", world=tp)
        assert sum(x.flops for x in w.linears if x.experts) == pytest.approx(2 * EXPERTS / tp)


def test_exchanges_by_hand():
    """Rows go to the experts and back in each pass; full checkpointing repeats the forward's,
    selection keeps them.
    """
    rows = 2 * 4096 * 8 * 2048  # bytes of a microbatch's rows in bf16
    for mode, forwards in (([NONE], 1), (OP, 1), ([FULL], 2)):
        made = collectives(workload(*LARGE, *mode, EP + "8", world=8))
        assert made.calls["ep", "all_to_all"] == 48 * (3 * forwards + 2)
        assert made.bytes["ep", "all_to_all"] == 48 * (
            2 * (forwards + 1) * rows + forwards * 4 * 128
        )
    halved = collectives(workload(*LARGE, NONE, EP + "4", TP + "2", world=8))
    assert halved.bytes["ep", "all_to_all"] == 48 * (4 * rows / 2 + 4 * 128)
    within = workload(*LARGE, NONE, EP + "8", world=16)
    link = H100.link * H100.link_efficiency
    port = H100.network * H100.network_efficiency
    expected = 48 * (4 * rows * 7 / 8 / link + 5 * H100.collective + HOST_WAIT)
    assert step_time(within, H100).by_cause["communication: ep"] == pytest.approx(expected)
    across = workload(*LARGE, NONE, EP + "16", world=16)
    expected = 48 * (4 * rows * 8 / 16 / port + 5 * H100.collective + HOST_WAIT)
    assert step_time(across, H100).by_cause["communication: ep"] == pytest.approx(expected)


def test_other_software_by_hand(monkeypatch):
    """A fused dispatch sends a token once to each rank, and over the network once to each node;
    what overlaps is free while blocks compute longer.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks/published")
    other = importlib.import_module("_software")
    argv = load_config([*LARGE, NONE, EP + "16"]).config

    def made(**software):
        make = partial(other.OtherWorkload, software=other.Software(**software))
        return derived_workload(argv, SPEC, 16, make)

    fused = made(fused_dispatch=True)
    hidden = made(fused_dispatch=True, overlaps_experts=True)
    token = 2 * 2048
    other_node = 2 * (1 - (1 / 2) ** 8) / 2
    ranks = 16 * (1 - (15 / 16) ** 8) * 7 / 8
    port = H100.network * H100.network_efficiency
    link = 0.46 * H100.link * H100.link_efficiency
    once = max(4096 * token * other_node / port, 4096 * token * ranks / link) + H100.collective
    assert step_time(fused, H100).by_cause["communication: ep"] == pytest.approx(48 * 4 * once)
    assert "communication: ep" not in step_time(hidden, H100).by_cause


def test_what_hides_exchanges_by_hand():
    """A shared expert, on the way to the experts."""
    seconds = 2 * 4096 * 8 * 2048 * 7 / 8 / (H100.link * H100.link_efficiency) + H100.collective
    shared = ["--model.overrides.shared_expert_dim=64"]
    rest = 48 * (H100.collective + HOST_WAIT)
    w = workload(*LARGE, NONE, *shared, EP + "8", world=8)
    hiding = product_seconds(
        H100, [(4096, 2048, 64)] * 2 + [(4096, 64, 2048)], H100.bf16 * H100.gemm_bf16
    )
    assert hiding < seconds
    assert step_time(w, H100).by_cause["communication: ep"] == pytest.approx(
        48 * (4 * seconds - hiding) + rest
    )


def test_products_of_experts_by_hand():
    """1,024 rows for each expert, and half an empty tile; the router's backward is in fp32."""
    w = workload(*LARGE, NONE, "--training.local_batch_size=4", world=8)
    rows = 4 * 4096
    rate = H100.bf16 * H100.gemm_bf16
    q = (rows, 2048, 4096)
    kv = (rows, 2048, 512)
    out = (rows, 4096, 2048)
    seconds = product_seconds(H100, [q, kv, kv, out], rate)
    expert = [(1024, 2048, 768), (1024, 2048, 768), (1024, 768, 2048)]
    tiled = rate / (1 + EXPERT_TILE / 2 / 1024)
    seconds += 128 * product_seconds(H100, expert, tiled, ramp=1 / 128)
    fp32 = H100.fp32 * H100.gemm_bf16
    scores = 2 * (rows * 2048 * 128 + H100.gemm_ramp * min(2048, H100.gemm_split))
    seconds += product_seconds(H100, [(rows, 2048, 128)], fp32) + scores / rate - scores / fp32
    by_hand = 48 * seconds
    assert step_time(w, H100).by_cause["matrix products"] == pytest.approx(by_hand)
    float8 = [
        "--model.converters=quantize.grouped_mm.float8",
        "--quantize.grouped_mm.float8.fqns=experts",
    ]
    rounded = workload(*LARGE, NONE, "--training.local_batch_size=4", *float8, world=8)
    assert hardware_flops(rounded)["matmul", "float8"] == 48 * 6 * EXPERTS * 4 * 4096
    time = step_time(rounded, H100)
    assert time.by_cause["matrix products"] < by_hand < sum(time.by_cause.values())
    assert time.by_cause["8-bit casts"] > 0


def test_search_tries_expert_parallelism():
    """Each proposal is what the trainer accepts. With little work to hide gathers behind, experts
    are spread.
    """
    argv = [
        *LARGE,
        "--training.global_batch_size=8",
        "--compile.enable",
        "--training.loss_chunks=8",
    ]
    config = resolve(argv, 8).config
    found = search(config, SPEC, preflight(config, output=False).args, 8, H100)
    plans = [proposal.plan for proposal in found.best]
    assert plans[0].layout["ep"] > 1
    for plan in plans:
        degrees = layout_degrees(plan.config.parallelism)
        assert degrees == plan.layout
        preflight(plan.config, output=False)
    assert any("equally many tokens" in note for note in plans[0].notes)


def test_refusals_are_the_trainers():
    with pytest.raises(ConfigError, match="24 does not divide n_experts 128"):
        workload(*LARGE, EP + "24", world=24)


def test_dense_layers_are_a_kind_of_their_own():
    w = workload(*LARGE, "--model.overrides.n_dense_layers=3")
    assert w.stages[0].kinds == (3, 45)
    with torch.device("meta"):
        model = SPEC.build(w.args, attention_backend("cpu"))
    assert w.params(w.stages[0]) == sum(p.numel() for p in model.parameters())


def test_savings_name_expert_parallelism():
    config = workload(*LARGE, FULL, world=8).config
    keys = [key for saving in smaller(config, SPEC, 8) for key in saving.settings]
    assert "parallelism.expert_parallel_degree" in keys


def test_utilization_counts_active_experts():
    plan = predict(workload(*LARGE, NONE, EP + "8", world=8), SPEC, H100)
    flops = 6 * (48 * (ATTENTION + EXPERTS + ROUTER) + 2048 * 151936) + 12 * 48 * 4096 * 4096
    assert plan.mfu == pytest.approx(flops * plan.tokens_per_second / H100.bf16)
