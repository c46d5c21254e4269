"""The server of `torchtitan watch`: what it sends while runs train, to whom, and what it
refuses.
"""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.browser import CHROMIUM, browser
from tests.run_folders import append, record, write_run, write_samples, write_scores
from tests.watching import ask, report_of, updates, wait
from torchtitan.commands import report as report_command
from torchtitan.commands import watch
from torchtitan.tools.reports import live as live_module
from torchtitan.tools.reports import serve
from torchtitan.tools.reports.collect import collect
from torchtitan.tools.reports.live import Live
from torchtitan.tools.reports.serve import Server, close, serving
from torchtitan.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", 120, end=None)


# ---- what is new


def test_updates_hold_what_is_new(run, monkeypatch):
    live = Live([run])
    at, (shown,) = report_of(live)
    assert shown["axes"]["step"][-1] == 120
    assert updates(live, at)["runs"] == []
    monkeypatch.setattr(live_module, "read_runs", None)  # no file is read as a whole again
    append(
        run,
        record(121),
        {"step": 121, "validation_loss": 2.5, "time": record(121)["time"]},
        record(122),
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 123, "lo')
    with (run / "events.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"time": record(122)["time"], "kind": "saved", "step": 122, "message": "Saved"}
            )
            + "\n"
        )
    news = updates(live, at)
    ((index, more),) = news["runs"]
    assert (index, more["head"]["step"], more["head"]["latest"]["loss"]) == (
        0,
        122,
        record(122)["loss"],
    )
    assert more["axes"]["step"][-2:] == [121, 122]
    assert len(more["axes"]["step"]) <= 4
    assert more["validation"][""]["loss"] == [2.5]
    assert [event["step"] for event in more["events"]] == [122]
    assert updates(live, news["at"])["runs"] == []
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 2.25}\n')  # the rest of the line
    ((_, more),) = updates(live, news["at"])["runs"]
    assert more["axes"]["step"][-1] == 123
    assert more["metrics"]["loss"][-1] == 2.25
    assert len(updates(live, at)["runs"]) == 2  # another reader gets all


@pytest.mark.parametrize("change", ["rewind", "vanish", "another run", "log", "age", "scores"])
def test_what_is_not_appended_is_read_again(run, change, monkeypatch):
    live = Live([run])
    at, _ = report_of(live)
    if change == "rewind":  # as JsonlSink does
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "new").write_text("".join(line for line in lines if json.loads(line)["step"] <= 60))
        (run / "new").rename(run / "metrics.jsonl")
    elif change == "vanish":
        shutil.rmtree(run)
    elif change == "another run":
        record_of_run = json.loads((run / "run.json").read_text())
        record_of_run["starts"][0]["time"] += 1000
        (run / "run.json").write_text(json.dumps(record_of_run))
    elif change == "scores":
        write_scores(run, 50, 0.5)  # of an earlier checkpoint than the last one shown
    else:
        monkeypatch.setattr(
            live_module, *{"log": ("_LOG_BYTES", 10), "age": ("MOST_SECONDS", 0.0)}[change]
        )
        append(run, record(121))
    assert updates(live, at) == {"reload": True}
    again, (shown,) = report_of(live)
    last = shown["axes"]["step"][-1:]
    kept = {"rewind": [60], "vanish": [], "another run": [120], "scores": [120]}
    assert last == kept.get(change, [121])
    assert updates(live, again)["runs"] == []
    if change == "scores":
        assert shown["evals"]["arc_easy/acc (torchtitan eval)"]["step"] == [50]
    if change == "vanish":
        write_run(run, 10, end=None)
        assert updates(live, again) == {"reload": True} or updates(live, again)["runs"]


@pytest.mark.parametrize("after", ["", "-", "x-0", "-1", "0", "9" * 5000, "²-²"])
def test_an_unknown_place_is_read_again(run, after):
    live = Live([run])
    at, _ = report_of(live)
    assert updates(live, after) == updates(live, at.replace("-0", "-9")) == {"reload": True}


# ---- to whom


@pytest.fixture
def server(run):
    with serving(Server(Live([run]), ("127.0.0.1", 0))) as started:
        yield started


