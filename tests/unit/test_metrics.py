"""What is recorded, against hand-made runs and the formats' own readers."""

import json
import logging
import math
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.runs import read_metrics
from torchtitan.config import resolve
from torchtitan.config.sections import schema
from torchtitan.optim.loss import SourceTally
from torchtitan.telemetry import experts as observed
from torchtitan.telemetry import metrics as metrics_of_runs
from torchtitan.telemetry.console import ConsoleSink, StageCost
from torchtitan.telemetry.experts import read_loads
from torchtitan.telemetry.history import History
from torchtitan.telemetry.metrics import MetricsReporter, peak_flops
from torchtitan.telemetry.run_record import RunRecord
from torchtitan.telemetry.scores import record_scores
from torchtitan.telemetry.trackers.base import scalars
from torchtitan.telemetry.trackers.jsonl import JsonlSink
from torchtitan.train.built_in import Report
from torchtitan.train.rank_main import _summarize
from torchtitan.train.state import Progress, StepResult
from torchtitan.utils import activity as phases
from torchtitan.utils import device
from torchtitan.utils.activity import phase
from torchtitan.utils.device import LateValues
from torchtitan.utils.run_files import RunFile

KEYS = {
    "step",
    "loss",
    "max_loss",
    "grad_norm",
    "lr",
    "tokens",
    "skipped_steps",
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_gib",
    "memory_pct",
    "data_loading_pct",
    "step_time_s",
    "time",
}


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(metrics_of_runs, "from_rank_0", lambda value: value)


def make(folder, start=0, total=20, peak=None, experts=False, history=None, **kwargs):
    job = schema.Job(dump_folder=str(folder))
    config = schema.Metrics(**kwargs)
    rates = {"stages": [StageCost(1, 2e9, 1000)], "peak_flops": peak}
    ledger = RunRecord(folder, {}, step=start, resumable=False, writes=True, began=0.0)
    return MetricsReporter(
        *(config, job, {}, ledger, history or History()),
        **{"start_step": start, "total_steps": total, **rates, "experts": experts},
    )


