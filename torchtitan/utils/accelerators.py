"""The GPUs of this machine, as the drivers, CUDA_VISIBLE_DEVICES and torch report them, what they
need, and their faults. Only `refuse_unusable` and `read_accelerators` import torch.
"""

import os
import re
import shutil
import socket
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from torchtitan.utils.errors import ConfigError, show_warnings
from torchtitan.utils.wording import plural

_SECONDS = 20
"""Time limit of nvidia-smi, which hangs with some faults of a GPU."""
_FIELDS = (
    *("driver_version", "memory.total", "memory.used", "mig.mode.current"),
    *("ecc.errors.uncorrected.volatile.total", "remapped_rows.pending"),
)
_BUSY_MIB = 1024
"""Memory in use from which a GPU is busy: a driver and a display need less."""
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each major version of CUDA (NVIDIA's page on CUDA compatibility)."""
_VISIBLE_ENV = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that select GPUs; torch's build for AMD reads all of them."""
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""AMD's driver lists the machine's GPUs and CPUs here."""
_ROCM = Path("/opt/rocm")
_HARDWARE_FAULT = re.compile(
    "(CUDA error|Cuda failure|HIP error).*(uncorrectable ECC|unspecified launch failure|unknown "
    "error|hardware|fallen off the bus|GPU is lost|NVLink)",
    re.IGNORECASE,
)
"""An error for which the driver's log has an Xid, of a broken GPU or link."""
Gpu = Mapping[str, str]
"""A GPU's values by field of `nvidia-smi --help-query-gpu`; `[N/A]` if not supported."""


_NO_TOOL = "there is no nvidia-smi"


class NoDriver(Exception):
    """`nvidia-smi` is missing, fails or hangs; the message is a clause with the reason."""


def query(fields: Sequence[str], gpu: str = "") -> list[dict[str, str]]:
    """Query `fields` of each GPU with nvidia-smi, which ignores CUDA_VISIBLE_DEVICES.

    Args:
        gpu: index or UUID of a GPU; all by default.

    Raises:
        NoDriver: nvidia-smi doesn't answer.
    """
    try:
        result = subprocess.run(
            query_command(fields, gpu), capture_output=True, text=True, timeout=_SECONDS
        )
    except FileNotFoundError:
        raise NoDriver(_NO_TOOL) from None
    except subprocess.TimeoutExpired:
        raise NoDriver(f"nvidia-smi doesn't answer within {_SECONDS} seconds") from None
    except OSError as error:
        raise NoDriver(f"nvidia-smi: {error}") from error
    if result.returncode:
        message = " ".join((result.stdout + result.stderr).split()) or f"status {result.returncode}"
        raise NoDriver(f"nvidia-smi fails: {message[:200]}")
    return read_rows(result.stdout, fields)


def query_command(fields: Sequence[str], gpu: str = "") -> list[str]:
    """The command of `query`."""
    which = ["-i", gpu] if gpu else []
    return [
        "nvidia-smi",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
        *which,
    ]


def read_rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """The complete rows of nvidia-smi's table."""
    cells = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in cells if len(row) == len(fields)]


def number(text: str) -> float | None:
    """A value of `query`; None if the GPU doesn't report it."""
    try:
        return float(text)
    except ValueError:
        return None


