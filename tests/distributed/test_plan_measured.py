"""A run against its plan, and hardware fitted to it."""

import json

import pytest

from tests.runs import arguments, read_metrics, train
from torchtitan.commands.plan import main
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.utils.errors import ConfigError, UserError

CPU = """
[cpu]
description = "a CPU"
device = "cpu"
memory_gib = 16
bf16 = 3e10
fp8 = 0
fp32 = 3e10
memory_bandwidth = 6e9
gpus_per_node = 1
gemm_bf16 = 1.0
gemm_ramp = 0.0
gemm_depth = 0.0
attention = 0.5
reserve_gib = 1.0
"""


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    ranks(1, train, arguments(folder, "--training.seq_len=128", steps=8))
    (folder / "cpu.toml").write_text(CPU)
    return folder


def planned(run, capsys, *more):
    assert main([f"--from-run={run / 'out'}", "--json=-", *more]) == 0
    return json.loads(capsys.readouterr().out)["measured"]["figures"]


def test_a_run_against_its_plan_and_hardware_fitted_to_it(run, capsys):
    figures = planned(run, capsys, f"--hardware={run / 'cpu.toml'}")
    records = [r for r in read_metrics(run / "out") if r["step"] > 1]
    rates = sorted(r["tokens_per_second"] for r in records)
    assert figures["tokens/s per GPU"]["measured"] == rates[len(rates) // 2]
    fitted = run / "fitted.toml"
    planned(run, capsys, f"--hardware={run / 'cpu.toml'}", f"--calibrate={fitted}")
    again = planned(run, capsys, f"--hardware={fitted}")["step, s"]
    assert again["planned"] == pytest.approx(again["measured"], rel=0.01)
    before, after = (find_hardware(str(file)) for file in (run / "cpu.toml", fitted))
    assert after.gemm_bf16 != before.gemm_bf16
    assert after.gemm_bf16 / before.gemm_bf16 == pytest.approx(after.attention / before.attention)
    main([f"--from-run={run / 'out'}", f"--hardware={run / 'cpu.toml'}"])
    assert "median of 7 records on 1 x cpu" in capsys.readouterr().out


def test_what_cant_be_compared_is_said(run, tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        main([f"--from-run={tmp_path}"])
    with pytest.raises(ConfigError, match="the run's device, cpu, is in no table"):
        main([f"--from-run={run / 'out'}"])
