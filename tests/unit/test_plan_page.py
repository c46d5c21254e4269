"""The planner's page: its data against the plan, and what a browser makes of it."""

import json
import re

import pytest

from tests.browser import CHROMIUM, browser
from tests.plans import FULL, H100, ONE_ROW, SPEC, workload
from torchtitan.commands.plan import main
from torchtitan.tools.planner.advice import faster
from torchtitan.tools.planner.predict import predict
from torchtitan.tools.planner.render import as_data
from torchtitan.tools.web import web_page
from torchtitan.utils.torch_compat import torch_is_before_2_13

SPLIT = ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--compile.enable=true"]
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Pages with their JSON: of a pipeline, of a search, and of numbers of GPUs."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, argv in {
        "pipeline": [
            "--model.flavor=8B",
            "--world=16",
            "--training.local_batch_size=8",
            "--training.seq_len=8192",
            FULL,
            "--parallelism.pipeline_parallel_degree=4",
        ],
        "search": [
            "--model.flavor=8B",
            "--world=8",
            "--training.local_batch_size=2",
            "--training.seq_len=8192",
            "--search",
            "--tokens=1e12",
        ],
        "sizes": ["--model.flavor=1B", "--training.local_batch_size=1"],
    }.items():
        file = folder / f"{name}.html"
        main([*argv, "--hardware=h100-sxm", f"--html={file}"])
        found[name] = file, json.loads(file.with_suffix(".json").read_text())
    return found


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


# ---- the data


def test_the_page_carries_the_json_beside_it(planned):
    file, data = planned["pipeline"]
    text = file.read_text()
    carried = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(carried[1]) == data
    assert data["peak_gib"] == max(r["reserved_gib"] for r in data["memory"]["ranks"])
    assert data["command"].startswith("torchtitan plan --model.flavor=8B --world=16")
    assert "pipeline_parallel_degree = 4" in data["toml"]


def test_data_ends_no_script():
    made = web_page("a <b>", {"text": "</script>__TITLE__"}, [])
    assert made.count("</script>") == 2
    assert "<title>a &lt;b&gt;</title>" in made
    assert "__TITLE__" in made  # what the data holds is no placeholder


def test_ranges_are_the_bands_of_the_plan():
    plan = predict(workload("--model.flavor=8B", *ONE_ROW, world=8), SPEC, H100)
    data = as_data(plan)
    speed = "tokens_per_second_per_gpu"
    figures = {speed: (data[speed], data[f"range_{speed}"], 1)}
    for figure, exponent in (("mfu", 1), ("step_s", -1)):
        figures[figure] = data["time"][figure], data["time"]["ranges"][figure], exponent
    for figure, (value, between, exponent) in figures.items():
        ends = sorted(
            (value**exponent * (1 + sign * plan.speed_band)) ** exponent for sign in (-1, 1)
        )
        assert list(between) == pytest.approx(ends), figure
    assert data["chance_to_fit"] == plan.chance_to_fit


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param([], id="1F1B"),
        pytest.param(
            SPLIT,
            id="ZBV",
            marks=pytest.mark.skipif(
                torch_is_before_2_13(), reason="refused with torch before 2.13"
            ),
        ),
    ],
)
def test_the_bubble_is_a_part_of_the_step(schedule):
    """One number in the headline and among the parts of the time. A compiled backward runs twice
    when split: that is work, and no bubble.
    """
    flags = [
        "--training.local_batch_size=8",
        "--training.seq_len=8192",
        "--parallelism.pipeline_parallel_degree=4",
    ]
    plan = predict(workload("--model.flavor=8B", *flags, *schedule, world=16), SPEC, H100)
    data = as_data(plan)
    parts = data["time"]["parts_s"]
    assert parts["pipeline bubble"] / data["time"]["step_s"] == pytest.approx(
        data["time"]["bubble"]
    )
    assert sum(parts.values()) == pytest.approx(data["time"]["step_s"])
    assert ("repeated by a split backward" in parts) == bool(schedule)
    if schedule:
        assert {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"} in [
            change.settings
            for change in faster(plan)
            if change.cause == "repeated by a split backward"
        ]


# ---- in a browser


