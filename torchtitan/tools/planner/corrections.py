"""Hardware as runs on it have shown: files fitted by `torchtitan plan --from-run`, which later
plans for that hardware use. There is one for each name, of CPUs one for each machine.
"""

import socket
from pathlib import Path

from torchtitan.tools.planner.cpu import CPU, measure_cpu
from torchtitan.tools.planner.hardware import Hardware, find_hardware, load_hardware
from torchtitan.utils.files import user_cache, write_output


def correction_file(name: str) -> Path:
    """Where the correction of the hardware called `name` is, if there is one."""
    host = f"-{socket.gethostname()}" if name == CPU else ""
    return Path(user_cache()).expanduser() / "hardware" / f"{name}{host}.toml"


def correction(name: str) -> Hardware | None:
    """The corrected hardware; None if no run has corrected it.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        file = correction_file(name)
    except RuntimeError:  # the user has no home
        return None
    return find_hardware(str(file)) if file.is_file() else None


def hardware_called(name: str) -> Hardware:
    """The hardware for a plan: a TOML file, or that of the table, or this machine's CPU; corrected
    by the run that was last compared with its plan. A CPU that none corrects is measured.

    Raises:
        ConfigError: there is none.
    """
    if not name.endswith(".toml") and (corrected := correction(name)):
        return corrected
    return measure_cpu()[0] if name == CPU else find_hardware(name)


def correct(name: str, text: str) -> Path:
    """Let later plans use a hardware file; where it is."""
    file = correction_file(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_output({file: text.encode()})
    load_hardware.cache_clear()
    return file


def correction_note(name: str) -> tuple[str, ...]:
    """A note for plans with a corrected hardware."""
    if name.endswith(".toml") or correction(name) is None:
        return ()
    return (f"{name} is as a run has shown: {correction_file(name)}; remove it to plan without",)