def test_only_what_the_page_needs_is_answered(server, run):
    answer, body = ask(server)
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert b"uPlot" in body
    answer, body = ask(server, "/data")
    assert json.loads(body)["report"]["runs"][0]["path"] == str(run)
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    _, body = ask(server, "/window?run=0&first=10&last=19&points=100")
    assert json.loads(body)["axes"]["step"] == list(range(10, 20))
    for path in (
        "/run.json",
        f"/..{run}/run.json",
        f"/{run}",
        "/data/",
        "//etc/passwd",
        "/%2e%2e/x",
        "/window?run=1",
    ):
        assert ask(server, path)[0].status in (400, 404), path
    for query in ("run=1", "run=-1", "run=x", "run=9" + "0" * 30, "run="):
        assert ask(server, f"/window?first=1&last=2&points=9&{query}")[0].status == 400, query
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "X"):
        assert ask(server, method=method)[0].status == 405, method
    answer, body = ask(server, method="HEAD")
    assert (answer.status, body) == (200, b"")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:9999", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
        ("[", 403),
        ("localhost@x", 403),
    ],
)
def test_pages_that_rebind_names_are_refused(server, host, status):
    assert ask(server, "/data", host=host)[0].status == status


def test_a_token_is_needed_elsewhere(run, capfd):
    options = watch.parser().parse_args([str(run), "--host", "0.0.0.0", "--port", "0"])
    started, where = watch._serve(options)
    with serving(started):
        token = where.partition("?token=")[2]
        assert len(token) > 40
        for path in (
            "/",
            "/data",
            "/updates",
            "/data?token=",
            "/data?token=x",
            f"/data?token={token[:-1]}",
        ):
            assert ask(started, path, host="node7:8787")[0].status == 401, path
        answer, _ = ask(started, f"/?token={token}", host="node7:8787")
        assert (answer.status, answer.headers["Location"]) == (303, "./")
        cookie, _, rules = answer.headers["Set-Cookie"].partition("; ")
        assert rules == "HttpOnly; SameSite=Lax; Path=/"
        assert (
            ask(started, "/data", host="node7:8787", Cookie=f"other=1; {cookie}")[0].status == 200
        )
        assert ask(started, "/data", host="node7:8787", Cookie=cookie[:-1])[0].status == 401
        assert ask(started, "/data", host="node7:8787", Cookie=";;=\x01")[0].status == 401
        many = "/data?" + "&".join(f"a{i}=1" for i in range(9))
        for path in (many, "http://["):
            assert ask(started, path, host="node7:8787")[0].status == 401, path
            assert ask(started, path, host="node7:8787", Cookie=cookie)[0].status == 400, path
    assert capfd.readouterr().err == ""


def test_a_socket_is_its_owners(run, tmp_path):
    path = tmp_path / "watch.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # left behind by a server that was killed
    with serving(Server(Live([run]), path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost:8787\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        with pytest.raises(UserError, match="another server uses it"):
            Server(Live([run]), path)
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(UserError, match="no socket"):
        Server(Live([run]), path)
    assert path.read_text() == "precious"


def test_slow_and_many_clients_are_cut_off(run, monkeypatch):
    passed = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    monkeypatch.setattr(serve, "time", clock)
    threads = threading.active_count()
    with serving(Server(Live([run]), ("127.0.0.1", 0))) as server:
        clients = [
            socket.create_connection(server.server_address) for _ in range(serve.CONNECTIONS)
        ]
        try:
            while len(server._deadlines) < serve.CONNECTIONS:
                time.sleep(0.01)
            assert ask(server)[0].status == 503
            assert threading.active_count() <= threads + 1 + serve.CONNECTIONS
            passed = serve.DEADLINE_SECONDS
            for client in clients:
                client.settimeout(5)
                assert client.recv(10) == b""  # cut off
            while server._deadlines:
                time.sleep(0.01)
            assert ask(server)[0].status == 200
        finally:
            for client in clients:
                client.close()


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["{file}"], "not a folder"),
        (["{run}", "--socket", "{run}/s", "--port", "1"], "--socket takes no --port"),
        (["{run}", "--host", "203.0.113.7"], "can't listen there"),
        (["{run}", "--port", "{taken}"], "can't listen there"),
        (["{run}", "--socket", "{run}/no/such"], "can't listen there"),
    ],
)
def test_mistakes_are_explained(run, tmp_path, argv, error):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"run": run, "file": run / "run.json", "taken": taken.getsockname()[1]}
        with pytest.raises(UserError, match=error):
            watch._serve(watch.parser().parse_args([word.format(**names) for word in argv]))