def test_scores_of_checkpoints_that_are_written_again_are_dropped(one_rank, tmp_path):
    for step in (5, 10, 15):
        record_scores(tmp_path, step, {"arc/acc": 0.5}, {})

    def steps():
        lines = (tmp_path / "evals.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    metrics = make(tmp_path, start=10)
    assert steps() == [5, 10, 15], "nothing is trained yet"
    metrics.continue_after(10)
    assert steps() == [5, 10]
    metrics.rewind(5)
    assert steps() == [5]
    metrics.close()
    make(tmp_path).close()  # another run in the folder
    assert not (tmp_path / "evals.jsonl").exists()
    assert len(list(tmp_path.glob("evals-*.jsonl"))) == 1


VALUES = {
    "loss": 2.5,
    "max_loss": 2.75,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens": 700,
    "skipped_steps": 0,
}


def test_record_has_every_field_and_right_rates(one_rank, tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(phases, "monotonic", lambda: clock[0])
    metrics = make(tmp_path, peak=2e14)
    for step in (1, 2):
        with phase("steps", "training", step):
            with phase("data", "waiting for data"):
                clock[0] += 0.005
            clock[0] += 0.245
            metrics.count(step, 350)
    with phase("validation", "validating"):
        clock[0] += 40.0
    record = metrics.log(2, VALUES)
    metrics.close()
    assert set(record) == KEYS
    assert record["tokens_per_second"] == pytest.approx(1400)
    assert record["step_time_s"] == pytest.approx(0.25)
    assert record["data_loading_pct"] == pytest.approx(2.0)
    assert record["tflops"] == pytest.approx(2.8)
    assert record["mfu"] == pytest.approx(1.4)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {**record, "branch": None}
    ]


LOADS = torch.tensor([[0.0, 0, 0, 0, 0], [8, 0, 4, 4, 0.25], [6, 6, 2, 2, 0.5]])
"""Of a dense layer and two of 4 experts, with auxiliary losses."""


def test_what_is_said_of_experts(one_rank, tmp_path):
    metrics = make(tmp_path, experts=True)
    with phase("steps", "training", 2):
        metrics.count(2, 350)
        record = metrics.log(2, VALUES, experts=LOADS)
    metrics.close()
    assert set(record) - KEYS == {
        "expert_load_max",
        "expert_load_max_layer",
        "expert_entropy",
        "auxiliary_loss",
        "dead_experts",
    }
    assert (record["expert_load_max"], record["expert_load_max_layer"]) == (2.0, 1)
    entropies = 1.5 * math.log(2), -(0.75 * math.log(3 / 8) + 0.25 * math.log(1 / 8))
    assert record["expert_entropy"] == pytest.approx(sum(entropies) / 2 / math.log(4))
    assert (record["auxiliary_loss"], record["dead_experts"]) == (0.75, 0)
    (line,) = (tmp_path / "expert_load.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 2,
        "steps": 1,
        "rows": {"1": [8, 0, 4, 4], "2": [6, 6, 2, 2]},
        "branch": None,
    }


def test_a_dead_expert_is_named_once(monkeypatch):
    """When chance no longer explains it, whatever a record covers; again after it was alive."""
    monkeypatch.setattr(observed, "DEAD_AFTER", 8)
    dead = observed.DeadExperts()
    told = [dead.observe(read_loads(LOADS)) for _ in range(4)]
    assert [number for number, _ in told] == [0, 1, 1, 1]
    assert [text for _, text in told if text] == [told[1][1]]
    assert told[1][1].startswith(
        "dead experts, to which no token is sent: layer 1 expert 1. Raise moe.balance_bias_rate"
    )
    alive = LOADS.clone()
    alive[1, 1] = 1
    assert [dead.observe(read_loads(loads))[0] for loads in (alive, LOADS, LOADS)] == [0, 0, 1]


def test_a_load_that_stays_above_three_means_is_a_warning_once():
    """By steps, whatever a record covers. It starts anew when all experts are below."""
    overload = observed.Overload()
    even = observed.ExpertLoads({0: [5, 5, 5, 5], 1: [4, 6, 5, 5]}, 0.0)
    uneven = observed.ExpertLoads({0: [5, 5, 5, 5], 1: [1, 16, 2, 1]}, 0.0)
    assert [overload.observe(loads, 60) for loads in (uneven, even, uneven)] == [None] * 3
    assert overload.observe(uneven, 60) == (
        "an expert of layer 1 gets 3.2 times the mean load, and for 120 steps one has "
        "had more than 3 times. Raise "
        "moe.global_balance_loss or moe.balance_bias_rate, or lower optimizer.lr"
    )
    assert overload.observe(uneven, 1000) is None


def test_sensors_of_a_gpu_are_recorded_where_nvml_has_them(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 93)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 612_345)
    monkeypatch.setattr(torch.cuda, "temperature", lambda: 58)
    sensors = {"gpu_utilization_pct": 93, "gpu_power_w": 612.345, "gpu_temperature_c": 58}
    assert device.gpu_sensors() == sensors
    names = {"perf/gpu_utilization_pct", "perf/gpu_power_w", "perf/gpu_temperature_c"}
    assert set(scalars(sensors)) == names

    def absent():
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", absent)
    del sensors["gpu_utilization_pct"]
    assert device.gpu_sensors() == sensors, "a GPU may lack a sensor"
    monkeypatch.setattr(torch.cuda, "power_draw", absent)
    monkeypatch.setattr(torch.cuda, "temperature", absent)
    assert device.gpu_sensors() == {}


def test_first_last_and_every_kth_step_are_due(one_rank, tmp_path):
    metrics = make(tmp_path, start=3, total=21, log_freq=5)
    assert [s for s in range(4, 22) if metrics.due(s)] == [4, 5, 10, 15, 20, 21]


def test_resume_drops_steps_that_will_be_trained_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 5, 9)) + '{"step": 10, "lo')
    sink = JsonlSink(path, History())
    sink.follow(5)
    sink.log({"step": 6})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 5, 6]


