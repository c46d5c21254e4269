"""Messages about a run, against a real server and real programs: also those that hang, fail and
never end.
"""

import json
import os
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.webhook import SECRET, Server
from torchtitan.config import resolve
from torchtitan.config.sections.metrics import Notifications
from torchtitan.telemetry import delivery, notify
from torchtitan.telemetry.delivery import DeliveryError, post
from torchtitan.telemetry.events import Events
from torchtitan.telemetry.notify import Notifier, RateLimit, report_error, report_failure
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.process import REPORTER_ENV


def event(kind, message="what happened", step=1200):
    return {"time": 1.0, "kind": kind, "step": step, "message": message}


def notifier(folder, **keys):
    return Notifier(Notifications(**{"interval_seconds": 1, "timeout_seconds": 1} | keys), folder)


@pytest.fixture
def webhook(monkeypatch):
    with Server() as server:
        monkeypatch.setenv("HOOK", server.url)
        yield server


def test_a_webhook_gets_the_chosen_events(tmp_path, webhook, caplog):
    one = notifier(tmp_path / "run-7", webhook_env="HOOK", events=["spike", "finished"])
    for kind in ("started", "saved", "preempted", "rewound", "finished", "failed"):
        one.listen(event(kind, "loss <!channel> 9 & more"))
    one.close()
    assert [(path, kind, body["text"]) for path, kind, body in webhook.got] == [
        (
            f"/services/{SECRET}",
            "application/json",
            f"run-7: {lead}loss &lt;!channel&gt; 9 &amp; more",
        )
        for lead in ("rewound at step 1,200: ", "")
    ]
    about = webhook.got[0][2]["event"]
    assert (about["kind"], about["step"], about["folder"], about["message"]) == (
        "rewound", 1200, str(tmp_path / "run-7"), "loss <!channel> 9 & more"
    )  # fmt: skip
    assert caplog.records == []


def test_the_end_is_said_once_with_the_loss(tmp_path):
    told = []
    events = Events(tmp_path, writes=True, continues=False, listeners=[told.append])
    events.end(8000, "completed", 4.92671)
    about = {"run": "llama", **told[0]}
    assert notify.message(about, 0) == "llama: Completed after step 8,000, loss 4.9267"
    assert about["kind"] == "finished"


def test_a_command_gets_the_event_without_a_shell(tmp_path):
    out = tmp_path / "out.json"
    code = (
        "import json, os, sys; names = 'KIND', 'STEP', 'TEXT'; "
        "json.dump([json.load(sys.stdin), sys.argv[2], *("
    )
    code += "os.environ['TORCHTITAN_EVENT_' + name] for name in names)], open(sys.argv[1], 'w'))"
    one = notifier(tmp_path / "run", command=[sys.executable, "-c", code, str(out), "$HOME; *"])
    one.listen(event("spike", "loss; rm -rf $(x)"))
    one.close()
    about, argument, *environment = json.loads(out.read_text())
    assert (about["kind"], about["message"], argument) == ("spike", "loss; rm -rf $(x)", "$HOME; *")
    assert environment == ["spike", "1200", "run: spike at step 1,200: loss; rm -rf $(x)"]


def test_nothing_that_hangs_or_fails_delays_or_stops_the_run(tmp_path, monkeypatch, caplog):
    """Each receiver is reported once, without the secret of the URL."""
    monkeypatch.setattr(delivery, "_ATTEMPTS", 1)
    mark = tmp_path / "child"
    never = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with Server(hangs=True) as server:
        monkeypatch.setenv("HOOK", server.url)
        one = notifier(
            tmp_path,
            webhook_env="HOOK",
            command=["sh", "-c", f'{sys.executable} -c "{never}"; true'],
        )
        one.config = one.config.model_copy(update={"timeout_seconds": 2})
        one.command.timeout = 2
        began = time.monotonic()
        for _ in range(1000):  # more than may wait
            one.listen(event("straggler"))
        assert time.monotonic() - began < 2, "it waited for a receiver"
        one.close(3)
    assert time.monotonic() - began < 60, "it waited for what the command started, or for all"
    told = [record.getMessage() for record in caplog.records]
    assert sorted(told) == [
        "notifications: command sh: killed after 2 s. The run continues; "
        "further failures are not reported",
        "notifications: webhook in HOOK: can't be reached: timed out. The run continues; "
        "further failures are not reported",
    ]
    if mark.exists():  # what the command started is gone, too
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(int(mark.read_text()))
            while child.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() - began < 120
                time.sleep(0.01)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["sh", "-c", "cat >/dev/null; echo no such user >&2; exit 3"],
            "exit status 3: no such user",
        ),
        (["sh", "-c", "exit 1"], "exit status 1"),
        (["/nowhere/mail"], "can't be run: No such file or directory"),
    ],
)
def test_a_command_that_fails_is_named_with_what_it_said(words, problem):
    with pytest.raises(DeliveryError) as error:
        delivery.Command(words, 5).run(event("spike", "x" * 100_000))
    assert str(error.value) == problem


def test_a_server_in_trouble_is_asked_again(monkeypatch):
    monkeypatch.setattr(delivery, "_PAUSE", 0.0)
    with Server(503, 429, 200) as server:
        post(server.url, {}, 5)
        assert len(server.got) == 3
    with (
        Server(404) as server,
        pytest.raises(DeliveryError, match=r"^the server answered HTTP 404$"),
    ):
        post(server.url, {}, 5)
    assert len(server.got) == 1
    with pytest.raises(DeliveryError, match="can't be reached: Connection refused"):
        post(server.url, {}, 5)


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://x/T0K3N", "T0K3N", "http://", "http://h/T0 K3N\n", "http://["],
)
def test_other_urls_are_refused_without_being_told(url):
    with pytest.raises(DeliveryError) as error:
        post(url, {}, 1)
    assert str(error.value) == "must be a URL that begins with https:// or http://"


