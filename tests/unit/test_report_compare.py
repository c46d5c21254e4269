"""Differences between runs: found where there are some, and not made out of noise, however it is
correlated.
"""

import math

import numpy as np
import pytest

from tests.short_runs import BEGAN, record, write_run
from torchtitan.tools.reports import collect as report
from torchtitan.tools.reports.noise import (
    gap_in_ranges,
    independent_values,
    mean_gap,
    median_gap,
    smooth,
)


def noise(series, length, correlation=0.0, seed=0):
    """Series of an autoregressive process of order one, of variance 1 / (1 - correlation^2)."""
    values = np.random.default_rng(seed).normal(size=(series, length + 500))
    for i in range(1, values.shape[1]):
        values[:, i] += correlation * values[:, i - 1]
    return values[:, -length:]


# ---- the statistics


@pytest.mark.parametrize(("length", "correlation"), [(100, 0.0), (400, 0.5), (1000, 0.9)])
def test_one_in_twenty_series_without_a_difference_seems_to_have_one(length, correlation):
    verdicts = [mean_gap(series.tolist()).significant for series in noise(600, length, correlation)]
    assert 0.025 < np.mean(verdicts) < 0.08
    if correlation:  # what treats the values as independent would be wrong here
        values = noise(600, length, correlation)
        naive = abs(values.mean(1)) > 1.96 * values.std(1) / math.sqrt(length)
        assert naive.mean() > 0.2


def test_no_verdict_without_enough_independent_values():
    for length, correlation in ((30, 0.0), (200, 0.9), (2000, 0.995)):
        found = [
            mean_gap(series.tolist()).noise is None for series in noise(50, length, correlation)
        ]
        assert np.mean(found) > 0.9
    assert mean_gap([]).noise is None


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_the_interval_is_as_wide_as_theory_says(correlation):
    """The mean of n values has the standard error 1 / ((1 - r) sqrt(n))."""
    found = [mean_gap((series + 3).tolist()) for series in noise(80, 2000, correlation)]
    expected = 2.262 / ((1 - correlation) * math.sqrt(2000))
    assert np.sqrt(np.mean([one.noise**2 for one in found])) == pytest.approx(expected, rel=0.1)
    assert np.mean([one.value for one in found]) == pytest.approx(3, abs=0.1)
    assert all(one.significant for one in found)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_independent_values(correlation):
    counts = [independent_values(series.tolist()) for series in noise(50, 3000, correlation)]
    assert np.mean(counts) == pytest.approx(3000 * (1 - correlation) / (1 + correlation), rel=0.1)
    assert independent_values([1.0] * 50) == independent_values([float(i) for i in range(50)]) == 50


def test_a_difference_that_grows_is_found():
    assert mean_gap(
        [0.001 * i + e for i, e in enumerate(noise(1, 400)[0].tolist())]
    ).value == pytest.approx(0.2, abs=0.1)
    assert mean_gap([0.01 * i + e for i, e in enumerate(noise(1, 400)[0].tolist())]).significant


def test_curves_at_other_points():
    """A batch twice as large: half as many records, none at the same number of tokens."""
    base = noise(80, 800, seed=1)
    half = noise(80, 400, seed=2)
    verdicts = []
    shifted = []
    for a, b in zip(base.tolist(), half.tolist(), strict=True):
        points = {i + 1.0: 5 - i / 100 + value for i, value in enumerate(a)}
        others = {2 * i + 1.5: 5 - (2 * i + 0.5) / 100 + value for i, value in enumerate(b)}
        verdicts.append(gap_in_ranges(others, points).significant)
        shifted.append(gap_in_ranges({at: value + 1 for at, value in others.items()}, points))
    assert np.mean(verdicts) < 0.1
    assert all(one.significant for one in shifted)
    assert np.mean([one.value for one in shifted]) == pytest.approx(1, abs=0.02)
    assert math.isnan(gap_in_ranges({1.0: 1.0}, {2.0: 1.0}).value)


def test_speeds_with_outliers():
    base = noise(200, 200, seed=3)
    other = noise(200, 150, seed=4)
    for one in (base, other):
        one[:, ::17] -= 300  # steps that waited
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(base, other, strict=True)]
    assert np.mean([median_gap(a, b).significant for a, b in pairs]) < 0.08
    faster = [median_gap([value + 1 for value in a], b) for a, b in pairs]
    assert np.mean([one.significant for one in faster]) > 0.95
    assert np.mean([one.value for one in faster]) == pytest.approx(1, abs=0.05)
    assert median_gap([5.0] * 39, [4.0] * 100) == (1.0, None)
    assert median_gap([5.0] * 40, [4.0] * 100) == (1.0, 0.0)


def test_speeds_that_drift():
    pairs = [noise(50, 200, 0.9, seed) for seed in (5, 6)]
    verdicts = [median_gap(a.tolist(), b.tolist()) for a, b in zip(*pairs, strict=True)]
    assert np.mean([one.noise is None for one in verdicts]) > 0.9
    pairs = [noise(100, 1000, 0.8, seed) for seed in (5, 6)]
    verdicts = [median_gap(a.tolist(), b.tolist()) for a, b in zip(*pairs, strict=True)]
    assert np.mean([one.significant for one in verdicts]) < 0.09
    assert np.mean([one.noise is None for one in verdicts]) < 0.1


