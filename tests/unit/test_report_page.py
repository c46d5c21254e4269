"""The page of runs: what a browser shows of it against the files of the runs."""

import json
import math
import random

import pytest
import tomli

from tests.browser import CHROMIUM, browser
from tests.run_folders import BEGAN, FLOPS_PER_TOKEN, PROMPTS, STEP_TOKENS, write_run, write_scores
from torchtitan.commands.report import main
from torchtitan.utils import wording
from torchtitan.utils.wording import flat

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]
HOSTILE = "<img src=x onerror=alert(1)> </script><script>alert(2)</script><!--<script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    config = '[optimizer]\nname = "%s"\n' % HOSTILE  # noqa: UP031
    runs = [
        write_run(folder / "base", 300),
        write_run(
            folder / "higher",
            240,
            shift=0.5,
            seed=1,
            rich=False,
            end="failed: out of memory",
            config=config,
        ),
    ]
    (runs[0] / "logs").mkdir()
    lines = [f"line {i} {HOSTILE}\n" for i in range(30)]
    (runs[0] / "logs/rank_0.log").write_text("".join([*lines, "without an end"]))
    write_scores(runs[1], 200, 0.6, limit=500)
    write_scores(runs[1], 100, 0.5, limit=500)  # an earlier checkpoint, scored later
    return runs


@pytest.fixture(scope="module")
def pages(runs, tmp_path_factory):
    """The page of one run, and that of two."""
    folder = tmp_path_factory.mktemp("pages")
    for name, shown in (("one", runs[:1]), ("two", runs)):
        assert main([*map(str, shown), "--html", str(folder / f"{name}.html")]) == 0
    return {name: (folder / f"{name}.html").as_uri() for name in ("one", "two")}


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def records(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [
        line for line in lines if "validation_loss" in line
    ]


def drawn(tab, chart):
    """The columns of a chart: the axis, then a curve or two of each run."""
    return tab.evaluate(
        f"Array.from(charts.find(one => one.key === '{chart}').plot.data, column => "
        "Array.from(column))"
    )


def test_the_curves_are_the_files(runs, pages, tab):
    for width, dark in ((500, True), (1280, False)):
        tab.open(pages["one"], width, dark=dark)
        assert tab.problems == []  # nothing is logged or loaded
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)"
        )
    training, validation = records(runs[0])
    for key in ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "memory_gib"):
        columns = drawn(tab, key)
        assert columns[:2] == [[one["step"] for one in training], [one[key] for one in training]], (
            key
        )
    assert drawn(tab, "validation") == [
        [v["step"] for v in validation],
        [v["validation_loss"] for v in validation],
    ]
    web, code = drawn(tab, "sources")[1::2]
    assert (web, code) == tuple(
        [one[f"loss/{name}"] for one in training] for name in ("web", "code")
    )
    assert drawn(tab, "load_max")[1] == [one["expert_load_max"] for one in training]
    figures = (
        "[...document.querySelectorAll('[data-figure]')].map(e => [e.dataset.figure, "
        "e.textContent])"
    )
    shown = dict(tab.evaluate(figures))
    last = training[-1]
    goodput = json.loads((runs[0] / "run.json").read_text())["goodput"]
    assert shown == {
        "state": "completed",
        "step": "300",
        "loss": wording.show_loss(last["loss"]),
        "tokens": wording.show_tokens(last["tokens"]),
        "tokens_per_second": wording.show_rate(last["tokens_per_second"]),
        "mfu": wording.show_percent(last["mfu"]),
        "memory_gib": wording.show_gib(last["memory_gib"]),
        "goodput": wording.show_percent(goodput["percent"]),
    }


def test_smoothing_scale_and_axes(runs, pages, tab):
    tab.open(pages["two"], 1280)
    training, _ = records(runs[0])
    span = tab.evaluate("(view.smooth = 90, charts.forEach(chart => chart.update()), span())")
    smoothed = []
    total = 0.0
    norm = 0.0
    for one in training:
        decay = math.exp(-1 / span)
        total = decay * total + one["loss"]
        norm = decay * norm + 1
        smoothed.append(total / norm)
    assert drawn(tab, "loss")[2] == pytest.approx(smoothed)
    choose = (
        "(key => { const input = document.querySelector(`[value=${key}]`); input.click(); "
        "return input.checked; })"
    )
    assert tab.evaluate(f"{choose}('tokens')")
    assert drawn(tab, "loss")[0][-1] == 300 * STEP_TOKENS
    assert tab.evaluate(f"{choose}('hours')")
    assert drawn(tab, "loss")[0] == pytest.approx(
        [(one["time"] - BEGAN) / 3600 for one in training]
    )
    assert tab.evaluate(f"{choose}('flops')")
    assert drawn(tab, "loss")[0][-1] == pytest.approx(300 * STEP_TOKENS * FLOPS_PER_TOKEN)
    tab.evaluate("document.querySelector('[data-control=log]').click()")
    assert tab.evaluate("charts.find(one => one.key === 'loss').plot.scales.y.distr") == 3
    tab.evaluate("document.querySelector('[data-toggle=base]').click()")
    assert len(drawn(tab, "loss")[0]) == 240  # the other run's
    assert tab.problems == []


