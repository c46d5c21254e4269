"""What a run is told about time that it spends for nothing: when, and when not."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from torchtitan.config.sections.parallelism import ActivationCheckpoint
from torchtitan.train import built_in
from torchtitan.train.advice import unneeded_recomputation
from torchtitan.utils.device import available_memory


def said(resident=1.0, available=20.0, ranks=1, **keys):
    return unneeded_recomputation(ActivationCheckpoint(**keys), resident, available, ranks)


def test_recomputation_is_named_where_memory_is_free():
    assert "one block in 2 takes up to 14 % of a step, and saves at most about 1.0 GiB" in said()
    assert "one block in 4 takes up to 8 %" in said(selective_ac_option="4")
    assert said(ranks=4)


@pytest.mark.parametrize(
    "case",
    [
        {"mode": "none"},
        {"mode": "full"},  # nobody knows what it would keep
        {"selective_ac_option": "op"},
        {"selective_ac_option": "1"},
        {"available": 1.9},
        {"ranks": 11},
    ],
)
def test_nothing_is_said_where_memory_may_be_short_or_nothing_is_known(case):
    assert said(**case) is None


def test_it_is_said_once_and_never_on_a_gpu():
    with (
        mock.patch.object(built_in.dist, "get_rank", return_value=0),
        mock.patch.object(built_in, "peak_memory", return_value=(1.0, 5.0)),
        mock.patch.object(built_in, "available_memory", return_value=20.0),
        mock.patch.object(built_in.logger, "info") as info,
    ):
        for device, times in (("cuda", 0), ("cpu", 1)):
            run = SimpleNamespace(
                device=torch.device(device),
                config=SimpleNamespace(activation_checkpoint=ActivationCheckpoint()),
            )
            advise = built_in.Advise()
            for step in range(1, 6):
                advise.after_step(run, None)
                assert info.call_count == (times if step >= 3 else 0)


def test_a_container_may_have_less_memory_than_its_machine(tmp_path):
    free = available_memory(tmp_path)
    (tmp_path / "memory.current").write_text("1048576\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("3145728\n")
    assert available_memory(tmp_path) == 2 / 1024