def test_records_follow_the_branches_of_checkpoints(one_rank, tmp_path):
    """8 steps, back to 4, on to 6, back to 4 again and on to 9; then each branch is returned to."""
    saved, calls = {}, []

    def train(begin, *steps, branches=None):
        history = History()
        history.branches = dict(branches or {})
        metrics = make(tmp_path, start=begin, history=history)
        metrics.trackers.call = lambda *call: calls.append(call)
        metrics.continue_after(begin)
        loss = len(saved) + 1
        for step in steps:
            metrics.log_validation(
                step, [{"name": "", "loss": loss, "bits_per_byte": None, "tokens": 1}]
            )
            record_scores(tmp_path, step, {"loss": loss}, {}, branch=history.branch_of(step))
        saved[loss] = history.branches
        metrics.close()
        for name in ("metrics", "evals"):
            records = read_metrics(tmp_path, name)
            yield [(x["step"], x.get("validation_loss") or x["scores"]["loss"]) for x in records]

    def both(*args, **kwargs):
        metrics, evals = train(*args, **kwargs)
        assert metrics == evals
        return metrics

    first = [(step, 1) for step in range(1, 9)]
    assert both(0, *range(1, 9)) == first
    second = [*first[:4], (5, 2), (6, 2)]
    assert both(4, 5, 6, branches=saved[1]) == second
    third = [*first[:4], *((step, 3) for step in range(5, 10))]
    assert both(4, *range(5, 10), branches=saved[1]) == third
    assert both(8, branches=saved[1]) == first
    calls.clear()
    assert both(6, 7, branches=saved[2]) == [*second, (7, 5)]
    assert [call[1] if call[0] == "rewind" else call[1]["step"] for call in calls[:3]] == [4, 5, 6]
    assert both(9, branches=saved[3]) == third
    assert both(5, branches=saved[3]) == third[:5]


def test_all_ranks_follow_rank_0_whose_files_they_lack(one_rank, tmp_path, monkeypatch):
    """4 steps, back to 2, and back to 4, whose steps 3 and 4 every rank's trackers get again."""
    sent = []

    def from_rank_0(value):
        if dist.get_rank() == 0:
            sent.append(value)
        return sent[-1]

    monkeypatch.setattr(metrics_of_runs, "from_rank_0", from_rank_0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "branch": "a"}\n')
    aside = "".join(f'{{"step": {step}, "branch": "a"}}\n' for step in (3, 4))
    (tmp_path / "abandoned-metrics.jsonl").write_text(aside)
    calls, branches = [], []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        history = History()
        history.branches = {"a": 1}
        metrics = make(tmp_path, start=4, history=history)
        metrics.trackers.call = lambda *call: calls.append(call)
        metrics.continue_after(4)
        metrics.close()
        branches.append(history.branches)
    assert branches[0] == branches[1]
    assert list(branches[0].values()) == [1, 5]
    records = [("log", {"step": step, "branch": "a"}) for step in (3, 4)]
    assert calls[:3] == calls[3:] == [("rewind", 2), *records]


@pytest.mark.parametrize("full_disk", [False, True])
@pytest.mark.parametrize("kill", range(4))
def test_a_kill_while_records_follow_loses_none_and_doubles_none(
    tmp_path, monkeypatch, kill, full_disk
):
    """8 steps, back to 4, on to 6, and back to 8: as without the kill before replacement `kill`, or
    its failure.
    """
    history = History()
    sink = JsonlSink(tmp_path / "metrics.jsonl", history)

    def steps(path):
        return [(line["step"], line["branch"]) for line in map(json.loads, path.open())]

    history.branches = {"a": 1}
    for step in range(1, 9):
        sink.log({"step": step})
    history.branches = {"a": 1, "b": 5}
    sink.follow(4)
    for step in (5, 6, 6):
        sink.log({"step": step})
    history.branches = {"a": 1, "c": 9}
    real, calls = RunFile.replace, []

    def replace(file, text):
        calls.append(file)
        if len(calls) == kill + 1:
            if full_disk:
                return False
            raise KeyboardInterrupt
        return real(file, text)

    with monkeypatch.context() as patch:
        patch.setattr(RunFile, "replace", replace)
        with suppress(KeyboardInterrupt):
            back = sink.follow(8)
    assert len(calls) == min(kill + 1, 3)
    again = sink.follow(8)
    assert [record["step"] for record in (back if kill == 3 else again)] == [5, 6, 7, 8]
    assert steps(sink.file.path) == [(step, "a") for step in range(1, 9)]
    assert steps(sink.abandoned.path) == [(5, "b"), (6, "b"), (6, "b")]


