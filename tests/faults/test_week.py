"""The week, watched: an open page shows each event, and at the end what the files hold."""

import json
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from tests.browser import CHROMIUM, browser
from tests.faults.week import Week
from torchtitan.tools.reports.collect import collect, report_page
from torchtitan.utils.files import write_output

STEPS_PER_DAY = 24
SHOWN = {
    "preempted": "preempted",
    "resumed": "resumed at step",
    "rewound": "rewind",
    "stage": "stage of data",
    "finished": "completed",
}
"""Kind of event to what the page's table calls it."""


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_week_is_shown_as_it_happens(tmp_path):
    happened: Counter[str] = Counter()
    page = tmp_path / "page.html"
    tab = None

    def write():  # as `torchtitan watch` does
        write_output({page: report_page(collect([week.dump]), every=0.2).encode()})

    def look(kind):
        nonlocal tab
        happened[kind] += 1
        if tab is None:
            write()
            tab = stack.enter_context(browser(tmp_path / "profile"))
            tab.open(page.as_uri(), 1200)
        deadline = time.monotonic() + 30
        tables = "[...document.querySelectorAll('table')].map(table => table.textContent).join(' ')"
        while (text := tab.evaluate(tables)).count(SHOWN[kind]) < happened[kind]:
            write()
            assert time.monotonic() < deadline, (
                f"{kind} for the {happened[kind]}. time is not in\n{text}"
            )
            time.sleep(0.2)

    week = Week(tmp_path, STEPS_PER_DAY, look)
    with ExitStack() as stack:
        week.run()
        deadline = time.monotonic() + 30
        while tab.evaluate("report.runs[0].state") != "completed":
            write()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        shown = tab.evaluate(
            "[report.runs[0].axes.step, report.runs[0].metrics.loss, report.runs[0].starts.length]"
        )
        own = [url for url in tab.problems if not url.startswith(page.as_uri())]
    records = [record for record in week.lines("metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, 7 * STEPS_PER_DAY + 1))
    assert shown[0] == [record["step"] for record in records]
    assert shown[1] == [record["loss"] for record in records]
    assert shown[2] == len(json.loads((week.dump / "run.json").read_text())["starts"]) == 6
    assert happened == {"preempted": 3, "resumed": 4, "rewound": 1, "stage": 1, "finished": 1}
    assert own == [], "errors in the console, or requests to other hosts"
