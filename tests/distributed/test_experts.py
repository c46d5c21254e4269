"""What a run of a mixture of experts reports, checks and resumes."""

import json
from unittest import mock

import pytest

from tests.runs import EXPERTS, arguments, train
from torchtitan.optim.expert_balance import ExpertBalance

EP = "--parallelism.expert_parallel_degree="


def loads(folder):
    return [json.loads(line) for line in (folder / "expert_load.jsonl").read_text().splitlines()]


def counting(argv):
    """Train; how often the host waited for the experts' loads."""
    with mock.patch.object(
        ExpertBalance, "take", autospec=True, side_effect=ExpertBalance.take
    ) as take:
        train(argv)
    return take.call_count


def test_loads_are_reported(ranks, tmp_path):
    """Of all steps since the last record, and all tokens that count, on any number of ranks."""
    extra = [*EXPERTS, "--metrics.log_freq=3"]
    (tmp_path / "two").mkdir()
    waits = ranks(2, counting, arguments(tmp_path / "two", *extra, f"{EP}2", steps=6))
    assert waits == [3, 3], "in logged steps alone"
    argv = arguments(tmp_path, *extra, steps=6)
    run = ranks(1, train, argv)[0]
    assert loads(tmp_path / "two/out") == loads(tmp_path / "out")
    assert [(line["step"], line["steps"]) for line in loads(tmp_path / "out")] == [
        (1, 1),
        (3, 2),
        (6, 3),
    ]
    tokens = 0
    for record, line in zip(run["metrics"], loads(tmp_path / "out"), strict=True):
        routed = 2 * (record["tokens"] - tokens)  # to 2 experts each
        assert [sum(rows) for rows in line["rows"].values()] == [routed, routed]
        peaks = [max(rows) * 8 / routed for rows in line["rows"].values()]
        assert record["expert_load_max"] == pytest.approx(max(peaks))
        assert record["expert_load_max_layer"] == peaks.index(max(peaks))
        assert 0.5 < record["expert_entropy"] < 1
        assert record["auxiliary_loss"] == pytest.approx(2 * 0.01, rel=0.3), (
            "the losses of two layers are 1 if balanced"
        )
        tokens = record["tokens"]