def test_smoothing_against_its_closed_form():
    values = noise(1, 60)[0].tolist()
    for weight in (0.0, 0.5, 0.95):
        expected = [
            sum(weight**k * values[n - k] for k in range(n + 1))
            / sum(weight**k for k in range(n + 1))
            for n in range(len(values))
        ]
        assert smooth(values, weight) == pytest.approx(expected)
    assert smooth([2.0, None, 2.0], 0.9) == [2.0, None, 2.0]
    assert smooth([1.0, None, 0.0], 0.5) == [1.0, None, pytest.approx(1 / 3)]


# ---- runs


def trained(folder, name, losses, *, freq=1, tokens=1000, rates=None, starts=None, validation=None):
    records = [
        record(
            step,
            loss=loss,
            tokens=step * tokens,
            tokens_per_second=float(rates[step - 1]) if rates is not None else 1.0,
        )
        for step, loss in enumerate(losses.tolist(), 1)
        if step % freq == 0
    ]
    checks = [
        {"step": step, "validation_loss": loss, "time": BEGAN}
        for step, loss in (validation or {}).items()
    ]
    return write_run(
        folder / name, sorted([*records, *checks], key=lambda one: one["step"]), starts
    )


def compared(*folders):
    return {(one["metric"], one["run"]): one for one in report.collect(folders)["comparison"]}


def test_runs_on_the_same_data_are_compared_step_by_step(tmp_path):
    """What the data adds to both losses is no noise."""
    common = 0.5 * noise(1, 800)[0]
    own = 0.02 * noise(3, 800, seed=1)
    curve = 2 + 8 / np.sqrt(np.arange(1, 801))
    runs = [
        trained(
            tmp_path, name, curve + common + shift + own[i], validation={300: 2.5, 600: 2.0 + shift}
        )
        for i, (name, shift) in enumerate([("base", 0.0), ("same", 0.0), ("worse", 0.01)])
    ]
    found = compared(*runs)
    same = found["loss", "same"]
    worse = found["loss", "worse"]
    assert (same["base"], same["significant"], worse["significant"]) == ("base", False, True)
    assert worse["difference"] == pytest.approx(0.01, abs=worse["noise"])
    assert (
        worse["noise"] < 0.01
    )  # of the difference of two runs; that of the data is 25 times as much
    assert same["text"].startswith("loss within noise: 0.00")
    text = (
        f"loss {worse['difference']:.4f} ± {worse['noise']:.4f} higher, over the last 25% of "
        "800K tokens, 200 records"
    )
    assert worse["text"] == text
    check = found["validation_loss", "worse"]
    assert (check["difference"], check["noise"], check["significant"]) == (
        pytest.approx(0.01),
        None,
        False,
    )
    assert (
        check["text"]
        == "validation loss 0.0100 higher (noise unknown), at step 600, one validation of each"
    )


def test_runs_of_other_batches_are_compared_at_the_same_tokens(tmp_path):
    tokens = np.arange(1, 2001) * 1000.0
    curves = [2 + 300 / np.sqrt(tokens), 2.05 + 300 / np.sqrt(3 * tokens)]
    base = trained(tmp_path, "base", curves[0] + 0.02 * noise(1, 2000, seed=5)[0])
    large = trained(
        tmp_path, "large", curves[1] + 0.02 * noise(1, 2000, seed=6)[0], tokens=3000, freq=2
    )
    found = compared(base, large)["loss", "large"]
    assert found["significant"]
    assert found["difference"] == pytest.approx(0.05, abs=2 * found["noise"])
    assert "of 2.00M tokens" in found["text"]


def test_speed_does_not_count_first_steps(tmp_path):
    rates = [1000 + 10 * noise(1, 400, seed=seed)[0] for seed in (7, 8)]
    for one in rates:
        one[[0, 350]] = 1  # compile
    starts = [
        {"time": BEGAN, "last_seen": BEGAN, "resumed_step": step, "step": 400, "end": None}
        for step in (0, 350)
    ]
    flat = np.full(400, 2.0)
    runs = [
        trained(tmp_path, "base", flat, rates=rates[0], starts=starts),
        trained(tmp_path, "fast", flat, rates=rates[1] * 1.1, starts=starts),
    ]
    found = compared(*runs)["tokens_per_second", "fast"]
    assert found["significant"]
    assert found["difference"] == pytest.approx(100, abs=2 * found["noise"])
    assert found["noise"] < 10
    assert found["text"].endswith("over the last 99 and 99 records")


def test_runs_that_can_not_be_compared(tmp_path):
    empty = write_run(tmp_path / "empty", [])
    short = trained(tmp_path, "short", np.full(3, 2.0))
    early = trained(tmp_path, "early", np.full(400, 2.0), tokens=1)
    assert compared(empty, short) == {}
    found = compared(short, early)
    assert found["tokens_per_second", "early"]["noise"] is None
