"""A long run under `torchtitan watch`: it opens at once, and zooming fetches its details."""

import os
import time
import tracemalloc

import pytest

from tests.browser import CHROMIUM, browser
from tests.run_folders import append, record, write_run
from tests.watching import report_of, wait
from torchtitan.tools.reports.live import Live
from torchtitan.tools.reports.serve import Server, serving

pytestmark = pytest.mark.usefixtures("eager")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_zooming_fetches_details(tmp_path):
    run = write_run(tmp_path / "run", 6000, end=None, rich=False)
    with (
        serving(Server(Live([run]), ("127.0.0.1", 0))) as server,
        browser(tmp_path / "profile") as tab,
    ):
        tab.open(f"http://127.0.0.1:{server.server_address[1]}/", 1280)
        wait(tab, "parts && charts.length > 5")
        steps = "charts[0].plot.data[0].filter(x => x >= 1000 && x <= 1500).length"
        assert tab.evaluate(steps) < 200
        tab.evaluate("zoomTo([1000, 1500])")
        wait(tab, "report.runs[0].detail")
        shown = tab.evaluate("charts[0].plot.data.map(column => [...column].slice(0))")
        at = {
            step: loss
            for step, loss in zip(shown[0], shown[1], strict=True)
            if 1000 <= step <= 1500
        }
        assert at == {step: record(step)["loss"] for step in range(1000, 1501)}
        tab.evaluate("zoomTo(null)")
        assert tab.evaluate(steps) < 200


@pytest.mark.slow
def test_a_long_run_opens_at_once(tmp_path):
    """Of 10^6 records in a second (the fastest of three, because the machine may be busy), in
    little memory.
    """
    run = write_run(tmp_path / "long", 10**6, rich=False)
    seconds = []
    for _ in range(3):
        live = Live([run])
        began = time.perf_counter()
        assert len(live.report()) < 2**20
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1
    live = Live([run])
    at, _ = report_of(live)
    tracemalloc.start()
    for step in range(10**6 + 1, 10**6 + 1001):
        append(run, record(step))
        live.updates(at)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * 2**20
    assert os.stat(run / "metrics.jsonl").st_size > 200 * 2**20
