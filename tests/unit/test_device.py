"""The switch that reports waits for the device, against a recording of what it tells CUDA; and the
units of a CPU.
"""

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


@pytest.mark.parametrize(
    ("features", "units"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile", " with AMX"),
        ("flags\t\t: fpu avx512f avx512_bf16", " with AVX-512 BF16"),
        ("Features\t: fp asimd i8mm bf16", " with Arm's BF16 extension"),
        ("flags\t\t: fpu avx512f", " without units for it, slower than in float32"),
        (None, ""),
    ],
)
def test_the_log_says_what_bf16_computes_with(tmp_path, features, units):
    file = tmp_path / "cpuinfo"
    if features:
        file.write_text(f"processor\t: 0\n{features}\n\nprocessor\t: 1\n{features}\n")
    found = device.bf16_units(file)
    with mock.patch.object(device, "bf16_units", return_value=found):
        said = device.describe_cpu_precision("bfloat16")
        assert device.describe_cpu_precision("float32") is None
    assert said == (
        f'Computing in bfloat16{units}; training.mixed_precision_param = "float32" turns it off'
    )
