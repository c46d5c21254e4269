"""`torchtitan runs` and `torchtitan report`: which runs are found, and what is said about them."""

import json
import os
import sys
import time

import pytest

from tests.short_runs import BEGAN, record, write, write_run
from torchtitan.commands import main
from torchtitan.tools.reports.noise import smooth
from torchtitan.tools.reports.plots import Line, lines_of, plot


def run(monkeypatch, capsys, *argv, status=0):
    monkeypatch.setattr(sys, "argv", ["torchtitan", *map(str, argv)])
    assert main() == status
    return capsys.readouterr()


def start(end, **more):
    return {
        "time": BEGAN,
        "last_seen": BEGAN + 60,
        "step": 2,
        "end": end,
        "ranks": 4,
        "layout": {"tp": 4},
    } | more


@pytest.fixture
def runs(tmp_path):
    """Runs in several states and depths, beside what is none."""
    out = tmp_path / "outputs"
    write_run(out, [record(1)])
    write_run(
        out / "grid" / "lr=1",
        [record(1), record(2, loss=3.0)],
        [start("completed")],
        "[optimizer]\nlr = 1.0\n",
    )
    write_run(
        out / "grid" / "lr=2",
        [record(1, loss=2.5)],
        [start("failed: no memory", last_seen=BEGAN + 99)],
        "[optimizer]\nlr = 2.0\n",
    )
    live = [start(None, last_seen=time.time())]
    write_run(
        out / "live",
        [record(3, loss=4.0, mfu=40.0)],
        live,
        "[training]\nsteps = 2000\n[optimizer]\nlr = 1\n",
    )
    write_run(out / "live" / "checkpoint" / "step-1", [record(1)])  # of no interest: a checkpoint
    (out / "empty").mkdir()
    (out / "grid" / "up").symlink_to(out)
    (out / "loop").symlink_to("loop")
    (out / "gone").symlink_to("nowhere")
    return out


def test_runs_are_found_once_each(runs, monkeypatch, capsys):
    said = run(monkeypatch, capsys, "runs", runs, runs / "grid", "--sort", "name", "--json")
    found = json.loads(said.out)
    assert [row["name"] for row in found] == [
        "outputs",
        "outputs/grid/lr=1",
        "outputs/grid/lr=2",
        "outputs/live",
    ]
    assert [row["state"] for row in found] == ["completed", "completed", "failed", "running"]
    assert [row["loss"] for row in found] == [10 - 1e-5, 3.0, 2.5, 4.0]
    assert [row["step"] for row in found] == [10, 2, 2, 3]
    assert found[3]["total_steps"] == 2000
    assert said.err == ""


def test_the_table(runs, monkeypatch, capsys):
    lines = run(
        monkeypatch, capsys, "runs", runs, "--sort", "loss", "--differences"
    ).out.splitlines()
    headings = (
        "run state step loss tokens/s MFU goodput last seen ranks layout training.steps "
        "optimizer.lr"
    )
    assert " ".join(lines[0].split()) == headings
    names = [line.split()[0] for line in lines[1:5]]
    assert names == ["outputs/grid/lr=2", "outputs/grid/lr=1", "outputs/live", "outputs"]
    assert lines[1].split()[1:4] == ["failed", "2", "2.5000"]
    assert lines[1].endswith("2.0")
    assert lines[-3] == "outputs/grid/lr=2: no memory"
    assert lines[3].split()[1:7] == ["running", "3/2,000", "4.0000", "500", "40.0%", "90.0%"]
    assert lines[-1] == "4 runs: 1 running, 2 completed, 1 failed"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--state", "running", "--state", "failed", "--sort", "state"],
            ["outputs/live", "outputs/grid/lr=2"],
        ),
        (["--state", "completed", "--sort", "step"], ["outputs", "outputs/grid/lr=1"]),
        (["--state", "completed", "--sort", "step", "--reverse"], ["outputs/grid/lr=1", "outputs"]),
        (["--state", "killed"], []),
        ([], ["outputs/live", "outputs", "outputs/grid/lr=2", "outputs/grid/lr=1"]),
    ],
)
def test_filter_and_order(runs, monkeypatch, capsys, options, expected):
    found = json.loads(run(monkeypatch, capsys, "runs", runs, "--json", *options).out)
    assert [row["name"] for row in found] == expected


