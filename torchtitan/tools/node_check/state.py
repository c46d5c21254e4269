"""What is wrong with this node's GPUs before anything runs on them: no driver, another's memory,
MIG, memory errors.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.utils.errors import UserError
from torchtitan.utils.nvidia_smi import NoDriver, number, query
from torchtitan.utils.wording import plural

_FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
)
_BUSY_MIB = 1024
"""Memory in use from which a GPU counts as busy: a driver and a display take less."""
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""Beginning of the PCI class of GPUs."""


@dataclass(frozen=True)
class NodeState:
    """The node's GPUs, as the driver and torch see them."""

    gpus: Sequence[Mapping[str, str]] = ()
    """Rows of nvidia-smi; those that CUDA_VISIBLE_DEVICES hides are left out."""
    no_driver: str = ""
    """Why nvidia-smi doesn't answer."""
    on_bus: int = 0
    """NVIDIA's GPUs on the PCI bus, with a driver or without."""
    torch: str = ""
    cuda: str = ""
    """Version of CUDA (or ROCm) that torch is built for; empty: it is built for the CPU."""
    usable: int = 0
    """GPUs that torch can use."""
    why_unusable: str = ""
    nccl: str = ""
    visible: str | None = None
    """Value of CUDA_VISIBLE_DEVICES."""

    def describe(self) -> str:
        """One line: what will be measured."""
        if not self.usable:
            return f"This machine has no GPU: measuring its CPU with gloo, torch {self.torch}."
        names = sorted({gpu["name"] for gpu in self.gpus}) or ["GPU"]
        driver = f"driver {self.gpus[0]['driver_version']}, " if self.gpus else ""
        return (
            f"{self.usable} x {', '.join(names)}: {driver}CUDA {self.cuda}, NCCL {self.nccl}, "
            f"torch {self.torch}."
        )


def read_state() -> NodeState:
    """Ask the driver, the PCI bus and torch."""
    import torch

    no_driver = why = ""
    gpus: list[dict[str, str]] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        gpus = query(_FIELDS)
    except NoDriver as error:
        no_driver = str(error)
    if visible is not None:
        shown = set(visible.split(","))
        gpus = [gpu for gpu in gpus if {gpu["index"], gpu["uuid"]} & shown] or gpus
    built_for = torch.version.cuda or torch.version.hip or ""
    usable = torch.cuda.device_count() if built_for and torch.cuda.is_available() else 0
    if built_for and not usable:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            why = str(error).strip().splitlines()[0]
    return NodeState(
        gpus=gpus,
        no_driver=no_driver,
        on_bus=_on_bus(),
        torch=torch.__version__,
        cuda=built_for,
        usable=usable,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if usable else "",
        why_unusable=why,
        visible=visible,
    )


def _on_bus(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    gpus = 0
    for device in devices.glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        gpus += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return gpus


def refuse_unusable(state: NodeState) -> None:
    """Check that the node's GPUs, if it has any, can be used.

    Raises:
        UserError: it has some, and torch can't use them.
    """
    if state.usable or not (state.gpus or state.on_bus):
        return
    here = plural(len(state.gpus) or state.on_bus, "GPU")
    if not state.gpus:
        raise UserError(
            f"this machine has {here} of NVIDIA but no driver that answers: {state.no_driver}. "
            "Install the driver, or, in a container, start it with access to the GPUs"
        )
    if not state.cuda:
        raise UserError(
            f"this machine has {here} ({state.gpus[0]['name']}), but torch {state.torch} is built "
            "for the CPU: install the build for CUDA (https://pytorch.org/get-started/locally)"
        )
    if state.visible is not None:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={state.visible} hides this machine's {here}: unset it"
        )
    raise UserError(
        f"torch {state.torch} can't use this machine's {here}: {state.why_unusable}. Its driver is "
        f"{state.gpus[0]['driver_version']}, torch is built for CUDA {state.cuda}: update a "
        "driver that is too old, or install a build of torch for an older CUDA"
    )


def warnings_of(state: NodeState) -> list[str]:
    """What makes the GPUs slow or unreliable, a sentence each."""
    sentences = []
    if state.usable and state.no_driver:
        sentences.append(f"The state of the GPUs is unknown: {state.no_driver}.")
    if state.usable == 1:
        sentences.append("One GPU: collectives, which need two, are not measured.")
    for gpu in state.gpus if state.usable else ():
        name = f"GPU {gpu['index']}"
        used = number(gpu["memory.used"]) or 0.0
        if used > _BUSY_MIB:
            total = number(gpu["memory.total"]) or used
            sentences.append(
                f"{name} is busy: {used / 1024:.1f} of {total / 1024:.0f} GiB are in use by other "
                "processes, which nvidia-smi lists. What it measures is too low."
            )
        if gpu["mig.mode.current"] == "Enabled":
            sentences.append(
                f"{name} is split by MIG: a rank gets one instance, and NCCL can't connect "
                "instances of a GPU. `nvidia-smi -mig 0` joins them (as root)."
            )
        if errors := int(number(gpu["ecc.errors.uncorrected.volatile.total"]) or 0):
            sentences.append(
                f"{name} had {plural(errors, 'uncorrected memory error')} (ECC) since its last "
                "reset: don't train on it."
            )
        if gpu["remapped_rows.pending"].lower() in ("1", "yes"):
            sentences.append(f"{name} has bad memory rows to replace: reset it (`nvidia-smi -r`).")
    return sentences
