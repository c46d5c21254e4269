"""`torchtitan watch`: the page that it writes while runs train, and what it serves."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.browser import CHROMIUM, browser
from tests.run_folders import append, record, write_run, write_samples
from torchtitan.commands import report as report_command
from torchtitan.commands import watch
from torchtitan.tools.reports.collect import collect, report_page
from torchtitan.tools.reports.serve import PageServer
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", 120, end=None)


def written(page):
    """What a page was made from."""
    (text,) = re.findall(r'id="data">(.*?)</script>', page.read_text())
    return json.loads(text)


# ---- the file


@pytest.mark.e2e
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_the_page_is_written_again_until_it_ends(run, number):
    command = [sys.executable, "-m", "torchtitan", "watch", str(run), "--every", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [process.stdout.readline() for _ in range(3)]
    page = run / "report.html"
    assert lines[:2] == [f"Watching {run}  (Ctrl-C ends)\n", f"Open {page.as_uri()}\n"]
    first = written(page)
    assert (first["report"]["runs"], first["every"]) == (collect([run])["runs"], 1)
    append(run, record(121))
    while (data := written(page))["report"]["runs"][0]["step"] != 121:  # never a half of a page
        pass
    assert data["written"] > first["written"]
    process.send_signal(number)
    assert process.communicate(timeout=120)[0] == f"ended; the page stays: {page}\n"
    assert process.returncode == 0
    assert written(page)["every"] is None
    assert [path.name for path in run.iterdir() if path.suffix in (".html", ".tmp")] == [page.name]


@pytest.fixture
def ends(monkeypatch):
    """Ctrl-C instead of the first pause."""

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupt)


def test_it_is_the_page_of_a_report(run, tmp_path, ends, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    assert watch.main([str(run), "--output", str(tmp_path / "new" / "watch.html")]) == 0
    assert report_command.main([str(run), "--html", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "new/watch.html").read_text() == (tmp_path / "report.html").read_text()


def test_several_runs_have_their_page_in_the_first_folder(run, tmp_path, ends):
    write_run(tmp_path / "other", 3, end=None)
    assert watch.main([str(tmp_path), str(run)]) == 0
    shown = written(tmp_path / "report.html")["report"]["runs"]
    assert [one["name"] for one in shown] == ["other", "run"]


def test_long_readings_are_followed_by_long_pauses(run, monkeypatch):
    pauses = []
    clock = iter(range(0, 1000, 3))  # each reading takes 3 seconds

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(watch.time, "monotonic", lambda: next(clock))
    assert watch.main([str(run)]) == 0
    assert pauses == pytest.approx([5, 30, 30])


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["{run}/run.json"], "not a folder"),
        (["{run}", "--port", "{taken}"], "--port {taken}: Address already in use; choose another"),
        (
            ["{run}", "--output", "{run}/run.json/x"],
            "can't write {run}/run.json/x: File exists; name another file with --output",
        ),
    ],
)
def test_mistakes_are_explained(run, argv, error):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"run": run, "taken": taken.getsockname()[1]}
        with pytest.raises(UserError, match=re.escape(error.format(**names))):
            watch.main([word.format(**names) for word in argv])


def test_a_run_that_has_not_begun_is_waited_for(run, tmp_path, monkeypatch, capsys):
    """Its folder may not exist yet; nor is it refused beside a run that has begun."""
    later = tmp_path / "later"

    def sleep(_):
        if later.exists():
            raise KeyboardInterrupt
        write_run(later, 3, end=None)

    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert watch.main([str(later)]) == 0
    waiting = f"No run has begun in {later} yet: waiting for its first step  (Ctrl-C ends)\n"
    assert capsys.readouterr().out.startswith(f"{waiting}Watching {later}  (Ctrl-C ends)\n")
    assert watch.main([str(run), str(tmp_path / "never")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"No run has begun in {tmp_path}/never yet: it is left out\n")


def test_a_name_that_is_not_utf_8(tmp_path):
    folder = tmp_path / os.fsdecode(b"run-\xff")
    write_run(folder, 3, end=None)
    assert report_command.main([str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert "run-\N{REPLACEMENT CHARACTER}" in (tmp_path / "page.html").read_text()


# ---- over HTTP


@contextmanager
def serving(page):
    server = PageServer(page, 0)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def ask(server, path, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_one_file_is_served_at_a_random_path(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("one")
    with serving(page) as server, serving(page) as other:
        path = urlsplit(server.address).path
        assert server.server_address[0] == "127.0.0.1"
        assert len(path) > 20
        assert path != other.path
        answer, body = ask(server, path)
        assert (answer.status, body) == (200, b"one")
        assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'self'"
        page.write_text("two")
        assert ask(server, f"{path}?1")[1] == b"two"
        for wrong in ("/", path[:-1], f"{path}x", f"{path}../page.html", f"/{page}", other.path):
            assert ask(server, wrong)[0].status == 404, wrong
        for method in ("POST", "PUT", "DELETE", "X"):
            assert ask(server, path, method)[0].status == 501, method
        page.unlink()
        assert ask(server, path)[0].status == 404


# ---- in a browser


@pytest.mark.e2e
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("served", [False, True], ids=["file", "http"])
def test_an_open_page_follows(run, tmp_path, served):
    page = tmp_path / "page.html"

    def write(every=0.2):
        write_output({page: report_page(collect([run]), every=every).encode()})

    write()
    shown = "document.querySelector('[data-figure=step]').textContent"
    with serving(page) as server, browser(tmp_path / "profile") as tab:
        url = server.address if served else page.as_uri()
        tab.open(url, 500, height=400, dark=True)
        assert tab.evaluate(shown) == "120"
        assert tab.evaluate("document.documentElement.scrollWidth") == 500
        tab.evaluate("document.querySelector('[data-control=log]').click(); scrollTo(0, 700)")
        tab.evaluate("document.querySelector('[data-chart=loss] .chart').focus()")
        tab.evaluate("window.kept = charts[0].plot; zoomTo([50, 60])")
        place = tab.evaluate("scrollY")
        append(run, record(121, **{"loss/web": 3.0, "loss/code": 1.0, "expert_load_max": 1.25}))
        append(run, {"step": 121, "validation_loss": 2.5, "time": record(121)["time"]})
        write_samples(run, 121)
        write()
        tab.wait(f"{shown} === '121'")
        (expected,) = collect([run])["runs"]
        taken = json.loads(tab.evaluate("JSON.stringify(report.runs[0])"), parse_int=float)
        assert {key: taken[key] for key in expected} == expected
        assert "of step 121" in tab.evaluate("document.querySelector('.samples pre').textContent")
        assert tab.evaluate("[view.log, view.zoom, charts[0].plot === kept, scrollY]") == [
            True,
            [50, 60],
            True,
            place,
        ]
        assert (
            tab.evaluate("document.activeElement.closest('[data-chart]').dataset.chart") == "loss"
        )
        assert tab.evaluate("document.querySelector('.live').textContent").startswith("As of ")
        page.write_text("nonsense")
        tab.evaluate("data.written = 1; again()")
        tab.wait("live.problem.textContent.includes('still running?')")
        append(run, record(122))
        write(every=None)
        tab.wait(f"{shown} === '122'")
        tab.wait("live.problem.textContent.includes('has ended')")
        frames = tab.evaluate("document.querySelectorAll('iframe').length")
        assert frames == 0
        assert [one for one in tab.problems if not one.startswith(url)] == []


@pytest.mark.e2e
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_other_pages_can_not_read_it(run, tmp_path):
    """A page that frames it gets no data, even if it knows the address."""
    page = tmp_path / "page.html"
    write_output({page: report_page(collect([run]), every=1).encode()})
    with serving(page) as server, browser(tmp_path / "profile") as tab:
        thief = tmp_path / "thief.html"
        thief.write_text(
            "<script>window.stolen = []; onmessage = event => stolen.push(event.data)</script>"
            f"<iframe src='{server.address}?1' onload='window.loaded = true'></iframe>"
        )
        tab.open(thief.as_uri(), 500)
        tab.wait("window.loaded")
        assert tab.evaluate("stolen") == []
