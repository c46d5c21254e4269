"""The estimate of the time left, against simulated runs whose end is known."""

import io
import random
import re
import sys
import time

import pytest

from torchtitan.telemetry.console import ConsoleSink, Pace
from torchtitan.utils.meter import Meter
from torchtitan.utils.wording import show_date


def estimates(seconds, total, at):
    """Estimate after each step of `at`, and the truth; `seconds[n]` is the time from the end of
    step n to that of the next one.
    """
    clock = [0.0]
    pace = Pace(total, lambda: clock[0])
    found = {}
    for step in range(1, total + 1):
        pace.record_step(step)
        if step in at:
            found[step] = (pace.remaining_seconds(), sum(seconds[step:total]))
        clock[0] += seconds[step] if step < total else 0.0
    return found


def test_saves_and_validation_count_in_proportion():
    """Both take far longer than a step, and the long one is rarer than the steps that are looked
    back on.
    """
    noise = random.Random(0)
    seconds = [
        noise.uniform(0.9, 1.1) + 20.0 * (n % 50 == 0) + 300.0 * (n % 500 == 0) for n in range(5000)
    ]
    for estimate, truth in estimates(seconds, 5000, (1250, 2750)).values():
        assert estimate == pytest.approx(truth, rel=0.06)
    assert sum(seconds) / 5000 == pytest.approx(2.0, rel=0.01), "twice what the steps alone take"


def test_one_pause_changes_little():
    """Compilation in the second step, and ten minutes in which a file system hung."""
    seconds = [1.0] * 10000
    seconds[1], seconds[2000] = 60.0, 600.0
    found = estimates(seconds, 10000, (3, 10, 2001, 2500))
    for step, limit in ((3, 2.7), (10, 1.8), (2001, 1.35), (2500, 1.3)):
        estimate, truth = found[step]
        assert truth <= estimate <= limit * truth, step


def test_a_lasting_change_of_speed_is_noticed_within_a_hundred_steps():
    seconds = [1.0] * 1000 + [2.0] * 1000
    estimate, truth = estimates(seconds, 2000, (1100,))[1100]
    assert estimate == pytest.approx(truth, rel=0.01)


def test_the_line_says_when_the_run_ends(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("torchtitan.telemetry.console.time.time", lambda: 1_795_406_706.0)
    console = ConsoleSink(1000, 0, plain=True, clock=lambda: clock[0])
    record = dict.fromkeys(
        ("loss", "grad_norm", "lr", "tokens_per_second", "tflops", "memory_gib", "memory_pct"), 1.0
    )
    record |= {"mfu": None}
    console.advance(1)
    assert console.line(record | {"step": 1}).endswith("ETA unknown")
    for step in range(2, 101):
        clock[0] += 2.0
        console.advance(step)
    end = show_date(1_795_406_706 + 1800)
    today = show_date(1_795_406_706)[:10]
    shown = end.removeprefix(f"{today} ")
    assert console.line(record | {"step": 100}).endswith(f"ETA 30 min 00 s ({shown})")
    clock[0] += 6e6
    console.advance(101)
    later = show_date(1_795_406_706 + console.pace.remaining_seconds())
    assert today not in later
    assert console.line(record | {"step": 101}).endswith(f" ({later})"), "the date, as not today"
    assert console.line(record | {"step": 1000}).endswith("(1%)"), "at the end nothing is left"


@pytest.mark.parametrize(("plain", "shown"), [(False, True), (True, False)])
def test_a_terminal_shows_the_same_figures_live(monkeypatch, plain, shown):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name, value in {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    clock = iter(range(0, 1000, 2))
    console = ConsoleSink(100, 0, plain=plain, clock=lambda: next(clock))
    for step in range(1, 41):
        console.advance(step)
    console.log(
        {
            "step": 40,
            "loss": 2.5,
            "grad_norm": 1,
            "lr": 1,
            "tokens_per_second": 7822,
            "tflops": 1,
            "memory_gib": 1,
            "memory_pct": 1,
            "mfu": None,
        }
    )
    live = (
        r"40/100 +loss 2\.5000  7,822 tok/s +ETA 2 min 00 s \((\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d\)"
    )
    deadline = time.monotonic() + (30 if shown else 0)
    while not re.search(live, terminal.getvalue()) and time.monotonic() < deadline:
        time.sleep(0.05)  # it is drawn by a thread
    console.close()
    assert bool(re.search(live, terminal.getvalue())) == shown


def test_no_time_is_promised_before_anything_is_read(monkeypatch, capsys):
    """A single document of a megabyte counts once it is read: not as "489 d left"."""
    seconds = iter(range(0, 1000, 40))
    monkeypatch.setattr("torchtitan.utils.meter.time.monotonic", lambda: next(seconds))
    meter = Meter(100)
    meter.show("no document")
    meter.advance(50)
    meter.show("1 document")
    assert capsys.readouterr().out == "50.0% read, 1 document, 2 min 00 s left\n"
