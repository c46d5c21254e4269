"""Goodput and cost: against a simulated run, a brute-force optimum, and Llama 3's interruptions."""

import math
import random

import pytest

from tests.plans import H100, ONE_ROW, SPEC, workload
from torchtitan.commands.plan import main
from torchtitan.tools.planner.budget import (
    Failures,
    Saves,
    best_interval,
    budget_of,
    goodput,
    goodput_at,
    saves_of,
)
from torchtitan.tools.planner.predict import predict

LLAMA3_HOURS = 54 * 24 * 16_384 / 419
"""Of one GPU between failures: 419 unexpected interruptions in 54 days on 16,384 GPUs
(arXiv:2407.21783, 3.3.4).
"""


def simulated(interval, blocked, mtbf, restart, intervals=20_000):
    """Goodput of a run that fails at random times, segment by segment."""
    chance = random.Random(0)
    clock = 0.0
    next_failure = chance.expovariate(1 / mtbf)
    for _ in range(intervals):
        begin = 0.0
        while True:  # (restart and) train for an interval, save
            end = clock + begin + interval + blocked
            if end <= next_failure:
                clock = end
                break
            clock = next_failure
            begin = restart
            next_failure = clock + chance.expovariate(1 / mtbf)
    return intervals * interval / clock


@pytest.mark.parametrize(
    ("interval", "blocked", "mtbf", "restart"), [(600, 30, 11_000, 600), (3000, 100, 4000, 900)]
)
def test_goodput_is_that_of_a_simulated_run(interval, blocked, mtbf, restart):
    computed = goodput_at(interval, Saves(0, blocked, 0), mtbf, restart)
    assert computed == pytest.approx(simulated(interval, blocked, mtbf, restart), rel=0.02)


@pytest.mark.parametrize(("blocked", "mtbf"), [(5, 11_000), (60, 11_000), (300, 3000)])
def test_the_best_interval_loses_least(blocked, mtbf):
    saves = Saves(0, blocked, 0)
    tried = max(range(10, 20_000, 5), key=lambda t: goodput_at(t, saves, mtbf, 600))
    assert best_interval(blocked, mtbf) == pytest.approx(tried, rel=0.02)
    assert (
        goodput_at(best_interval(blocked, mtbf), saves, mtbf, 600)
        >= goodput_at(tried, saves, mtbf, 600) - 1e-4
    )


def test_saves():
    """12 bytes per parameter; what blocks depends on `async_mode`."""
    flags = ["--model.flavor=8B", *ONE_ROW, "--checkpoint.enable"]
    made = {
        mode: saves_of(
            predict(workload(*flags, f"--checkpoint.async_mode={mode}", world=8), SPEC, H100), 10e9
        )
        for mode in ("disabled", "async", "async_with_pinned_mem")
    }
    size = 12 * 8_030_261_248
    for saves in made.values():
        assert saves.size == pytest.approx(size)
    assert (made["disabled"].blocked, made["disabled"].background) == pytest.approx(
        (size / 10e9, 0)
    )
    assert made["async"].blocked == pytest.approx(size / 8 / H100.host_link)
    assert made["async"].background == pytest.approx(size / 10e9)
    assert made["async_with_pinned_mem"].blocked == 0
    offloaded = workload(*flags, "--training.enable_cpu_offload", world=8)
    assert saves_of(predict(offloaded, SPEC, H100), 10e9).size == pytest.approx(size)


def test_failures_of_llama_3():
    """One every 3.1 hours; more than 90 % of the time was training (the same section)."""
    flags = [
        "--model.flavor=405B",
        *ONE_ROW,
        "--checkpoint.enable",
        "--checkpoint.async_mode=async",
    ]
    shape = ["--parallelism.tensor_parallel_degree=8", "--parallelism.pipeline_parallel_degree=16",
             "--training.local_batch_size=16", "--activation_checkpoint.mode=full"]  # fmt: skip
    plan = predict(
        workload(*flags[:1], *flags[2:], "--training.seq_len=8192", *shape, world=16_384),
        SPEC,
        H100,
    )
    made = goodput(plan, Failures(LLAMA3_HOURS, 2e12, 10))
    assert made.mtbf / 3600 == pytest.approx(3.1, abs=0.05)
    assert 0.9 < made.share < 0.97
    assert made.own_share < made.share


def test_a_budget_adds_failures_and_money():
    plan = predict(
        workload("--model.flavor=8B", *ONE_ROW, "--checkpoint.enable", world=8), SPEC, H100
    )
    plain = budget_of(plan, 1e12, None, 2.5)
    assert plain.cost == pytest.approx(2.5 * plain.run.gpu_hours)
    failing = budget_of(plan, 1e12, Failures(1000, 1e9, 10), 2.5)
    assert failing.hours == pytest.approx(plain.hours / failing.goodput.share)
    never = budget_of(plan, 1e12, Failures(1e-3, 1e9, 10), None)
    assert never.hours == math.inf


def test_the_command(capsys):
    argv = ["--model.flavor=8B", *ONE_ROW, "--world=8", "--hardware=h100-sxm", "--tokens=1e12"]
    assert main([*argv, "--money=2", "--mtbf=50700", "--storage=10"]) == 0
    out = capsys.readouterr().out
    assert "Goodput 9" in out
    assert "at 2 per GPU-hour" in out
