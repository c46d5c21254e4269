"""What `nvidia-smi` reports of this machine's GPUs: driver, memory, clocks, power, faults."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from tempfile import TemporaryFile

LOAD = (
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active",  # a driver from 535 on
)
"""Fields that change while a GPU computes, and their limits: MHz, W, degrees Celsius, and why the
clock is below its maximum.
"""
_REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake of the host",
}
"""Bits of `clocks_event_reasons.active` (nvml.h) that mean a slower GPU. The others are idling and
settings of the clock.
"""
_SECONDS = 20


class NoDriver(Exception):
    """`nvidia-smi` is missing or fails; the message is a clause that says why."""


def query(fields: Sequence[str], gpu: str = "") -> list[dict[str, str]]:
    """Ask for `fields` (`nvidia-smi --help-query-gpu`): one dictionary per GPU, by field. A value
    that a GPU doesn't have is `[N/A]`.

    Args:
        gpu: index or UUID of a GPU; all by default.

    Raises:
        NoDriver: there is no answer.
    """
    try:
        done = subprocess.run(
            _command(fields, gpu), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        raise NoDriver("there is no nvidia-smi") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoDriver(f"nvidia-smi: {error}") from error
    if done.returncode:
        message = " ".join((done.stdout + done.stderr).split()) or f"status {done.returncode}"
        raise NoDriver(f"nvidia-smi fails: {message[:200]}")
    return _rows(done.stdout, fields)


def _command(fields: Sequence[str], gpu: str) -> list[str]:
    which = ["-i", gpu] if gpu else []
    return [
        "nvidia-smi",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
        *which,
    ]


def _rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """The rows of nvidia-smi's table; one that was cut off is left out."""
    cells = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in cells if len(row) == len(fields)]


def number(text: str) -> float | None:
    """A value of `query`; None if the GPU doesn't report it."""
    try:
        return float(text)
    except ValueError:
        return None


@contextmanager
def watch(gpu: str = "", every_ms: int = 500) -> Iterator[list[dict[str, str]]]:
    """Ask for `LOAD` again and again while the body runs. The list has the rows after it, none
    where nvidia-smi doesn't work.
    """
    rows: list[dict[str, str]] = []
    command = [*_command(LOAD, gpu), f"--loop-ms={every_ms}"]
    with TemporaryFile("w+") as out:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        except OSError:
            yield rows
            return
        try:
            yield rows
        finally:
            process.terminate()
            process.wait()
            out.seek(0)
            rows += _rows(out.read(), LOAD)


def summary(rows: Sequence[Mapping[str, str]]) -> dict[str, object]:
    """Rows of `LOAD` in one: each number as its minimum, median and maximum, or alone where those
    are equal, and what slowed the clock in any row.
    """
    found: dict[str, object] = {"samples": len(rows)}
    for field in LOAD[:-1]:
        values = [value for row in rows if (value := number(row[field])) is not None]
        if values:
            low, high = min(values), max(values)
            found[field] = low if low == high else [low, median(values), high]
    bits = 0
    for row in rows:
        mask = row[LOAD[-1]]
        bits |= int(mask, 16) if mask.startswith("0x") else 0
    return found | {"slowed_by": [name for bit, name in _REASONS.items() if bits & bit]}