def _visible_entries() -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES, or AMD's variables, up to the first invalid entry, where
    CUDA stops; None if no variable is set.
    """
    entries = next((os.environ[name] for name in _VISIBLE_ENV if name in os.environ), None)
    if entries is None:
        return None
    return list(
        takewhile(lambda entry: entry not in ("", "-1"), map(str.strip, entries.split(",")))
    )


def visible_gpus(fields: Sequence[str] = ()) -> list[dict[str, str]]:
    """`index`, `uuid`, `name` and `fields` of the GPUs that are visible to this process. A MIG
    instance makes its whole GPU visible.

    Raises:
        NoDriver: nvidia-smi doesn't answer.
    """
    gpus = query(("index", "uuid", "name", *fields))
    entries = _visible_entries()
    if entries is None or any(entry.startswith("MIG") for entry in entries):
        return gpus
    return [
        gpu
        for entry in entries
        for gpu in gpus
        if entry == gpu["index"] or (entry.startswith("GPU-") and gpu["uuid"].startswith(entry))
    ]


def count_gpus() -> int:
    """Number of GPUs that are visible to this process, NVIDIA's or AMD's."""
    entries = _visible_entries()
    if entries is not None:
        return len(entries)
    try:
        return len(query(["index"]))
    except NoDriver as reason:
        if shutil.which("nvidia-smi"):
            show_warnings([f"no GPU is counted: {reason}"])
        return _count_amd_gpus()


def _count_amd_gpus() -> int:
    count = 0
    for file in _AMD_NODES.glob("*/gpu_id"):
        with suppress(OSError):  # another container's
            count += file.read_text().strip() != "0"  # a CPU's
    return count


def missing_for_kernels() -> str:
    """What this machine lacks to compile kernels, for its GPU or else its CPU; empty if nothing."""
    on_gpu = shutil.which("nvidia-smi") and _visible_entries() != []
    variable, default = ("CC", "gcc clang") if on_gpu else ("CXX", "g++")
    if on_gpu and not find_spec("triton"):
        return "no package triton (torch's build for CUDA brings it)"
    compilers = os.environ.get(variable, default)
    if not any(map(shutil.which, compilers.split())):
        return f"no compiler ({compilers}, or another by {variable})"
    headers = f"{sysconfig.get_paths()['include']}/Python.h"
    return "" if os.path.exists(headers) else f"no headers of Python ({headers}, as in python3-dev)"


def hardware_fault(error: BaseException, ordinal: int) -> str | None:
    """A sentence about the GPU if its hardware, or a link, is behind an error of CUDA; else None.

    Args:
        ordinal: number of the GPU in this process.
    """
    fault = _HARDWARE_FAULT.search(str(error))
    if fault is None:
        return None
    entries = _visible_entries() or []
    name = entries[ordinal] if ordinal < len(entries) else ordinal
    return (
        f"GPU {name} of {socket.gethostname()} failed ({fault[2]}). On that machine `dmesg | grep "
        "-i xid` shows the driver's reason, and `torchtitan doctor` counts memory errors (ECC). "
        "Train without it until it is reset or replaced"
    )


def refuse_unusable(ranks: int) -> None:
    """Check that torch can use a GPU of this machine for each of its ranks, if it has any. An empty
    CUDA_VISIBLE_DEVICES asks for the CPU.

    Args:
        ranks: number of ranks on this machine.

    Raises:
        ConfigError: it can't, or the ranks are more than the GPUs.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and count < ranks:
        raise ConfigError(
            [
                f"--nproc-per-node: {ranks} ranks on {plural(count, 'visible GPU')}; give at most "
                f"{count}, or compute on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
            ]
        )
    if not count and _visible_entries() != []:
        read_accelerators().check()


