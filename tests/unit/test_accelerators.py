"""The GPUs of a machine: nvidia-smi, played by a script; what CUDA_VISIBLE_DEVICES shows of them;
and what `torchtitan doctor` says of their state.
"""

import socket
from functools import partial

import pytest

from torchtitan.commands import doctor
from torchtitan.config.rules import Facts, problems
from torchtitan.config.sections.parallelism import Compile
from torchtitan.config.sections.schema import Config
from torchtitan.utils import accelerators
from torchtitan.utils.accelerators import (
    Accelerators,
    NoDriver,
    count_gpus,
    hardware_fault,
    missing_for_kernels,
    query,
    read_accelerators,
    refuse_unusable,
    visible_gpus,
)
from torchtitan.utils.device import current_device
from torchtitan.utils.errors import UserError

HEALTHY = {
    "index": "0",
    "uuid": "GPU-1",
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "580.65",
    "memory.total": "81559",
    "memory.used": "4",
    "mig.mode.current": "Disabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.pending": "No",
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make `nvidia-smi` a shell script, the only command there is."""

    def install(script):
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_query(install):
    install("""echo "$1" >&2; echo "NVIDIA H100, [N/A]"; echo "NVIDIA H100, 7"; echo cut""")
    rows = query(["name", "memory.used"])
    assert [row["memory.used"] for row in rows] == ["[N/A]", "7"]


def test_no_driver_answers(install, monkeypatch, capsys):
    with pytest.raises(NoDriver, match="there is no nvidia-smi"):
        query(["name"])
    assert count_gpus() == 0
    assert capsys.readouterr().err == ""
    install("echo NVIDIA-SMI has failed because it can\\'t reach the driver; exit 9")
    with pytest.raises(NoDriver, match="NVIDIA-SMI has failed because it can't reach the driver"):
        query(["name"])
    install("while :; do :; done")
    monkeypatch.setattr(accelerators, "_SECONDS", 0.1)
    assert count_gpus() == 0
    late = "warning: no GPU is counted: nvidia-smi doesn't answer within 0.1 seconds\n"
    assert capsys.readouterr().err == late


@pytest.mark.parametrize(
    ("visible", "count", "indices"),
    [
        (None, 2, "01"),
        ("1,0", 2, "10"),
        ("", 0, ""),
        ("-1", 0, ""),
        ("0,-1,1", 1, "0"),
        ("GPU-b,GPU-a1", 2, "10"),
        ("MIG-1", 1, "01"),
    ],
)
def test_visible_gpus_are_those_of_cuda(install, monkeypatch, visible, count, indices):
    install("case $1 in\n*uuid*) echo 0, GPU-a1, A; echo 1, GPU-b2, B;;\n*) echo 0; echo 1;;\nesac")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count
    assert "".join(gpu["index"] for gpu in visible_gpus()) == indices


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            Accelerators(gpus=[HEALTHY], torch="2.13.0+cpu"),
            r"1 GPU \(NVIDIA H100 80GB HBM3\), but torch 2.13.0\+cpu is built for the CPU: install",
        ),
        (
            Accelerators(n_hidden=2, cuda="13.0"),
            "CUDA_VISIBLE_DEVICES= hides this machine's 2 GPUs: unset it",
        ),
        (
            Accelerators(gpus=[HEALTHY | {"driver_version": "535.1"}], torch="2.13", cuda="13.0"),
            "driver 535.1 of .* is too old for CUDA 13.0, .*: update it to 580 or newer",
        ),
        (
            Accelerators(gpus=[HEALTHY], torch="2.13", cuda="13.0", torch_error="no access"),
            "torch 2.13, built for CUDA 13.0, can't use .* with driver 580.65: no access",
        ),
    ],
    ids=["cpu build", "hidden", "old driver", "torch's reason"],
)
def test_gpus_that_torch_cannot_use_are_refused(monkeypatch, state, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=message):
        state.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"memory.used": "40960"}, "GPU 0 is busy: 40.0 of 80 GiB are in use by other processes"),
        ({"mig.mode.current": "Enabled"}, "GPU 0 is split by MIG"),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "had 3 uncorrected memory errors (ECC)"),
        ({"ecc.errors.uncorrected.volatile.total": "[N/A]"}, None),
        ({"remapped_rows.pending": "Yes"}, "bad memory rows to replace"),
    ],
)
def test_faults_are_said(change, message):
    found = list(Accelerators(gpus=[HEALTHY, HEALTHY | change], names=["H100"] * 2).warnings())
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_what_cuda_and_nvidia_smi_number_differently(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    mixed = Accelerators(gpus=[HEALTHY], names=["A", "B", "A"], torch="2.13", cuda="13.0", nccl="2")
    assert str(mixed) == "2 x A, 1 x B: driver 580.65, CUDA 13.0, NCCL 2, torch 2.13."
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in next(mixed.warnings())


def test_doctor_reports_this_machine(install, monkeypatch, capsys):
    """A machine like this one: nvidia-smi is missing, or lists a GPU that torch can't use."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refuse_unusable(8)
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.startswith("No GPU is used (there is no nvidia-smi)")
    values = ", ".join(HEALTHY.values())
    install(f"case $1 in\n*uuid*) echo {values};;\n*) echo 0;;\nesac")
    monkeypatch.setattr("torch.version.cuda", None)
    assert read_accelerators().gpus == [HEALTHY]
    for main in (partial(doctor.main, []), partial(refuse_unusable, 2), current_device):
        with pytest.raises(UserError, match=r"is built for the CPU.*CUDA_VISIBLE_DEVICES= "):
            main()
    install("echo Failed to initialize NVML: Driver/library version mismatch; exit 18")
    for main in (partial(doctor.main, []), partial(refuse_unusable, 2), current_device):
        with pytest.raises(UserError, match=r"NVML: Driver/library version mismatch\. To compute"):
            main()
    install(f"case $1 in\n*uuid*) echo {values};;\n*) echo 0;;\nesac")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # asks for the CPU
    assert current_device().type == "cpu"
    text = "No GPU is used (CUDA_VISIBLE_DEVICES hides 1); torch "
    assert str(read_accelerators()).startswith(text)


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    refuse_unusable(4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for main in (partial(refuse_unusable, 8), current_device):
        with pytest.raises(UserError, match="8 ranks on 4 visible GPUs; give at most 4, or"):
            main()


def test_other_vendors(tmp_path, install, monkeypatch):
    """AMD's GPUs are counted; those that training can't use are named."""
    for node, gpu in enumerate(("0", "21947", "1234")):  # the first is a CPU
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "gpu_id").write_text(f"{gpu}\n")
    monkeypatch.setattr(accelerators, "_AMD_NODES", tmp_path)
    assert count_gpus() == 2
    assert "GPUs that are not supported: AMD's, by torch without ROCm)" in str(read_accelerators())
    refuse_unusable(2)  # a laptop's graphics
    (tmp_path / "rocm-smi").write_text("")
    (tmp_path / "rocm-smi").chmod(0o755)
    with pytest.raises(UserError, match=r"2 GPUs of AMD, but torch .* is not built for ROCm: inst"):
        refuse_unusable(2)
    with monkeypatch.context() as patch:
        patch.setenv("HIP_VISIBLE_DEVICES", "")  # asks for the CPU
        refuse_unusable(2)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert count_gpus() == 1
    monkeypatch.setattr("torch.version.hip", "6.4")
    monkeypatch.setattr("torch.xpu.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert "not supported: Apple's (mps), Intel's (xpu))" in str(read_accelerators())


def test_a_broken_gpu_is_a_sentence(monkeypatch):
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with TORCH_USE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    begins = f"GPU 5 of {socket.gethostname()} failed (uncorrectable ECC)."
    assert hardware_fault(error, 1).startswith(begins)
    for text in (
        "CUDA error: device-side assert triggered",
        "unknown error in a file",
        "CUDA error: no kernel",
    ):
        assert hardware_fault(RuntimeError(text), 1) is None


def test_missing_compilers_and_headers(tmp_path, install, monkeypatch):
    """The CPU needs a C++ compiler, a GPU a C compiler; both need Python's headers."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    problem = "no compiler (g++, or another by CXX)"
    assert missing_for_kernels() == problem
    config = Config(compile=Compile(enable=True))
    facts = Facts(missing_for_kernels=problem)
    message = (
        f"compile.enable: this machine has {problem}, which compiled kernels need; install it, or "
        "set the key to its default"
    )
    assert problems(config, facts) == [message]
    assert problems(Config(compile=Compile(enable=True, backend="eager")), facts) == []
    install("")
    monkeypatch.setattr("torchtitan.utils.accelerators.find_spec", {"triton": None}.get)
    assert missing_for_kernels().startswith("no package triton")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert missing_for_kernels() == problem
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torchtitan.utils.accelerators.find_spec", bool)
    assert missing_for_kernels() == "no compiler (gcc clang, or another by CC)"
    monkeypatch.setenv("CC", "nvidia-smi")  # any program
    assert missing_for_kernels() == ""
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert missing_for_kernels().startswith("no headers of Python")
