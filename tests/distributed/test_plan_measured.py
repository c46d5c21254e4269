"""A run against its plan: figures, parts of a profile, hardware fitted to it; and measured
links.
"""

import json
import shutil

import pytest
import torch

from tests.runs import arguments, read_metrics, train
from torchtitan.commands.plan import main
from torchtitan.tools.planner.calibrate import measure_links
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.tools.planner.profile import (
    ATTENTION,
    COMMUNICATION,
    POINTWISE,
    PRODUCTS,
    REST,
    kind_of,
    traced_parts,
)
from torchtitan.utils.errors import ConfigError, UserError

CPU = """
[cpu]
description = "a CPU"
device = "cpu"
memory_gib = 16
bf16 = 5e10
fp8 = 0
fp32 = 5e10
memory_bandwidth = 1e10
gpus_per_node = 1
gemm_bf16 = 1.0
attention = 0.5
reserve_gib = 1.0
"""


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    profile = [
        "--profiling.enable_profiling",
        "--profiling.profile_freq=4",
        "--profiling.profiler_active=2",
        "--profiling.profiler_warmup=1",
    ]
    ranks(1, train, arguments(folder, *profile, "--training.seq_len=128", steps=8))
    (folder / "cpu.toml").write_text(CPU)
    return folder


def planned(run, capsys, *more):
    assert main([f"--from-run={run / 'out'}", "--fast", "--json=-", *more]) == 0
    return json.loads(capsys.readouterr().out)["measured"]["figures"]


def test_a_run_against_its_plan_and_hardware_fitted_to_it(run, capsys):
    figures = planned(run, capsys, f"--hardware={run / 'cpu.toml'}")
    records = [r for r in read_metrics(run / "out") if r["step"] > 1]
    rates = sorted(r["tokens_per_second"] for r in records)
    assert figures["tokens/s per GPU"]["measured"] == rates[len(rates) // 2]
    parts = [figures[f"{part}, s"]["measured"] for part in (PRODUCTS, ATTENTION, POINTWISE, REST)]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) < 3 * figures["step, s"]["measured"]  # profiled steps are slower
    fitted = run / "fitted.toml"
    planned(run, capsys, f"--hardware={run / 'cpu.toml'}", f"--calibrate={fitted}")
    again = planned(run, capsys, f"--hardware={fitted}")["step, s"]
    assert again["planned"] == pytest.approx(again["measured"], rel=0.01)
    assert find_hardware(str(fitted)).attention != find_hardware(str(run / "cpu.toml")).attention
    main([f"--from-run={run / 'out'}", "--fast", f"--hardware={run / 'cpu.toml'}"])
    assert "median of 7 records on 1 x cpu" in capsys.readouterr().out


def test_without_a_profile_all_rates_are_scaled_alike(run, tmp_path, capsys):
    shutil.copytree(run / "out", tmp_path / "out", ignore=shutil.ignore_patterns("profile_traces"))
    hardware = f"--hardware={run / 'cpu.toml'}"
    assert "attention, s" not in planned(
        tmp_path, capsys, hardware, f"--calibrate={tmp_path / 'f.toml'}"
    )
    before = find_hardware(str(run / "cpu.toml"))
    after = find_hardware(str(tmp_path / "f.toml"))
    assert after.gemm_bf16 / before.gemm_bf16 == pytest.approx(after.attention / before.attention)
    again = planned(tmp_path, capsys, f"--hardware={tmp_path / 'f.toml'}")["step, s"]
    assert again["planned"] == pytest.approx(again["measured"], rel=0.01)


def test_what_cant_be_compared_is_said(run, tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        main([f"--from-run={tmp_path}"])
    with pytest.raises(ConfigError, match="the run's device, cpu, is in no table"):
        main([f"--from-run={run / 'out'}", "--fast"])


def event(name, cat, ts, dur, tid=7):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}


def test_parts_of_a_gpus_trace(tmp_path):
    """Two steps of 1000 us. A gather of 300 us overlaps a product for 200; 100 us of copies; the
    rest is idle.
    """
    events = [event(f"ProfilerStep#{n}", "user_annotation", 1000 * n, 1000) for n in (4, 5)]
    for begin in (4000, 5000):
        events += [
            event("nvjet_hsh_128x256", "kernel", begin, 400),
            event("ncclDevKernel_AllGather_RING_LL", "kernel", begin + 200, 300, tid=20),
            event("flash_fwd_kernel", "kernel", begin + 500, 100),
            event("triton_poi_fused_add_0", "kernel", begin + 600, 150),
            event("Memcpy HtoD", "gpu_memcpy", begin + 750, 100),
        ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    parts = {part: round(seconds * 1e6) for part, seconds in traced_parts(file).items()}
    assert parts == {
        PRODUCTS: 400,
        ATTENTION: 100,
        POINTWISE: 150,
        COMMUNICATION: 100,
        "optimizer": 0,
        REST: 250,
    }
    file.write_text('{"traceEvents": []}')
    with pytest.raises(UserError, match="no complete step"):
        traced_parts(file)


def test_kinds_of_operations():
    assert kind_of("aten::addmm") == kind_of("sm90_xmma_gemm_bf16bf16") == PRODUCTS
    assert kind_of("aten::_scaled_dot_product_flash_attention_for_cpu") == ATTENTION
    assert kind_of("aten::mul") == kind_of("aten::mm_like") == POINTWISE


def test_links_are_measured(ranks):
    """Within a node, between nodes, or both: by what torchrun says of the nodes."""
    cpu = torch.device("cpu")
    for per_node, link, network in ((2, True, False), (1, False, True)):
        for found in ranks(2, measure_links, cpu, per_node, 2**20):
            assert (found.link is not None, found.network is not None) == (link, network)
            assert 1e5 < (found.link or found.network) < 1e12
