"""A run beside its plan."""

import json
import statistics

import pytest

from tests.plans import CPU_HARDWARE
from tests.runs import arguments, read_metrics, train
from torchtitan.commands.plan import main
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.tools.planner.planner import make_plan
from torchtitan.utils.errors import ConfigError, UserError


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    ranks(1, train, arguments(folder, "--training.seq_len=128", steps=8))
    (folder / "cpu.toml").write_text(CPU_HARDWARE)
    # A busy machine's steps may take any time.
    hardware = find_hardware(str(folder / "cpu.toml"))
    plan = make_plan([f"--job.config_file={folder / 'out/config.toml'}"], 1, hardware)
    records = [
        record | {"step_time_s": 1.7 * plan.time.seconds, "data_loading_pct": 5.0 + record["step"]}
        for record in read_metrics(folder / "out")
    ]
    lines = [json.dumps(record) for record in records]
    (folder / "out/metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def planned(run, capsys, *more):
    assert main([f"--from-run={run / 'out'}", "--json=-", *more]) == 0
    return json.loads(capsys.readouterr().out)["measured"]["figures"]


def test_a_run_beside_its_plan(run, capsys):
    figures = planned(run, capsys, f"--hardware={run / 'cpu.toml'}")
    records = [r for r in read_metrics(run / "out") if r["step"] > 1]
    rates = sorted(r["tokens_per_second"] for r in records)
    assert figures["tokens/s per GPU"]["measured"] == rates[len(rates) // 2]
    waited = statistics.median(r["data_loading_pct"] / 100 * r["step_time_s"] for r in records)
    assert figures["waiting for data, s"] == {"measured": waited, "planned": 0.0}
    peak = max(r["memory_gib"] for r in records)
    assert figures["peak memory, GiB"] == {"measured": peak, "planned": None}  # the process's


def test_the_table_has_ranges_and_marks_figures_outside(run, capsys):
    files = sorted(run.rglob("*"))
    assert main([f"--from-run={run / 'out'}", f"--hardware={run / 'cpu.toml'}"]) == 0
    assert sorted(run.rglob("*")) == files  # nothing is remembered
    out = capsys.readouterr().out
    assert "median of 7 records on 1 x cpu" in out
    (step,) = (line.split() for line in out.splitlines() if line.startswith("step, s"))
    assert step[-2:] == ["+70.0%,", "outside"]
    low, high = float(step[3]), float(step[5])
    assert low < float(step[2]) < high < float(step[6])


def test_what_cant_be_compared_is_said(run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds no run"):
        main([f"--from-run={tmp_path}"])
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with pytest.raises(ConfigError, match=r"the run was on the CPU of .*, and this is another"):
        main([f"--from-run={run / 'out'}"])