def test_the_keyboard_reads_and_zooms(runs, pages, tab):
    tab.open(pages["one"], 1280)
    training, _ = records(runs[0])
    tip = "document.getElementById('tip').textContent"
    box = "document.querySelector('[data-chart=loss] .chart')"
    scales = "charts.map(chart => [chart.plot.scales.x.min, chart.plot.scales.x.max])"
    tab.evaluate(f"{box}.focus()")
    tab.press("ArrowRight")
    assert f"{wording.show_loss(training[0]['loss'])}" in tab.evaluate(tip)
    assert tab.evaluate(tip).startswith("step 1\n")
    tab.press("ArrowRight")
    assert tab.evaluate(tip).startswith("step 4\n")  # a hundredth of the run
    tab.evaluate(f"{box}.dispatchEvent(new KeyboardEvent('keydown', {{key: '+', bubbles: true}}))")
    zoomed = tab.evaluate(scales)
    assert len(zoomed) > 8
    assert zoomed == [zoomed[0]] * len(zoomed)
    assert zoomed[0][1] - zoomed[0][0] < 0.6 * 299
    assert tab.evaluate("document.querySelector('[data-control=all]').disabled") is False
    tab.press("Escape")
    assert tab.evaluate(scales) == [[1, 300]] * len(zoomed)
    over = "document.querySelector('[data-chart=loss] .u-over').getBoundingClientRect()"
    left, top, width, height = tab.evaluate(
        f"(box => [box.left, box.top, box.width, box.height])({over})"
    )
    tab.drag((left + width / 4, top + height / 2), (left + width / 2, top + height / 2))
    assert tab.evaluate(scales)[-1] == pytest.approx([1 + 299 / 4, 1 + 299 / 2], abs=2)


def test_what_happened_and_where_the_time_went(runs, pages, tab):
    tab.open(pages["one"], 1280)
    tips = tab.evaluate(
        "[...document.querySelectorAll('.lane [data-tip]')].map(e => e.dataset.tip)"
    )
    for part in (
        "preempted",
        "failed: rank 5: CUDA error",
        "step 50: loss 9.81 is a spike",
        "rewound to step 40",
        "stage 2 of data: annealing",
        "rank 3 on node-7",
        "8 ranks, dp_shard 4 x tp 2 (before: dp_shard 16)",
    ):
        assert [tip for tip in tips if part in tip], part
    assert len([tip for tip in tips if tip.startswith("save at step")]) == 15
    rows = tab.evaluate(
        "[...document.querySelectorAll('.events tbody tr')].map(row => row.innerText || "
        "row.textContent)"
    )
    assert len(rows) == 3 + 3 + 15 + 4  # starts, their ends, saves, other events
    place = "document.querySelector('.lane [data-event=stage]').style.left"
    assert float(tab.evaluate(place).removesuffix("%")) == pytest.approx(100 / 3 / 1.01, abs=0.1)
    seconds = json.loads((runs[0] / "run.json").read_text())["goodput"]["seconds"]
    widths = tab.evaluate(
        "[...document.querySelectorAll('.time .track i')].map(e => parseFloat(e.style.width))"
    )
    known = [seconds[kind] for kind in ("steps", "start", "restart", "saves")]
    assert widths == pytest.approx([100 * one / sum(known) for one in known], rel=1e-3)
    tab.evaluate("document.querySelector('.lanes [data-tip]').focus()")
    tab.press("ArrowRight")
    assert tab.evaluate("document.getElementById('tip').textContent") == tips[1]


def test_runs_are_compared_and_nothing_they_hold_is_run(pages, tab):
    tab.open(pages["two"], 1280)
    assert tab.evaluate("document.querySelector('.comparison').innerText").startswith(
        "Compared with base"
    )
    assert "higher: loss 0.50" in tab.evaluate("document.querySelector('.sentences').innerText")
    cells = tab.evaluate(
        "[...document.querySelectorAll('.comparison td')].map(cell => cell.textContent)"
    )
    assert cells[cells.index("optimizer.name") :][:3] == ["optimizer.name", "unset", HOSTILE]
    assert tab.evaluate("document.images.length + document.scripts.length") == 2
    states = tab.evaluate(
        "[...document.querySelectorAll('.heads tbody tr')].map(row => row.cells[1].innerText)"
    )
    assert states == ["completed", "failed\nout of memory"]
    assert tab.problems == []
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.evaluate("document.querySelector('section.controls').offsetHeight") == 0
    tab.call("Emulation.setEmulatedMedia", media="")