def test_a_run_that_has_not_begun_is_waited_for(run, tmp_path, monkeypatch, capsys):
    """Its folder may not exist yet; nor is it refused beside a run that has begun."""
    later = tmp_path / "later"
    monkeypatch.setattr(watch.time, "sleep", lambda _: write_run(later, 3, end=None))
    server, _ = watch._serve(watch.parser().parse_args([str(later), "--port", "0"]))
    close(server)
    said = f"No run has begun in {later} yet: waiting for its first step  (Ctrl-C ends)\n"
    assert capsys.readouterr().out == said
    assert [shown["name"] for shown in report_of(server.live)[1]] == ["later"]
    server, _ = watch._serve(
        watch.parser().parse_args([str(run), str(tmp_path / "never"), "--port", "0"])
    )
    close(server)
    assert capsys.readouterr().out == f"No run has begun in {tmp_path}/never yet: it is left out\n"


def test_a_name_that_is_not_utf_8(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"run-\xff")
    write_run(folder, 3, end=None)
    server = Server(Live([folder]), ("127.0.0.1", 0))
    with serving(server):
        assert "run-\N{REPLACEMENT CHARACTER}" in ask(server)[1].decode()
        assert report_of(server.live)[1][0]["name"] == "run-\N{REPLACEMENT CHARACTER}"
    assert report_command.main([str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert "run-\N{REPLACEMENT CHARACTER}" in (tmp_path / "page.html").read_text()


@pytest.mark.e2e
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_it_ends_cleanly(run, tmp_path, number):
    path = tmp_path / "s"
    command = [sys.executable, "-m", "torchtitan", "watch", str(run), "--socket", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [process.stdout.readline() for _ in range(2)]
    assert lines[0] == f"Watching {run} at {path}  (Ctrl-C ends)\n"
    assert f"ssh -L 8787:{path} " in lines[1]
    process.send_signal(number)
    assert process.communicate(timeout=20)[0] == "ended\n"
    assert process.returncode == 0
    assert not path.exists()


# ---- in a browser


@pytest.mark.e2e
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_follows_a_run(run, server, tmp_path):
    url = f"http://127.0.0.1:{server.server_address[1]}/"

    def follow(tab):
        tab.evaluate("follow().then(follow)")  # the first may have been asked before
        (expected,) = collect([run])["runs"]
        shown = json.loads(tab.evaluate("JSON.stringify(report.runs[0])"))
        for axis, values in expected["axes"].items():
            assert shown["axes"][axis] == pytest.approx(values), axis
        for key in (
            "metrics",
            "validation",
            "evals",
            "sources",
            "experts",
            "samples",
            "events",
            "starts",
            "latest",
            "step",
        ):
            assert shown[key] == expected[key], key
        return tab.evaluate("document.querySelector('[data-figure=step]').textContent")

    with browser(tmp_path / "profile") as tab:
        tab.open(url, 500, dark=True)
        wait(tab, "parts && charts.length > 8")
        assert tab.evaluate("document.documentElement.scrollWidth") == 500
        tab.evaluate("clearTimeout(live.timer)")
        chart = tab.evaluate("(window.kept = charts[0].plot, charts[0].key)")
        assert chart == "loss"
        more = {"loss/web": 3.0, "loss/code": 1.0, "expert_load_max": 1.25, "expert_entropy": 0.9}
        for step in (121, 122):
            validation = {
                "step": step,
                "validation_loss": 2.5,
                "validation_loss/wiki": 3.5,
                "time": record(step)["time"],
            }
            append(run, record(step, **more), validation, {"step": step, "eval/arc_easy/acc": 0.5})
            write_samples(run, step)
            assert follow(tab) == str(step)
        assert "of step 122" in tab.evaluate("document.querySelector('.samples pre').textContent")
        tab.evaluate("document.querySelector('[data-chart=loss] .chart').focus()")
        append(run, record(123, extra=1.5, **more))
        assert follow(tab) == "123"
        assert tab.evaluate(
            "document.activeElement.closest('[data-chart]')?.dataset.chart || "
            "document.activeElement.tagName"
        )
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "new").write_text("".join(line for line in lines if json.loads(line)["step"] <= 100))
        (run / "new").rename(run / "metrics.jsonl")  # a rewind
        tab.evaluate("follow().then(follow)")  # the first may have been asked before
        assert follow(tab) == "120"  # the start's
        assert tab.evaluate("charts[0].plot.data[0].at(-1)") == 100
        assert [one for one in tab.problems if not one.startswith(url)] == []
        server.shutdown()
        close(server)
        tab.evaluate("follow().then(follow)")  # the first may have been asked before
        assert tab.evaluate("live.status.textContent").startswith(
            "Not live: the server can't be reached"
        )