def test_abandoned_records_without_a_branch_are_set_aside_for_good(tmp_path):
    """They are of an earlier version, or scores of its checkpoints."""
    record_scores(tmp_path, 3, {"acc": 0.5}, {}, abandoned=True)
    for step in (2, 4):
        record_scores(tmp_path, step, {"acc": 0.25}, {})
    foreign = '{"step": 1, "branch": ["x"]}\n'
    with (tmp_path / "abandoned-evals.jsonl").open("a") as file:
        file.write(foreign)
    sink = JsonlSink(tmp_path / "evals.jsonl", History())
    for _ in range(2):
        assert sink.follow(3) == []
        assert [record["step"] for record in read_metrics(tmp_path, "evals")] == [2]
        aside = read_metrics(tmp_path, "abandoned-evals")
        assert sorted(record["step"] for record in aside) == [1, 3, 4]


def test_a_new_run_does_not_overwrite_an_old_ones_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonlSink(path, History(), new_run=True)
    (old,) = set(tmp_path.glob("metrics-*.jsonl"))
    assert old.read_text() == '{"step": 1}\n'
    assert not path.exists()


def test_console_line_says_mfu_only_where_the_peak_is_known():
    console = ConsoleSink(100, 0, plain=True)
    record = dict.fromkeys(KEYS, 1.0) | {"step": 7, "mfu": None}
    assert "step   7/100" in console.line(record)
    assert "MFU" not in console.line(record)
    assert "MFU 1.0%" in console.line(record | {"mfu": 1.0})


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("NVIDIA A100-PCIE-40GB", "bfloat16", 312e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA A10G", "bfloat16", 70e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA GeForce RTX 3070 Ti", "bfloat16", None),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA GeForce GTX 1080", "bfloat16", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_peak_rates_are_known_or_none(name, dtype, peak):
    assert peak_flops(name, dtype) == peak


def test_the_last_line_has_a_loss_that_can_be_read(tmp_path, caplog, monkeypatch):
    """Steps of a row each: 7.5, 2.5, 7.5, ..., of which the last one is 2.5."""
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    progress = Progress()
    progress.data = object()
    for step in range(150):
        loss = 2.5 if step % 2 else 7.5
        progress.advance(StepResult(LateValues(torch.tensor([loss, 1, 1, loss])), 1, 1, stop=False))
    progress.validation = {"": 6.93, "empty": None, "web": 5}
    with caplog.at_level("INFO", "torchtitan"):
        _summarize(resolve([f"--job.dump_folder={tmp_path}"], 1), progress)
    assert caplog.messages[0] == (
        "Done: step 150, 150 tokens, loss 7.5000 -> 4.8333 (mean of the last 15 steps), "
        "validation loss 6.9300, validation loss of web 5.0000"
    )


def test_a_rewind_forgets_what_was_recorded_since():
    """The next record would hold values of steps that are trained again."""
    tally = SourceTally(2, np.ones(8), torch.device("cpu"))
    tally.add(torch.tensor([1]), torch.tensor([2.5]), torch.tensor([[3, 4]]))
    parts = {name: mock.Mock() for name in ("logged", "experts", "qk_clip", "metrics")}
    compute = SimpleNamespace(tally=tally)
    engine = SimpleNamespace(**parts, compute=compute, config=mock.Mock())
    telemetry = SimpleNamespace(metrics=parts["metrics"], run_record=None)
    Report(engine, telemetry).on_rewind(None, 7)
    assert [call[0] for part in parts.values() for call in part.method_calls] == [
        *("clear", "take", "take", "rewind")
    ]
    assert not tally._sums.any()


def test_sums_of_sources_are_those_since_the_last_record(monkeypatch):
    """Of two ranks that read the same."""
    monkeypatch.setattr("torchtitan.optim.loss.all_reduce", lambda sums, group: group.size() * sums)
    mesh = SimpleNamespace(loss_group=SimpleNamespace(size=lambda: 2))
    tally = SourceTally(2, np.full(8, 3), torch.device("cpu"))
    tally.add(torch.tensor([1]), torch.tensor([2.5]), torch.tensor([[3, 4]]))
    assert tally.take(mesh) == [[0, 0, 0], [5, 4, 12]]
    assert tally.take(mesh) == [[0, 0, 0]] * 2