@in_browser
@pytest.mark.e2e
@pytest.mark.parametrize("name", ["pipeline", "search"])
def test_a_browser_shows_the_figures(name, planned, tab):
    file, data = planned[name]
    for width, dark in ((1280, False), (500, True)):
        tab.open(file.as_uri(), width, dark=dark)
        assert tab.problems == []  # nothing is logged or loaded
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)"
        )
    figures = (
        "[...document.querySelectorAll('[data-figure]')].map(e => [e.dataset.figure, "
        "e.textContent])"
    )
    shown = dict(tab.evaluate(figures))
    time = data["time"]
    run = data["run"]
    assert shown["tokens_per_second_per_gpu"] == f"{data['tokens_per_second_per_gpu']:,.0f}"
    assert shown["mfu"] == f"{100 * time['mfu']:.1f} %"
    assert float(shown["step_s"]) == pytest.approx(time["step_s"], rel=0.005)
    assert shown["peak_gib"] == f"{data['peak_gib']:,.1f}"
    assert float(shown["gpu_hours"].replace(",", "")) == pytest.approx(run["gpu_hours"], rel=0.005)
    assert (shown["command"], shown["toml"]) == (data["command"], data["toml"])
    if name == "pipeline":
        assert shown["bubble"] == f"{100 * time['bubble']:.1f} %"
    text = tab.evaluate("document.body.innerText")
    assert ("1 trillion tokens" in text) == (name == "search")
    # headline, parts
    assert text.count(f"{100 * time['bubble']:.1f} %") >= 2 or name == "search"
    last = data["world"] - 1
    assert (
        tab.evaluate(f"document.querySelectorAll('.mesh [data-tip^=\"rank {last}:\"]').length") == 1
    )


@in_browser
@pytest.mark.e2e
def test_tooltips_answer_to_the_keyboard(planned, tab):
    tab.open(planned["pipeline"][0].as_uri(), 1280)
    tip = (
        "document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent"
    )
    for _ in range(40):
        tab.press("Tab")
        if tab.evaluate("document.activeElement.closest('.mesh') !== null"):
            break
    seen = [tab.evaluate(tip)]
    tab.press("ArrowRight")
    seen.append(tab.evaluate(tip))
    assert [text.partition(":")[0] for text in seen] == ["rank 0", "rank 1"]
    tab.press("Escape")
    assert tab.evaluate(tip) is None


@in_browser
@pytest.mark.e2e
def test_dots_and_rows_of_a_search_are_tied(planned, tab):
    file, data = planned["search"]
    tab.open(file.as_uri(), 1280, height=4000)
    row = "document.querySelectorAll('tr[data-key]')[1]"
    mark = f"{row}.closest('section').querySelector('.mark')"
    tab.evaluate(f"{row}.focus()")
    assert tab.evaluate(f"{mark}.hidden") is False
    best = data["search"]["best"][1]
    said = f"{best['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU, {best['peak_gib']:.1f} GiB"
    assert said in tab.evaluate("document.getElementById('tip').textContent")
    x, y = tab.evaluate(
        "(box => [box.left + box.width / 2, box.top + box.height / "
        f"2])({mark}.getBoundingClientRect())"
    )
    tab.evaluate(f"{row}.blur()")
    assert tab.evaluate(f"{mark}.hidden") is True
    assert tab.evaluate("document.querySelectorAll('tr.on').length") == 0
    tab.point(x, y)
    marked = tab.evaluate(
        "[...document.querySelectorAll('tr.on')].map(row => Number(row.dataset.key))"
    )
    assert len(marked) == 1
    dot = data["search"]["best"][marked[0]]
    assert dot["peak_gib"] == pytest.approx(best["peak_gib"], rel=0.02)


@in_browser
@pytest.mark.e2e
def test_numbers_of_gpus_are_drawn(planned, tab):
    file, data = planned["sizes"]
    tab.open(file.as_uri(), 500)
    assert tab.problems == []
    tab.evaluate("document.querySelectorAll('.chart')[0].focus()")
    shown = []
    for _ in data["sizes"]:
        tab.press("ArrowRight")
        shown.append(tab.evaluate("document.getElementById('tip').textContent"))
    assert [text.partition(" GPU")[0] for text in shown] == [
        str(size["world"]) for size in data["sizes"]
    ]
