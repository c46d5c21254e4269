"""The switch that reports waits for the device, against a recording of its calls of CUDA; the
precision of a CPU; a machine like a Mac; and random numbers.
"""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from torchtitan.train.state import seed_step
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
    ("bf16", "said"),
    [
        (2.0, "products are 2.0 times as fast as in float32"),
        (
            1 / 12,
            "products take 12.0 times as long as in float32; "
            'set training.mixed_precision_param = "float32"',
        ),
    ],
)
def test_float32_is_advised_where_it_is_faster(bf16, said):
    rates = {"float32": 1.0, "bfloat16": bf16}
    with mock.patch.object(device, "cpu_product_rate", side_effect=rates.get):
        assert device.describe_cpu_precision("float32") is None
        assert device.describe_cpu_precision("bfloat16") == f"Computing in bfloat16: {said}"


LIKE_A_MAC = """
import builtins, ctypes, io, os, platform, sys, types
import torch

platform.libc_ver = lambda *args: ("", "")
for name in [name for name in dir(os) if name.startswith("sched_")] + ["fdatasync", "pipe2"]:
    vars(os).pop(name, None)

def guarded(function):
    def call(path, *args, **kwargs):
        if str(path).startswith(("/proc/sys", "/proc/cpuinfo", "/proc/self/ns", "/dev/shm")):
            raise FileNotFoundError(2, "not on a Mac", str(path))
        return function(path, *args, **kwargs)
    return call

io.open = builtins.open = guarded(open)
os.readlink = guarded(os.readlink)
ctypes.CDLL = lambda name, *args, load=ctypes.CDLL, **kwargs: (
    types.SimpleNamespace() if name is None else load(name, *args, **kwargs)
)
torch.backends.mps.is_available = lambda: True
from torchtitan.train.rank_main import main
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_a_mac_trains_on_its_cpu_and_says_so(tmp_path):
    """What Linux has and macOS lacks is taken away; the real thing has not been tried."""
    argv = ["--training.steps=2", "--training.local_batch_size=1", "--training.seq_len=32"]
    fp32 = "--training.mixed_precision_param=float32"
    done = subprocess.run(
        [sys.executable, "-c", LIKE_A_MAC, *argv, fp32, f"--job.dump_folder={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "GPUs that are not supported: Apple's (mps)" in done.stdout
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 1


@pytest.mark.parametrize(
    ("kind", "capability", "dtype"),
    [
        ("cuda", (7, 5), "float32"),
        ("cuda", (8, 0), "bfloat16"),
        ("cuda", (12, 0), "bfloat16"),
        ("cpu", None, "float32"),
    ],
)
def test_bf16_is_usual_where_it_is_native(kind, capability, dtype):
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert device.usual_dtype(torch.device(kind)) == dtype


def test_every_step_and_rank_draws_other_numbers():
    """And the same ones after a resume."""

    def draw(*key):
        seed_step(*key)
        return tuple(torch.rand(4).tolist())

    keys = [(seed, step, rank) for seed in (1, 2) for step in (0, 1, 2) for rank in (0, 1)]
    assert len({draw(*key) for key in keys}) == len(keys)
    assert draw(1, 2, 1) == draw(1, 2, 1)