# ---- how often


class Limits:
    def __init__(self, monkeypatch, folder, **keys):
        self.now = 1000.0
        self.limit = RateLimit(folder / "notifications.jsonl", Notifications(**keys))
        monkeypatch.setattr(notify.time, "time", lambda: self.now)

    def at(self, now, kind):
        self.now = now
        return self.limit.admit(event(kind))


def test_each_kind_is_sent_once_in_a_while(tmp_path, monkeypatch):
    limits = Limits(monkeypatch, tmp_path, interval_seconds=300)
    assert [limits.at(at, "spike") for at in (0, 100, 299, 300)] == [0, None, None, 2]
    assert limits.at(301, "straggler") == 0
    assert limits.at(302, "rewound") is None  # a kind of spike
    assert [limits.at(at, "finished") for at in (303, 304)] == [0, 0]


def test_all_kinds_together_are_limited_but_not_the_end(tmp_path, monkeypatch):
    limits = Limits(monkeypatch, tmp_path, interval_seconds=1, max_per_hour=3)
    assert [limits.at(at, "spike") for at in (0, 10, 20, 30)] == [0, 0, 0, None]
    assert [limits.at(100, kind) for kind in ("resumed", "failed", "finished")] == [None, 0, 0]
    assert limits.at(3700, "spike") == 1


def test_a_run_that_fails_in_a_loop_is_many_processes(tmp_path, monkeypatch):
    """They share the limit, whatever else the file holds; several ranks and nodes report one
    failure.
    """
    (tmp_path / "notifications.jsonl").write_bytes(
        b'\xff\n{"time": "x", "kind": 1}\n[]\n{"time": 1'
    )
    (tmp_path / "notifications.jsonl").open("a").write("\n")
    found = [
        Limits(monkeypatch, tmp_path, interval_seconds=1).at(at, "failed") for at in (0, 0, 5, 100)
    ]
    assert found == [0, None, None, 2]


def test_messages_say_how_many_were_left_out(tmp_path, webhook):
    one = notifier(tmp_path / "run", webhook_env="HOOK")
    (tmp_path / "run").mkdir()
    left_out = {"time": time.time(), "kind": "spike", "sent": False}
    (tmp_path / "run/notifications.jsonl").write_text(2 * (json.dumps(left_out) + "\n"))
    one.listen(event("spike"))
    one.close()
    assert [body["text"] for _, _, body in webhook.got] == [
        "run: spike at step 1,200: what happened (2 more since the last message)"
    ]


# ---- failures, and what is refused before a start


def config(folder, *flags):
    return resolve(
        [f"--job.dump_folder={folder}", "--notifications.webhook_env=HOOK", *flags], 1
    ).config


def test_a_failure_is_sent_once_by_who_knows_the_cause(tmp_path, webhook, monkeypatch):
    monkeypatch.setattr(notify, "_CAUSE_FIRST_SECONDS", 0)
    run = config(tmp_path)
    (tmp_path / "run.json").write_text('{"starts": [{"step": 40}]}')
    report_error(run, KeyboardInterrupt())
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    report_error(run, RuntimeError("Connection closed by peer"))  # not rank 0, not the cause
    monkeypatch.setenv(REPORTER_ENV, str(os.getppid()))
    report_error(run, UserError("the launcher tells it"))
    monkeypatch.delenv(REPORTER_ENV)
    assert webhook.got == []
    report_error(run, UserError("the data can't be read"))
    monkeypatch.setenv("RANK", "0")
    report_error(run, RuntimeError("Connection closed by peer"))
    report_failure(run, "another launcher")
    assert [body["text"] for *_, body in webhook.got] == [
        f"{tmp_path.name}: failed at step 40: the data can't be read"
    ]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            None,
            "notifications.webhook_env: the environment variable 'HOOK' is not set; set "
            "it to the URL",
        ),
        (
            f"slack/{SECRET}",
            "notifications.webhook_env: the environment variable 'HOOK' must be a URL that begins",
        ),
    ],
)
def test_a_receiver_that_cannot_work_is_refused_at_the_start(tmp_path, monkeypatch, value, problem):
    monkeypatch.delenv("HOOK", raising=False)
    if value:
        monkeypatch.setenv("HOOK", value)
    with pytest.raises(ConfigError) as error:
        preflight(config(tmp_path, "--notifications.command=/nowhere/mail"))
    assert error.value.problems[0].startswith(problem)
    assert (
        error.value.problems[1]
        == "notifications.command: no program '/nowhere/mail' that can be run"
    )
    assert SECRET not in str(error.value)


def test_a_webhook_that_hangs_takes_no_time_from_the_command(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with Server(hangs=True) as server:
        monkeypatch.setenv("HOOK", server.url)
        one = notifier(
            tmp_path,
            webhook_env="HOOK",
            command=["sh", "-c", f"cat > {out}.part; mv {out}.part {out}"],
            timeout_seconds=60,
        )
        one.send(event("failed"))
        deadline = time.monotonic() + 30
        while not out.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        one.close(0)
    assert json.loads(out.read_text())["kind"] == "failed"
