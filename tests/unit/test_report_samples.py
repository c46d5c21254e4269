"""Samples and scores of checkpoints, read from the files of a run."""

import json
import math

import pytest

from tests.run_folders import PROMPTS, write_run, write_samples, write_scores
from torchtitan.commands.report import main
from torchtitan.telemetry.history import History
from torchtitan.telemetry.scores import record_scores, run_of
from torchtitan.telemetry.trackers.jsonl import JsonlSink
from torchtitan.tools.reports import samples as samples_module
from torchtitan.tools.reports.collect import collect
from torchtitan.tools.reports.samples import read_samples
from torchtitan.tools.reports.scores import read_scores


def test_texts_by_prompt_in_the_order_of_the_steps(tmp_path):
    write_samples(tmp_path, 100, 50, 150)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 150, "prompt": "The capital of France is", "text": "again"}\n')
        file.write('{"step": 200, "prompt": "The capital of France is", "te')  # being written
    first, second = read_samples(tmp_path)
    assert first["prompt"] == PROMPTS[0]
    assert first["step"] == second["step"] == [50, 100, 150]
    assert first["text"][2] == "again"
    assert first["end"] == ["length", "length", ""]
    assert second["text"][0].startswith(" text 1 of step 50 ")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b'{"step": 1}',
        b'{"step": -1, "prompt": "a"}',
        b'{"step": 1, "prompt": ["a"]}',
        b"[" * 10**5,
        b"\xff",
    ],
)
def test_lines_that_are_no_samples(tmp_path, line):
    sample = b'{"step": 2, "prompt": "a", "text": 3, "end": null}'
    (tmp_path / "samples.jsonl").write_bytes(b"%s\n%s\n" % (line, sample))
    (found,) = read_samples(tmp_path)
    assert found == {"prompt": "a", "step": [2], "text": ["3"], "end": ["None"]}


def test_many_long_texts_are_thinned_to_a_budget(tmp_path):
    lines = [
        json.dumps({"step": step, "prompt": prompt, "text": "x" * 5_000, "end": "eos"}) + "\n"
        for step in range(1, 1001)
        for prompt in ("a", "b")
    ]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    found = read_samples(tmp_path)
    assert sum(len(text) for one in found for text in one["text"]) <= 1_010_000
    for one in found:
        assert one["step"] == list(range(8, 1001, 8))  # 1,000 x 2 x 4,000 characters in a million
        assert {len(text) for text in one["text"]} == {4000}


def test_the_end_of_a_large_file_is_read(tmp_path, monkeypatch):
    write_samples(tmp_path, *range(1, 5001))
    size = (tmp_path / "samples.jsonl").stat().st_size
    monkeypatch.setattr(samples_module, "SAMPLES_READ_BYTES", size // 10)
    first, _ = read_samples(tmp_path)
    assert 400 < len(first["step"]) < 501  # a tenth, of longer lines
    assert first["step"] == list(range(first["step"][0], 5001))


def test_scores_of_checkpoints_are_apart_from_those_of_training(tmp_path):
    run = write_run(tmp_path / "a", 300)
    checkpoint = run / "checkpoint" / "step-200"
    checkpoint.mkdir(parents=True)
    assert run_of(checkpoint) == run
    assert run_of(tmp_path) is None
    record_scores(run, 200, {"arc_easy/acc": 0.5, "arc_easy/acc_stderr": 0.01}, {})
    record_scores(run, 100, {"arc_easy/acc": 0.25, "arc_easy/acc_stderr": math.nan}, {})
    write_scores(run, 200, 0.75, num_fewshot=0, ema=True)
    write_scores(run, 200, 0.8, num_fewshot=0, ema=True)  # scored again
    with (run / "evals.jsonl").open("a") as file:
        file.write('[]\n{"step": 1, "settings": 3, "scores": 4}\n{"step": 1}\n')
        file.write('{"step": 1, "settings": {}, "scores": [[1, 2]]}\n')
    assert read_scores(run) == {
        "arc_easy/acc (torchtitan eval)": {
            "step": [100, 200],
            "value": [0.25, 0.5],
            "error": [None, 0.01],
        },
        "arc_easy/acc (torchtitan eval, average of the weights, 0-shot)": {
            "step": [200],
            "value": [0.8],
            "error": [0.01],
        },
    }
    (shown,) = collect([run])["runs"]
    assert next(iter(shown["evals"])) == "arc_easy/acc"
    assert len(shown["evals"]) == 3
    JsonlSink(run / "evals.jsonl", History()).follow(150)
    assert read_scores(run)["arc_easy/acc (torchtitan eval)"]["step"] == [100]
    JsonlSink(run / "evals.jsonl", History(), new_run=True)
    assert read_scores(run) == {}


def test_scores_of_two_runs_are_compared_by_their_errors(tmp_path, capsys):
    base = write_run(tmp_path / "base", 300)
    other = write_run(tmp_path / "other", 300, seed=1)
    for run, low, high in ((base, 0.5, 0.5), (other, 0.52, 0.53)):
        record_scores(run, 100, {"a/acc": low, "a/acc_stderr": 0.01}, {})
        record_scores(run, 200, {"a/acc": high, "a/acc_stderr": 0.01}, {})
    found = {one["metric"]: one for one in collect([base, other])["comparison"]}
    score = found["eval/a/acc (torchtitan eval)"]
    assert score["difference"] == pytest.approx(0.03)
    assert score["noise"] == pytest.approx(1.96 * math.sqrt(2) * 0.01)
    assert score["significant"]
    assert found["eval/arc_easy/acc"]["difference"] == 0
    assert main([str(base), str(other)]) == 0
    text = capsys.readouterr().out
    assert "  arc_easy/acc 0.5833 ± 0.0200 (step 300)   a/acc (torchtitan eval) 0.5000" in text
    assert '  wrote at step 300: "The capital of France is text 0 of step 300 ' in text
    unwrapped = " ".join(text.split())
    assert "a/acc (torchtitan eval) 0.0300 ± 0.0277 higher, at step 200" in unwrapped
