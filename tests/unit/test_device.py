"""The switch that reports waits for the device, against a recording of what it tells CUDA."""

from unittest import mock

import pytest
import torch

from torchtitan.utils import device


def test_syncs_are_reported_but_for_the_expected_one():
    modes = ["default"]

    def spoil():
        raise RuntimeError("out of patience")

    with (
        mock.patch.object(device, "device_type", return_value="cuda"),
        mock.patch.object(torch.cuda, "get_sync_debug_mode", side_effect=lambda: modes[-1]),
        mock.patch.object(torch.cuda, "set_sync_debug_mode", side_effect=modes.append),
    ):
        with device.device_syncs(report=True), device.device_syncs(report=False):
            assert modes[-1] == "default"
        assert modes == ["default", "warn", "default", "warn", "default"]
        with pytest.raises(RuntimeError), device.device_syncs(report=True):
            spoil()
        assert modes[-1] == "default"


def test_nothing_is_asked_of_cuda_on_the_cpu():
    with (
        mock.patch.object(torch.cuda, "set_sync_debug_mode") as asked,
        device.device_syncs(report=True),
    ):
        pass
    assert not asked.called
