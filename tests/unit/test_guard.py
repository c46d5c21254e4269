"""What is a spike, what is done about it, which rank is slow, and the hash of bytes: decisions
without ranks.
"""

from math import nan
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from torchtitan.config.sections import schema
from torchtitan.health.guard import SpikeDetector, deviation
from torchtitan.health.replicas import fingerprint
from torchtitan.health.stragglers import Stragglers
from torchtitan.train.callbacks import CallbackStates
from torchtitan.train.restore import RunState
from torchtitan.train.state import Progress, StepResult
from torchtitan.utils.device import LateValues

WINDOW = 16


def guard(policy="skip", rows=8, **options):
    return SpikeDetector(
        schema.Guard(policy=policy, window=WINDOW, warmup_steps=0, **options), rows
    )


def calm(watch, steps=WINDOW, start=1, seed=0):
    """Healthy steps: loss about 3, gradient norm about 1."""
    noise = np.random.default_rng(seed)
    for step in range(start, start + steps):
        assert (
            watch.judge(step, 3 + 0.1 * noise.standard_normal(), 1 + 0.1 * noise.standard_normal())
            is None
        )
    return start + steps


def test_deviation_is_the_modified_z_score():
    values = np.random.default_rng(1).standard_normal(101) * 5 + 40
    mad = np.median(np.abs(values - np.median(values)))
    assert deviation(70.0, list(values)) == pytest.approx(
        0.6745 * (70 - np.median(values)) / mad, rel=1e-4
    )
    spoiled = [*values[:80], *[1e6] * 21]
    assert deviation(70.0, spoiled) > 2, "a fifth of outliers in the window hides nothing"
    assert deviation(2.01, [2.0] * 20) == pytest.approx(0.5), "noise in the last digit is no spike"


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (9.0, 1.0, "loss 9,"),
        (3.0, 50.0, "grad norm 50,"),
        (float("nan"), 1.0, "loss nan"),
        (3.0, float("inf"), "inf"),
    ],
)
def test_each_kind_of_spike_is_found_and_named(loss, norm, reason):
    watch = guard()
    step = calm(watch)
    spike = watch.judge(step, loss, norm)
    assert spike.action == "skip"
    assert reason in spike.reason
    assert watch.judge(step + 1, 2.9, 1.0) is None, "the spike is not part of what is normal"


def test_a_drop_is_no_spike_and_nothing_acts_before_it_knows_what_is_normal():
    watch = guard()
    step = calm(watch)
    assert watch.judge(step, 0.1, 0.01) is None
    fresh = SpikeDetector(schema.Guard(policy="skip", window=WINDOW, warmup_steps=5), 8)
    calm(fresh, WINDOW + 4)
    assert fresh.judge(WINDOW + 5, 900.0, 1.0) is None
    assert fresh.judge(WINDOW + 6, float("nan"), 1.0).action == "skip", "NaN is one at any time"


def test_off_and_warn_leave_nonfinite_values_to_training():
    for policy in ("off", "warn"):
        watch = guard(policy)
        calm(watch)
        assert watch.judge(99, float("nan"), 1.0) is None
        assert not watch.acts


def test_warn_gets_used_to_a_lasting_change():
    watch = guard("warn")
    step = calm(watch)
    warned = [watch.judge(step + i, 9.0, 1.0) is not None for i in range(WINDOW)]
    assert warned[0]
    assert not warned[-1]


def test_skips_in_a_row_end_the_run_and_healthy_steps_between_them_do_not():
    watch = guard(limit=3)
    step = calm(watch)
    for i in range(6):
        assert watch.judge(step + 2 * i, 9.0, 1.0).action == "skip"
        assert watch.judge(step + 2 * i + 1, 3.0, 1.0) is None
    actions = [watch.judge(step + 20 + i, 9.0, 1.0).action for i in range(4)]
    assert actions == ["skip", "skip", "skip", "stop"]


def test_rewinds_end_the_run_unless_a_calm_window_lies_between():
    watch = guard("rewind", limit=2)
    step = calm(watch)
    assert watch.judge(step, 9.0, 1.0).action == "rewind"
    step = calm(watch, WINDOW, step)
    actions = []
    for _ in range(3):
        actions.append(watch.judge(step, 9.0, 1.0).action)
        step = calm(watch, WINDOW - 1, step)
    assert actions == ["rewind", "rewind", "stop"]


