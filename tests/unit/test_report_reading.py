"""Reading the folders of runs: curves equal to the files', in little memory."""

import json
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.short_runs import BEGAN, collected, record, write, write_run
from torchtitan.tools.reports import records as records_module
from torchtitan.tools.reports.records import MetricsRecord, last_training, read_records
from torchtitan.tools.reports.series import ThinnedRecords


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


@pytest.mark.parametrize("steps", [800, 801, 20_000])
def test_a_long_run_is_thinned_evenly(tmp_path, steps):
    records = []
    for step in range(1, steps + 1):
        checked = step % 250 == 0
        records += [record(step)] + [{"step": step, "validation_loss": step / 7}] * checked
    run = collected(write_run(tmp_path / "a", records), points=400)
    every = {800: 1, 801: 2, 20_000: 32}[steps]
    assert run["sampled"] == every
    assert run["axes"]["step"] == sorted({*range(1, steps + 1, every), steps})
    assert run["metrics"]["loss"] == [10 - step / 10**5 for step in run["axes"]["step"]]
    assert run["latest"]["loss"] == 10 - steps / 10**5
    checks = run["validation"][""]
    assert checks["step"] == list(range(250, steps + 1, 250))
    assert checks["loss"] == [step / 7 for step in checks["step"]]
    assert checks["tokens"] == [1000 * step for step in checks["step"]]


@given(st.lists(st.integers(0, 40), max_size=200), st.integers(1, 5))
def test_thinned_records_are_those_that_count(steps, points):
    """No step twice, nothing that was trained again, and the last one always."""
    thinned = ThinnedRecords(points)
    counting: list[int] = []
    for i, step in enumerate(steps):
        thinned.add(MetricsRecord(step, {"i": i}))
        counting = [one for one in counting if one < step] + [step]
    left = [one.step for one in thinned.records()]
    assert left == sorted(set(left) & set(counting))
    assert left[-1:] == counting[-1:]
    assert len(left) <= 2 * points + 1
    assert all(steps[one.values["i"]] == one.step for one in thinned.records())


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
    records = read_records(path)
    assert next(records).step == 1
    write(tmp_path / "new", [record(1)])
    os.replace(tmp_path / "new", path)  # as a rewind does
    assert [one.step for one in records] == list(range(2, 1001))
    write(path, map(record, range(1, 1001)))
    records = read_records(path)
    assert next(records).step == 1
    os.truncate(path, 1000)
    assert len(list(records)) < 1000


def test_lines_that_are_too_long_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(records_module, "METRICS_LINE_BYTES", 100)
    lengths = {2: 98, 3: 99, 4: 100, 5: 101, 6: 200, 7: 1000, 8: 98}
    content = b""
    for step, length in lengths.items():
        line = json.dumps({"step": step, "x": ""}).encode()
        content += line[:-2] + b"y" * (length - len(line)) + b'"}\n'
    (tmp_path / "lines").write_bytes(content)
    assert [one.step for one in read_records(tmp_path / "lines")] == [2, 3, 8]


def test_the_last_training_record(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, [record(1), record(2), {"step": 2, "validation_loss": 1.0}])
    with path.open("a") as file:
        file.write('{"step": 3, "loss"')
    assert last_training(path).step == 2
    monkeypatch.setattr(records_module, "METRICS_TAIL_BYTES", 100)
    assert last_training(path) is None
    write(path, [record(7)] * 9 + [{"step": 8, "loss": 1.0}])
    assert last_training(path).step == 8


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


def test_a_gigabyte_without_a_line(tmp_path):
    path = write_run(tmp_path / "a", [record(1), record(2)]) / "metrics.jsonl"
    os.truncate(path, 2**30)  # zeros
    with path.open("ab") as file:
        file.write(b"\n" + json.dumps(record(9)).encode() + b"\n")
    tracemalloc.start()
    run = collected(tmp_path / "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**20
    assert run["axes"]["step"] == [1, 2, 9]


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "config.toml", "events.jsonl", ".lock"]
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
