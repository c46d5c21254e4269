"""What a run of a mixture of experts reports, checks and resumes."""

import json
from unittest import mock

import pytest
import torch

from tests.runs import EXPERTS, arguments, train
from torchtitan.config import resolve
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight

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


def biases_of_a_model_in_bf16(argv, steps):
    """The routing biases of each layer, from 7 on, after steps in which the experts' rows differ by
    one in a thousand.
    """
    config = resolve(argv, 1).config
    parts = build(config, preflight(config), torch.device("cpu"))
    routers = list(parts.experts.routers.values())
    for router in routers:
        router.expert_bias.fill_(7.0)
    for _ in range(steps):
        for router in routers:
            router.step_load.copy_(torch.tensor([999, 1001, 1000, 1000, 1002, 998, 1000, 1000]))
        parts.experts.step()
    parts.loader.close()
    return [router.expert_bias.clone() for router in routers]


def test_a_large_bias_moves_by_small_differences(ranks, tmp_path):
    """bf16's next number after 7 is 7.03, and it counts only to 256."""
    types = ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]
    argv = arguments(tmp_path, *EXPERTS, *types, "--moe.balance_bias_rate=1e-3")
    moves = torch.tensor([1, -1, 0, 0, -1, 1, 0, 0])
    for bias in ranks(1, biases_of_a_model_in_bf16, argv, 20)[0]:
        assert bias.dtype == torch.float32
        torch.testing.assert_close(bias, 7 + 20 * 1e-3 * moves, rtol=0, atol=1e-5)