def test_a_saved_guard_decides_the_same():
    watch = guard("rewind", limit=1)
    other = guard("rewind", limit=1)
    step = calm(watch)
    watch.judge(step, 9.0, 1.0)
    watch.skip_step()
    calm(watch, 3, step)
    other.load_state_dict(watch.state_dict())
    for values in ((3.2, 1.0), (3.6, 1.0), (3.0, 2.0), (9.0, 1.0)):
        assert watch.judge(step + 9, *values) == other.judge(step + 9, *values)
    assert watch.state_dict() == other.state_dict()


def test_rows_that_the_weights_have_not_seen():
    watch = guard()
    for step in range(1, 11):
        watch.judge(step, 3.0, 1.0)
        if step in (2, 3, 7):
            watch.skip_step()
    assert watch.skipped == [[8, 24], [48, 56]]
    assert watch.skip_rows(40) == [40, 80], (
        "back to the checkpoint after 5 steps: what came later doesn't count"
    )
    assert watch.skipped == [[8, 24], [40, 80]]


def test_slow_ranks_are_named_after_several_records():
    slow = Stragglers(schema.Guard(straggler_factor=1.5, straggler_records=2))
    even = [1.0] * 4
    step = 0.5
    assert slow.observe(even, [0.0, 0.3, 0.0, 0.0], step) == {}
    assert slow.observe(even, even, step) == {}, (
        "an interruption starts the count anew; all wait alike"
    )
    assert slow.observe([1, 1, 1.6, 1], [0.0, 0.3, 0.0, 0.0], step) == {}
    named = slow.observe([1, 1, 1.6, 1], [0.0, 0.3, 0.0, 0.0], step)
    assert named == {
        1: "waits 0.30 s per step for data, the median rank 0.00 s",
        2: "computes 1.6 times as long as the median rank",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_every_single_bit_counts_in_a_fingerprint(dtype):
    value = torch.arange(7, dtype=torch.float32).to(dtype)
    whole = fingerprint(value)
    flat = value.view(torch.uint8)
    for byte in range(len(flat)):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert fingerprint(value) != whole
            flat[byte] ^= 1 << bit
    assert fingerprint(value) == whole
    assert fingerprint(value.flip(0)) != whole, "places count too"


def test_a_fingerprint_does_not_depend_on_how_a_tensor_lies_in_memory_nor_on_chunks(monkeypatch):
    value = torch.randn(50, 40)
    assert fingerprint(value.t().contiguous().t()) == fingerprint(value)
    assert fingerprint(torch.tensor(3.0)) != fingerprint(torch.tensor(-3.0))
    assert fingerprint(torch.empty(0)) == 0
    whole = fingerprint(value)
    monkeypatch.setattr("torchtitan.health.replicas._CHUNK", 7)
    assert fingerprint(value) == whole


@pytest.mark.parametrize(
    ("exclude", "rows", "streak"),
    [(set(), 64, 2), ({"train_state"}, 64, 0), ({"train_state", "dataloader"}, 0, 0)],
)
def test_numbers_of_rows_go_on_where_the_data_does(exclude, rows, streak):
    saved = guard()
    saved.rows = 64
    saved.streak = 2
    state = {
        "progress": {"step": 8, "tokens": 1, "skipped": 0},
        "guard": saved.state_dict(),
        "lr_scheduler": None,
        "data": None,
    }
    watch = guard()
    RunState(
        SimpleNamespace(progress=Progress(), schedule=Mock(), loader=Mock(), average=None),
        SimpleNamespace(spikes=watch),
        CallbackStates(()),
    ).load(state, exclude, dict)
    assert (watch.rows, watch.streak) == (rows, streak)


def test_saved_progress_counts_on():
    """Steps, tokens, and the steps that were skipped."""
    progress = Progress()
    progress.load_state_dict({"step": 3, "tokens": 50, "skipped": 2})
    progress.advance(StepResult(LateValues(torch.tensor([1.5, 1, 10, 1.5])), 10, 10, stop=False))
    progress.advance(StepResult(LateValues(torch.tensor([nan, 1, 7, nan])), 7, 10, stop=False))
    assert progress.state_dict() == {"step": 5, "tokens": 67, "skipped": 3}
