"""A run against its plan, and the plan of the next run, corrected by it."""

import json
import re
import statistics
import time

import pytest

from tests.plans import CPU_HARDWARE
from tests.runs import arguments, read_metrics, train
from torchtitan.commands.plan import main
from torchtitan.commands.report import main as report
from torchtitan.config import resolve
from torchtitan.config.registry import callbacks
from torchtitan.telemetry.planned import ENV, Planned
from torchtitan.tools.planner import cpu
from torchtitan.tools.planner.corrections import correction_file
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.tools.planner.planner import make_plan
from torchtitan.tools.planner.run_plan import plan_of_run
from torchtitan.train.callbacks import Callback
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    ranks(1, train, arguments(folder, "--training.seq_len=128", steps=8))
    (folder / "cpu.toml").write_text(CPU_HARDWARE)
    # A fit changes rates by 3 at most; a busy machine's steps may take longer than that.
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


def test_a_run_against_its_plan_and_hardware_fitted_to_it(run, capsys):
    figures = planned(run, capsys, f"--hardware={run / 'cpu.toml'}")
    records = [r for r in read_metrics(run / "out") if r["step"] > 1]
    rates = sorted(r["tokens_per_second"] for r in records)
    assert figures["tokens/s per GPU"]["measured"] == rates[len(rates) // 2]
    waited = statistics.median(r["data_loading_pct"] / 100 * r["step_time_s"] for r in records)
    assert figures["waiting for data, s"] == {"measured": waited, "planned": 0.0}
    fitted = run / "fitted.toml"
    planned(run, capsys, f"--hardware={run / 'cpu.toml'}", f"--calibrate={fitted}")
    again = planned(run, capsys, f"--hardware={fitted}")["computing and communicating, s"]
    assert again["planned"] == pytest.approx(again["measured"], rel=0.01)
    before, after = (find_hardware(str(file)) for file in (run / "cpu.toml", fitted))
    assert after.gemm_bf16 != before.gemm_bf16
    assert after.gemm_bf16 / before.gemm_bf16 == pytest.approx(after.attention / before.attention)
    assert main([f"--from-run={run / 'out'}", f"--hardware={run / 'cpu.toml'}"]) == 0
    assert "median of 7 records on 1 x cpu" in capsys.readouterr().out


def state_of_tiny_llama(folder, world):
    """Bytes on rank 0 of `world` in fp32: two moments for AdamW, and a counter for each tensor."""
    vocab, dim, kv, ffn = read_vocab(folder, world), 64, 2 * 16, 96
    block = 2 * dim * dim + 2 * dim * kv + 3 * dim * ffn + 2 * dim
    rows = -(-vocab // world)
    local = 2 * rows * dim + (2 * block + dim) // world
    return {
        "parameters": 4 * local,
        "gradients": 4 * local,
        "optimizer": 2 * 4 * local + 4 * (2 * 9 + 3),
    }


def read_vocab(folder, world):
    config = resolve([f"--job.config_file={folder / 'out/config.toml'}"], world).config
    return preflight(config, world=world, output=False).args.vocab_size


def test_state_is_measured_to_the_byte(run, ranks, tmp_path, capsys):
    ranks(2, train, arguments(tmp_path, "--training.seq_len=128", steps=1))
    for folder, world in ((run, 1), (tmp_path, 2)):
        start = json.loads((folder / "out/run.json").read_text())["starts"][-1]
        assert start["state_bytes"] == state_of_tiny_llama(folder, world)
    figures = planned(run, capsys, f"--hardware={run / 'cpu.toml'}")
    for part, size in state_of_tiny_llama(run, 1).items():
        assert figures[f"{part}, GiB"]["measured"] == size / 2**30
        assert figures[f"{part}, GiB"]["planned"] == pytest.approx(size / 2**30, rel=1e-3)
    assert figures["peak memory, GiB"]["planned"] is None  # the process's, on a CPU
    assert "activations and others, GiB" not in figures


def test_what_cant_be_compared_is_said(run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds no run"):
        main([f"--from-run={tmp_path}"])
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with pytest.raises(ConfigError, match=r"the run was on the CPU of .*, and this is another"):
        main([f"--from-run={run / 'out'}"])


# ---- the plan of the next run


@callbacks.register("pace")
class Pace(Callback):
    """Makes all steps equally long, however busy the machine is."""

    def on_start(self, run):
        self.next = time.monotonic() + PACE

    def before_update(self, run):
        """Close to where a step's time is taken, so what a busy machine adds to one is little."""
        time.sleep(max(0.0, self.next - time.monotonic()))
        self.next = time.monotonic() + PACE


PACE = 0.5
"""Seconds; many times what a step computes."""


def paced(argv, plan=None):
    return with_plan([*argv, "--training.callbacks=pace"], plan)


def with_plan(argv, plan):
    """Train; the launcher has made `plan`."""
    with pytest.MonkeyPatch.context() as patch:
        if plan:
            patch.setenv(ENV, plan)
        return train(argv)["metrics"]


def test_a_run_corrects_the_plan_of_the_next(ranks, tmp_path, capsys, monkeypatch):
    """Measure, correct, plan again, and run again: within the band that the plan states."""
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu, "describe_cpu", lambda: f"{CPU_HARDWARE}step_overhead = 0.3\n")
    argv = arguments(tmp_path, "--checkpoint.enable", steps=5)
    ranks(1, paced, argv)
    assert main([f"--from-run={tmp_path / 'out'}"]) == 0
    out = capsys.readouterr().out
    assert f"wrote {correction_file('cpu')}: the next plans for cpu use it" in out

    assert main([*argv, "--world=1", "--hardware=cpu", "--json=-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["notes"][-1].startswith(f"cpu is as a run has shown: {correction_file('cpu')}")
    config = resolve(argv, 1).config
    given = plan_of_run(config, preflight(config, world=1, output=False), 1)
    assert given.step_s == pytest.approx(plan["time"]["step_s"])

    second = [*argv, f"--job.dump_folder={tmp_path / 'second'}"]
    (metrics,) = ranks(1, paced, second, given.model_dump_json())
    steady = [record for record in metrics if record["step"] > 1]
    measured = statistics.median(record["step_time_s"] for record in steady)
    assert measured > 0.9 * PACE
    assert measured == pytest.approx(given.step_s, rel=given.band)
    assert "off_plan" not in (tmp_path / "second/run.json").read_text()
    assert report([str(tmp_path / "second")]) == 0
    said = capsys.readouterr().out
    assert "Plan of second for cpu, with the range of 9 of 10 such runs" in said
    ends = f"{given.step_s / (1 + given.band):.3g} to {given.step_s / (1 - given.band):.3g}"
    words = " ".join(said.split())
    assert f"step, s {given.step_s:.3g} {ends} {measured:.3g}" in words
    assert "outside" not in words.partition("step as planned")[0]
    assert "a save, s" in said


def test_a_run_that_is_off_its_plan_says_so_once(ranks, tmp_path):
    """Also after a resume."""
    plan = Planned(
        hardware="here",
        devices=("cpu",),
        step_s=0.001,
        band=0.17,
        peak_gib=None,
        memory_band=0.06,
        save_s=None,
    ).model_dump_json()
    for steps in (5, 10):
        argv = arguments(tmp_path, "--checkpoint.enable", steps=steps)
        ranks(1, with_plan, argv, plan)
    events = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "off_plan"]
    assert event["step"] == 4
    assert re.fullmatch(
        r"Off its plan: steps take [\d.]+ s \([\d.]+ s computing and communicating\), [\d.,]+% "
        r"more than the 0\.001 s planned for here\. `torchtitan plan --from-run .*/out` corrects "
        r"the next plan",
        event["message"],
    ), event["message"]
    starts = json.loads((tmp_path / "out/run.json").read_text())["starts"]
    assert [start["plan"]["step_s"] for start in starts] == [0.001, 0.001]
    assert ["off_plan" in start for start in starts] == [True, False]
