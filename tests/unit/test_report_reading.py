"""Reading the folders of runs: curves equal to the files', at a cost that doesn't grow with
them.
"""

import json
import os
import tracemalloc
from itertools import pairwise
from random import Random

import pytest

from tests.short_runs import BEGAN, collected, record, write, write_run
from torchtitan.tools.reports import collect as report
from torchtitan.tools.reports import lines as lines_module
from torchtitan.tools.reports.lines import JsonLines


def test_a_short_run_is_shown_whole(tmp_path):
    records = [
        record(1),
        record(2, **{"loss/web": 3.5, "expert_load_max": 1.5, "expert_entropy": 0.9}),
        {
            "step": 2,
            "validation_loss": 5.5,
            "validation_loss/wiki": 6.5,
            "validation_tokens": 7,
            "time": BEGAN + 90,
        },
        {"step": 2, "eval/arc/acc": 0.25, "eval/arc/acc_stderr": 0.02, "time": BEGAN + 95},
        record(3),
    ]
    run = collected(write_run(tmp_path / "a", records))
    assert (run["name"], run["step"], run["total_steps"], run["sampled"], run["state"]) == (
        "a",
        10,
        100,
        1,
        "completed",
    )
    assert run["axes"] == {
        "step": [1, 2, 3],
        "tokens": [1000, 2000, 3000],
        "hours": [61 / 3600, 62 / 3600, 63 / 3600],
        "flops": [1000 * 3e12 / 500, 2000 * 3e12 / 500, 3000 * 3e12 / 500],
    }
    assert run["metrics"]["loss"] == [one["loss"] for one in records if "loss" in one]
    assert run["metrics"]["mfu"] == [None] * 3
    assert run["validation"] == {
        "": {"step": [2], "loss": [5.5], "tokens": [2000], "hours": [90 / 3600]},
        "wiki": {"step": [2], "loss": [6.5], "tokens": [2000], "hours": [90 / 3600]},
    }
    assert run["evals"] == {"arc/acc": {"step": [2], "value": [0.25], "error": [0.02]}}
    assert run["sources"] == {"web": {"step": [2], "loss": [3.5]}}
    assert run["experts"] == {"step": [2], "load_max": [1.5], "entropy": [0.9]}


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Runs of 20,000 and 80,000 steps, each with 80 validations."""
    folder = tmp_path_factory.mktemp("long")
    for name, steps in (("short", 20_000), ("long", 80_000)):
        freq = steps // 80
        records = []
        for step in range(1, steps + 1):
            records += [record(step)] + (
                [] if step % freq else [{"step": step, "validation_loss": step / 7}]
            )
        write_run(folder / name, records, config=f"[validation]\nenable = true\nfreq = {freq}\n")
    return folder


def test_a_long_run_is_thinned_evenly(long):
    run = collected(long / "long", points=400)
    steps = run["axes"]["step"]
    assert (steps[0], steps[-1]) == (1, 80_000)
    assert 380 <= len(steps) <= 400
    assert run["sampled"] == pytest.approx(200, rel=0.05)
    gaps = [b - a for a, b in pairwise(steps)]
    assert max(gaps) < 1.2 * run["sampled"]
    assert min(gaps[:-1]) > 0.8 * run["sampled"]
    assert run["metrics"]["loss"] == [10 - step / 10**5 for step in steps]
    assert run["latest"]["loss"] == 10 - 0.8
    checks = run["validation"][""]
    assert checks["step"] == list(range(1000, 80_001, 1000))
    assert checks["loss"] == [step / 7 for step in checks["step"]]
    assert checks["tokens"] == [1000 * step for step in checks["step"]]


def test_the_cost_does_not_grow_with_the_file(long, monkeypatch):
    sizes = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: sizes.append(len(data := pread(*args))) or data)

    def cost(action, name):
        sizes.clear()
        action(long / name)
        return sum(sizes)

    size = (long / "long" / "metrics.jsonl").stat().st_size
    for action in (
        lambda f: report.collect([f], points=100),
        lambda f: report.window(f, 15_000, 15_010, 50),
    ):
        few = cost(action, "short")
        many = cost(action, "long")
        assert many < 2**21 < size / 4
        assert many < 1.2 * few + 2**15  # and two steps more of a search


def test_a_window_shows_every_record(long):
    zoomed = report.window(long / "long", 41_000, 41_020)
    assert zoomed["axes"]["step"] == list(range(41_000, 41_021))
    assert zoomed["axes"]["hours"][0] == 41_060 / 3600
    assert zoomed["sampled"] == 1
    wide = report.window(long / "long", 1000, 60_999, 100)
    assert (wide["axes"]["step"][0], wide["axes"]["step"][-1]) == (1000, 60_999)
    assert wide["sampled"] == pytest.approx(600, rel=0.05)
    assert report.window(long / "long", 10**6, 2 * 10**6)["axes"]["step"] == []


@pytest.mark.parametrize("step", [0, 1, 2, 249, 250, 251, 19_999, 20_000, 20_001])
def test_search_by_step(long, step):
    path = long / "short" / "metrics.jsonl"
    with JsonLines(path) as lines:
        place = next(lines.places(lines.find(step)), None)
    expected = next(
        (json.loads(line) for line in path.open() if json.loads(line)["step"] >= step), None
    )
    assert (place and (place.step, place.record.get("loss"))) == (
        expected and (expected["step"], expected["loss"])
    )


def test_hours_and_tokens_continue_across_restarts(tmp_path):
    day = 86_400
    starts = [
        {
            "time": BEGAN,
            "last_seen": BEGAN + 70,
            "resumed_step": 0,
            "step": 9,
            "end": "preempted",
            "layout": {"tp": 2},
        },
        {
            "time": BEGAN + day,
            "last_seen": BEGAN + day + 9,
            "resumed_step": 5,
            "step": 7,
            "end": "failed: no memory",
        },
    ]
    records = [record(step) for step in range(1, 6)] + [
        record(6, time=BEGAN + day + 36),
        record(7, time=BEGAN + day),
    ]
    run = collected(write_run(tmp_path / "a", records, starts))
    assert run["axes"]["hours"][4:] == [
        65 / 3600,
        24.01,
        24.01,
    ]  # a clock that was set back doesn't turn the axis
    assert run["axes"]["tokens"] == [1000 * step for step in range(1, 8)]
    assert (run["state"], run["message"]) == ("failed", "no memory")
    assert [
        (s["hours"], s["last_seen_hours"], s["resumed_step"], s["layout"]) for s in run["starts"]
    ] == [(0, 70 / 3600, 0, {"tp": 2}), (24, 24 + 9 / 3600, 5, {})]


# ---- files that are being written, damaged or hostile


def test_what_was_trained_again_replaces_what_was_recorded_before(tmp_path):
    records = [record(1), record(2), record(3), record(2, loss=7.0), record(3, loss=8.0)]
    run = collected(write_run(tmp_path / "a", records))
    assert (run["axes"]["step"], run["metrics"]["loss"]) == ([1, 2, 3], [10 - 1e-5, 7.0, 8.0])


def test_a_line_that_is_being_written_does_not_count_yet(tmp_path):
    path = write_run(tmp_path / "a", [record(1), record(2)]) / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole) // 2 + 2, len(whole)):
        path.write_bytes(whole[:cut])
        assert collected(tmp_path / "a")["axes"]["step"] == [1]


def test_a_file_that_is_replaced_or_cut_while_it_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, map(record, range(1, 1001)))
    with JsonLines(path) as lines:
        places = lines.places()
        assert next(places).step == 1
        write(tmp_path / "new", [record(1)])
        os.replace(tmp_path / "new", path)  # as a rewind does
        assert [place.step for place in places] == list(range(2, 1001))
    write(path, map(record, range(1, 1001)))
    with JsonLines(path) as lines:
        os.truncate(path, 1000)
        assert len(list(lines.places())) < 10
        assert [place.step for place in lines.last(lambda _: True)] == [7]
        assert lines.find(500) == lines.size


@pytest.mark.parametrize("seed", range(8))
def test_any_part_of_any_file(tmp_path, seed, monkeypatch):
    """Against splitting the whole file, with blocks and limits so small that every line crosses
    some.
    """
    monkeypatch.setattr(lines_module, "_BLOCK", 16)
    monkeypatch.setattr(lines_module, "METRICS_LINE_BYTES", 100)
    random = Random(seed)
    step = 0
    content = []
    for _ in range(120):
        step += random.choice([0, 1, 1, 2, 50])
        padding = random.choice([0, 0, 5, 30, 300])  # the last makes a line too long
        junk = random.choice([b"", b"x" * 99, b"{" * 250])
        content.append(
            json.dumps({"step": step, "x": "y" * padding}).encode()
            if random.random() < 0.8
            else junk
        )
    data = b"\n".join([*content, b'{"step": 10'])
    (tmp_path / "lines").write_bytes(data)
    expected = []
    begin = 0
    for line in content:
        if line.startswith(b'{"') and len(line) <= 100:
            expected.append((begin, begin + len(line) + 1, json.loads(line)["step"]))
        begin += len(line) + 1
    with JsonLines(tmp_path / "lines") as lines:
        for first in range(0, len(data), 7):
            after = random.choice([None, first + 200])
            found = [
                (place.begin, place.end, place.step)
                for place in lines.places(first, after, reach=10**6)
            ]
            assert found == [
                one for one in expected if one[0] >= first and (after is None or one[0] < after)
            ]
        for wanted in range(0, step + 5, 3):
            assert lines.find(wanted) == next(
                (begin for begin, _, at in expected if at >= wanted), lines.size
            )
        last = lines.last(lambda record: True, 3)
        assert [place.step for place in last] == [
            at for _, _, at in expected[len(expected) - len(last) :]
        ]


HOSTILE = [
    b"",
    b"null",
    b"[]",
    b"1",
    b"{}",
    b'{"step": "1"}',
    b'{"step": -1}',
    b'{"step": true}',
    b'{"step": 1e3}',
    b'{"step": null}',
    b'{"step": 2' + b"0" * 50 + b"}",
    b'{"step": ' + b"9" * 5000 + b"}",
    b"[" * 10**5,
    b"\xff\xfe",
    b'{"step": 4, "loss": 1'
    + b"0" * 400
    + b', "lr": 1e999, "tokens": [1], "time": "x", "mfu": {}}',
    b'{"step": 5, "loss": NaN, "lr": true, "tokens": -Infinity, "tflops": 1, "tokens_per_second": 0}',  # noqa: E501
    b'{"step": 6, "loss": null, ' + b", ".join(b'"k%d": 1' % i for i in range(20_000)) + b"}",
    b"\0" * 3000,
]


def test_lines_that_are_no_records(tmp_path):
    path = write_run(tmp_path / "a", []) / "metrics.jsonl"
    path.write_bytes(
        b"\n".join([json.dumps(record(1)).encode(), *HOSTILE, json.dumps(record(7)).encode(), b""])
    )
    run = collected(tmp_path / "a")
    assert run["axes"]["step"] == [1, 4, 5, 6, 7]
    assert run["metrics"]["loss"] == [10 - 1e-5, None, None, None, 10 - 7e-5]
    assert run["axes"]["tokens"] == [1000, 1000, 1000, 1000, 7000]
    assert run["metrics"]["lr"] == [0.001, None, None, None, 0.001]
    assert len(run["metrics"]) < 1100


@pytest.mark.parametrize("filler", ["zeros", "lines"])
def test_a_gigabyte_that_is_no_record(tmp_path, filler, monkeypatch):
    path = write_run(tmp_path / "a", [record(1), record(2)]) / "metrics.jsonl"
    if filler == "zeros":  # one line, of a file with a hole
        os.truncate(path, 2**30)
        end = b"\n"
    else:
        monkeypatch.setattr(lines_module, "METRICS_READ_BYTES", 2**23)
        end = b"{\n" * 2**22
    with path.open("ab") as file:
        file.write(end + json.dumps(record(9)).encode() + b"\n")
    tracemalloc.start()
    run = collected(tmp_path / "a", points=200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**20
    assert run["axes"]["step"][0] == 1
    assert run["axes"]["step"][-1] == 9 or filler == "lines"


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "config.toml", "events.jsonl", "guard.jsonl", ".lock"]
)
@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[" * 10**5, b'{"starts": [[1], {"time": "x"}], "goodput": 3}\n', None],
)
def test_other_files_may_be_damaged(tmp_path, name, content):
    folder = write_run(tmp_path / "a", [record(1)])
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if content is None else (folder / name).write_bytes(content)
    run = collected(folder)
    assert run["axes"]["step"] == ([] if name == "metrics.jsonl" else [1])
    assert run["state"] == ("unknown" if name == "run.json" else "completed")