def test_scores_have_errors_and_those_of_checkpoints_a_curve(pages, tab):
    tab.open(pages["two"], 1280)
    steps = [50, 100, 150, 200, 250, 300]
    xs, base, scored = drawn(tab, "eval/arc_easy/acc")
    assert xs == steps
    assert base == [0.25 + step / 300 / 3 for step in steps]
    assert scored == [None, 0.5, None, 0.6, None, None]
    chart = "charts.find(c => c.key.startsWith('eval'))"
    scale = tab.evaluate(f"(y => [y.min, y.max])({chart}.plot.scales.y)")
    assert scale[0] < base[0] - 0.02  # the errors are in view
    assert scale[1] > 0.6 + 0.01
    rows = tab.evaluate(
        "[...document.querySelectorAll('.scores tbody tr')].map(row => row.textContent)"
    )
    assert rows == [
        "arc_easy/acc0.5833 ± 0.0200step 300\N{EN DASH}",
        "arc_easy/acc (torchtitan eval, limit 500)\N{EN DASH}0.6000 ± 0.0100step 200",
    ]


def test_samples_are_stepped_through_and_are_only_text(pages, tab):
    def shown():
        return tab.evaluate(
            "[...document.querySelectorAll('.samples pre')].map(one => one.textContent)"
        )

    def text(i, step):
        return f"{PROMPTS[i]} text {i} of step {step} </script><script>alert(3)</script>"

    for width, dark in ((500, True), (1280, False)):
        tab.open(pages["one"], width, dark=dark)
        assert shown() == [text(0, 300)]
        tab.evaluate("document.querySelector('.samples [aria-label=\"Earlier step\"]').click()")
        assert shown() == [text(0, 250)]
        tab.evaluate(
            "(s => { s.value = 1; s.dispatchEvent(new Event('change')); })"
            "(document.querySelector('[data-control=prompt]'))"
        )
        assert shown() == [text(1, 250)]
        tab.evaluate("document.querySelector('[data-control=sample]').focus()")
        tab.press("ArrowLeft")
        assert shown() == [text(1, 200)]
        tab.evaluate(
            "new Promise(done => { const all = document.querySelector('.samples details');"
            " all.addEventListener('toggle', () => setTimeout(done)); all.open = true; })"
        )
        cells = tab.evaluate(
            "[...document.querySelectorAll('.samples tbody tr')]"
            ".map(row => row.cells[0].textContent)"
        )
        assert cells == ["300", "250", "200", "150", "100", "50"]
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate("document.images.length + document.scripts.length") == 2
        assert tab.problems == []


def test_a_run_shows_its_configuration_commit_and_log(runs, pages, tab):
    tab.open(pages["one"], 500)
    rows = (
        "[...document.querySelectorAll('.setup tbody tr')].map(row => row.innerText.split('\\t'))"
    )
    shown = dict(tab.evaluate(rows))
    config = flat(tomli.loads((runs[0] / "config.toml").read_text()))
    assert {key: shown[key] for key in config} == {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in config.items()
    }
    assert shown["ranks"] == "8"
    assert "commit 0af10af10a with uncommitted changes" in tab.evaluate("document.body.innerText")
    assert "ended 2023-" in tab.evaluate("document.body.innerText")
    log = tab.evaluate("document.querySelector('.log pre').textContent").split("\n")
    assert log == [f"line {i} {HOSTILE}" for i in range(10, 30)]
    tab.open(pages["two"], 500)
    assert tab.evaluate("document.querySelectorAll('.setup details').length") == 2
    assert tab.problems == []


def test_figures_look_as_in_logs(pages, tab):
    tab.open(pages["one"], 500)
    numbers = random.Random(0)
    values = [
        0.0,
        999.4,
        999.5,
        9995,
        99950,
        999500,
        9.949,
        9.95,
        59.49,
        59.5,
        3599.4,
        3599.5,
        86369,
        86370,
    ]
    values += [10 ** numbers.uniform(-2, 13) for _ in range(200)]
    for name in ("tokens", "loss", "percent", "gib", "rate", "duration"):
        said = tab.evaluate(f"{json.dumps(values)}.map(x => show.{name}(x))")
        expected = [getattr(wording, f"show_{name}")(value) for value in values]
        if name in ("loss", "percent"):  # without or with commas in numbers that they never have
            said, expected = ([one.replace(",", "") for one in some] for some in (said, expected))
        assert said == expected, name