@dataclass(frozen=True)
class Accelerators:
    """The GPUs that a run on this machine would use."""

    gpus: Sequence[Gpu] = ()
    """The visible GPUs."""
    n_hidden: int = 0
    """Number of GPUs if CUDA_VISIBLE_DEVICES hides all of them."""
    driver_error: str = ""
    """The reason why nvidia-smi doesn't answer."""
    torch: str = ""
    cuda: str = ""
    """Version of CUDA (or ROCm) that torch is built for; empty in a build for the CPU."""
    names: Sequence[str] = ()
    """Names of the GPUs that torch can use, in the order of their ordinals."""
    torch_error: str = ""
    """torch's reason for using no GPU."""
    nccl: str = ""
    unused: str = ""
    """Kinds of GPUs that training doesn't use."""
    n_amd: int = 0
    """Number of AMD's GPUs if ROCm is installed, but torch isn't built for it."""

    def __str__(self) -> str:
        """A line about devices and versions."""
        if not self.names:
            reason = self.driver_error or "nvidia-smi lists none"
            if self.n_hidden:
                reason = f"CUDA_VISIBLE_DEVICES hides {self.n_hidden}"
            if self.unused:
                reason += f"; GPUs that are not supported: {self.unused}"
            return f"No GPU is used ({reason}); torch {self.torch} computes on the CPU."
        kinds = ", ".join(f"{count} x {name}" for name, count in Counter(self.names).items())
        driver = f"driver {self.gpus[0]['driver_version']}, " if self.gpus else ""
        return f"{kinds}: {driver}CUDA {self.cuda}, NCCL {self.nccl}, torch {self.torch}."

    def check(self) -> None:
        """Check that torch can use the GPUs of this machine, if it has any.

        Raises:
            ConfigError: it can't, with the reason.
        """
        broken = self.driver_error != _NO_TOOL and self.driver_error
        if not self.names and (self.gpus or self.n_hidden or broken or self.n_amd):
            reason = broken or self._reason()
            raise ConfigError(
                [f"{reason}. To compute on the CPU, set CUDA_VISIBLE_DEVICES= (empty)"]
            )

    def _reason(self) -> str:
        """Why torch can't use the GPUs of this machine."""
        if self.n_amd and not (self.gpus or self.n_hidden):
            return (
                f"this machine has {plural(self.n_amd, 'GPU')} of AMD, but torch {self.torch} is "
                "not built for ROCm: install that build (https://pytorch.org/get-started/locally)"
            )
        if not self.gpus:
            return (
                f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')} hides this "
                f"machine's {plural(self.n_hidden, 'GPU')}: unset it"
            )
        here = f"{plural(len(self.gpus), 'GPU')} ({self.gpus[0]['name']})"
        if not self.cuda:
            return (
                f"this machine has {here}, but torch {self.torch} is built for the CPU: install "
                "the build for CUDA (https://pytorch.org/get-started/locally)"
            )
        driver = self.gpus[0]["driver_version"]
        oldest = _OLDEST_DRIVERS.get(int(self.cuda.partition(".")[0]), 0)
        if (number(driver.partition(".")[0]) or oldest) < oldest:
            return (
                f"driver {driver} of this machine's {here} is too old for CUDA {self.cuda}, which "
                f"torch {self.torch} is built for: update it to {oldest} or newer, or install a "
                "build of torch for an older CUDA"
            )
        return (
            f"torch {self.torch}, built for CUDA {self.cuda}, can't use this machine's {here} with "
            f"driver {driver}: {self.torch_error}"
        )

    def warnings(self) -> Iterator[str]:
        """A sentence for each fault that makes the GPUs slow or unreliable."""
        if self.names and self.driver_error:
            yield f"The state of the GPUs is unknown: {self.driver_error}."
        if len(set(self.names)) > 1 and "CUDA_DEVICE_ORDER" not in os.environ:
            yield (
                "GPUs of several kinds: CUDA numbers the fastest first, nvidia-smi by bus; "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID makes them agree."
            )
        for gpu in self.gpus:
            yield from _faults(gpu)


def _faults(gpu: Gpu) -> Iterator[str]:
    name = f"GPU {gpu['index']}"
    memory = number(gpu["memory.used"]) or 0.0
    if memory > _BUSY_MIB:
        total = number(gpu["memory.total"]) or memory
        yield (
            f"{name} is busy: {memory / 1024:.1f} of {total / 1024:.0f} GiB are in use by other "
            "processes, which nvidia-smi lists."
        )
    if gpu["mig.mode.current"] == "Enabled":
        yield (
            f"{name} is split by MIG: a rank gets one instance, and NCCL can't connect instances "
            "of a GPU. `nvidia-smi -mig 0` joins them (as root)."
        )
    if errors := int(number(gpu["ecc.errors.uncorrected.volatile.total"]) or 0):
        yield (
            f"{name} had {plural(errors, 'uncorrected memory error')} (ECC) since its last reset: "
            "don't train on it."
        )
    if gpu["remapped_rows.pending"].lower() in ("1", "yes"):
        yield f"{name} has bad memory rows to replace: reset it (`nvidia-smi -r`)."


def read_accelerators() -> Accelerators:
    """Query the driver and torch."""
    import torch

    driver_error = torch_error = ""
    gpus: list[dict[str, str]] = []
    n_hidden = 0
    try:
        gpus = visible_gpus(_FIELDS)
        n_hidden = 0 if gpus else len(query(["index"]))
    except NoDriver as error:
        driver_error = str(error)
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    built_for = torch.version.cuda or torch.version.hip or ""
    if built_for and not usable:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            torch_error = str(error).strip().splitlines()[0]
    n_amd = 0 if torch.version.hip else _count_amd_gpus()
    has_rocm = shutil.which("rocm-smi") or _ROCM.exists()  # not so with a laptop's graphics
    others = {
        "Apple's (mps)": torch.backends.mps.is_available(),
        "Intel's (xpu)": torch.xpu.is_available(),
        "AMD's, by torch without ROCm": n_amd,
    }
    return Accelerators(
        gpus=gpus,
        n_hidden=n_hidden,
        driver_error=driver_error,
        torch=torch.__version__,
        cuda=built_for,
        names=[torch.cuda.get_device_name(ordinal) for ordinal in range(usable)],
        torch_error=torch_error,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if usable else "",
        unused=", ".join(name for name, is_here in others.items() if is_here),
        n_amd=n_amd if has_rocm else 0,
    )