def test_the_default_is_outputs(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs.parent)
    assert run(monkeypatch, capsys, "runs").out.endswith(
        "4 runs: 1 running, 2 completed, 1 failed\n"
    )
    monkeypatch.chdir(runs / "empty")
    assert "outputs: there is no such folder" in run(monkeypatch, capsys, "runs", status=1).err
    assert "no runs in . or below" in run(monkeypatch, capsys, "runs", ".", status=1).err


def test_a_folder_that_can_not_be_read(runs, monkeypatch, capsys):
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("grid"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    said = run(monkeypatch, capsys, "runs", runs, "--json")
    assert len(json.loads(said.out)) == 2
    assert said.err == f"warning: can't read 1 folder: {runs}/grid: Permission denied\n"


def test_names_do_not_control_the_terminal(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "a\x1b[2J\nb", [record(1)], [start("failed: \x1b]0;x\x07")])
    for command in ("runs", "report"):
        out = run(monkeypatch, capsys, command, tmp_path).out
        assert "a?[2J b" in out
        assert "?]0;x?" in out
        assert "\x1b" not in out


# ---- report


def test_report_of_one_run(tmp_path, monkeypatch, capsys):
    starts = [
        start("killed", last_seen=BEGAN + 3600, devices={"H100": 4}),
        start(
            "completed",
            time=BEGAN + 7200,
            last_seen=BEGAN + 7300,
            resumed_step=3,
            ranks=2,
            layout={"tp": 2},
        ),
    ]
    records = [record(step, memory_gib=70.0) for step in range(1, 6)] + [
        {"step": 5, "validation_loss": 4.5}
    ]
    folder = write_run(tmp_path / "a", records, starts)
    record_ = json.loads((folder / "run.json").read_text())
    record_["goodput"]["seconds"] = {"steps": 90, "restart": 3600}
    (folder / "run.json").write_text(json.dumps(record_))
    lines = run(monkeypatch, capsys, "report", folder).out.splitlines()
    assert lines[:3] == [
        "a  completed",
        "  step 5/100   5.00K tokens   loss 10.0000 (mean of the last 5 records)   "
        "validation loss 4.5000 (step 5)",
        "  500 tokens/s per device   70.0 GiB   tp 2",
    ]
    assert lines[3].startswith("  goodput 90.0%   2 starts   ended 20")
    assert lines[5].strip() == "loss, smoothed"
    at = lines.index("Time line of a")
    assert [line.split(maxsplit=2) for line in lines[at - 3 : at - 1]] == [
        ["steps", "1", "min 30 s, 2.4%"],
        ["restarts", "1", "h 00 min, 97.6%"],
    ]
    assert [" ".join(line.split()) for line in lines[at + 2 :]] == [
        "0 s started 0 4 ranks, tp 4",
        "1 h 00 min killed 2",
        "2 h 00 min resumed 3 2 ranks, tp 2 (changed)",
        "2 h 02 min completed 2",
    ]
    assert (
        json.loads(run(monkeypatch, capsys, "report", folder, "--json").out)["runs"][0]["name"]
        == "a"
    )


def test_like_events_share_a_line(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "a", [record(1)])
    events = [
        {"kind": "started", "step": 0},
        *({"kind": "saved", "step": 10 * i} for i in range(1, 4)),
    ]
    events += [
        kind
        for i in range(30, 90)
        for kind in ({"kind": "spike", "step": i}, {"kind": "skipped", "step": i})
    ]
    write(
        folder / "events.jsonl",
        [{"time": BEGAN + i, "message": f"m{i}"} | one for i, one in enumerate(events)],
    )
    lines = run(monkeypatch, capsys, "report", folder).out.splitlines()
    line = [" ".join(one.split()) for one in lines[lines.index("Time line of a") + 2 :]]
    assert line[0] == "0 s started 0 m0"
    assert line[1] == "82 more"
    assert line[-1] == "2 min 03 s skipped 89 m123"
    assert len(line) == 41
    write(
        folder / "events.jsonl",
        [{"time": BEGAN + i, "message": f"m{i}"} | one for i, one in enumerate(events[:5])],
    )
    assert (
        "  1.0 s  saved x 3  10 to 30  m3"
        in run(monkeypatch, capsys, "report", folder).out.splitlines()
    )


def test_report_of_several_runs(runs, monkeypatch, capsys):
    named = [runs / "grid" / f"lr={i}" for i in (1, 2, 1)]
    out = run(monkeypatch, capsys, "report", *named, "--plot", "loss", "--axis", "tokens").out
    assert "tokens per second" not in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "tokens" in lines
    assert lines[lines.index("differs lr=1 lr=2") + 1] == "optimizer.lr 1.0 2.0"
    last = lines.index("Differences, with 95 % confidence")
    text = "loss 7.5000 lower (noise unknown), over the last 0.0% of 1.00K tokens, 1 record"
    assert " ".join(lines[last + 1 :]) == f"lr=2 against lr=1: {text}"


def test_nothing_of_an_event_controls_the_terminal(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "a", [record(1)], [start("completed")])
    kind = "sa\x1b[2J\x07\N{RIGHT-TO-LEFT OVERRIDE}ved" + 500 * "x"
    write(folder / "events.jsonl", [{"time": BEGAN, "kind": kind, "step": 1, "message": kind}])
    out = run(monkeypatch, capsys, "report", folder).out
    assert "sa?[2J??ved" in out
    assert all(character.isprintable() for line in out.splitlines() for character in line)
    assert max(map(len, out.splitlines())) < 200


def test_report_refuses(runs, monkeypatch, capsys):
    assert (
        "no run here or below" in run(monkeypatch, capsys, "report", runs / "empty", status=1).err
    )
    said = run(monkeypatch, capsys, "report", runs, "--plot", "los", status=1).err
    assert "--plot: no run has the metric 'los'; they have loss, lr" in said
    for i in range(33):
        write_run(runs / "many" / str(i), [])
    assert (
        "too many for a report" in run(monkeypatch, capsys, "report", runs / "many", status=1).err
    )


def test_plots():
    xs = list(range(100))
    drawn = plot("loss", [Line("a", xs, [x / 50 for x in xs])], unit="step", width=60, color=False)
    lines = drawn.splitlines()
    assert lines[0].strip() == "loss"
    assert max(map(len, lines)) <= 60
    assert lines[2].split("┤")[0].strip() == "1.98"
    assert lines[-2].split() == ["0", "25", "50", "74", "99"]
    assert "\x1b" not in drawn
    assert "\x1b" in plot("loss", [Line("a", xs, xs)], unit="step", width=60, color=True)
    two = plot(
        "loss",
        [Line("a", xs, xs), Line("b", xs, [-x for x in xs])],
        unit="step",
        width=60,
        color=False,
    )
    assert two.count("+") > 20
    assert two.count("x") > 20
    assert plot("loss", [Line("a", xs, [None] * 100)], unit="step", width=60, color=False) is None
    assert plot("loss", [Line("a", [5], [1.0])], unit="hours", width=60, color=False)
    data = {
        "name": "a",
        "axes": {"step": xs, "flops": None},
        "metrics": {"loss": [float(x) for x in xs]},
    }
    assert lines_of([data], "loss", "step") == [
        Line("a", xs, smooth(data["metrics"]["loss"], 0.95))
    ]
    assert lines_of([data], "loss", "flops") == []
