"""Metrics for people: one line per record, and a progress bar on a terminal."""

import sys
import time
from collections.abc import Callable
from typing import Any

from torchtitan.telemetry.pace import Pace
from torchtitan.telemetry.trackers import Record
from torchtitan.utils.logging import logger
from torchtitan.utils.text import (
    show_date,
    show_duration,
    show_gib,
    show_loss,
    show_percent,
    show_rate,
    show_tokens,
)


class ConsoleSink:
    """One readable line per record, and on a terminal a live progress bar below."""

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        plain: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total = total_steps
        self.pace = Pace(total_steps, clock)
        self.bar = None if plain or not sys.stdout.isatty() else _Bar(total_steps, start_step)

    def advance(self, step: int) -> None:
        """Record that `step` has just ended."""
        self.pace.step_done(step)
        if self.bar is not None:
            self.bar.show(step, left=_left(self.pace.seconds_left()))

    def log(self, record: Record) -> None:
        for line in self.line(record).splitlines():
            logger.info(line)
        if self.bar is not None and "loss" in record:
            self.bar.show(
                record["step"],
                loss=show_loss(record["loss"]),
                rate=show_rate(record["tokens_per_second"]),
            )

    def line(self, record: Record) -> str:
        """The record in words."""
        step = f"step {record['step']:>{len(str(self.total))}}/{self.total}"
        losses = (
            key.removeprefix("validation_loss")
            for key in record
            if key.startswith("validation_loss")
        )
        if sets := [suffix for suffix in losses if not suffix.startswith("_")]:
            return "\n".join(f"{step}  {_validation(record, name)}" for name in sets)
        if found := {
            key.removeprefix("eval/"): value
            for key, value in record.items()
            if key.startswith("eval/")
        }:
            shown = (
                f"{name} {value:.4f}" for name, value in found.items() if "_stderr" not in name
            )
            return f"{step}  eval  {'  '.join(shown)}"
        parts = [
            step,
            f"loss {show_loss(record['loss'])}",
            f"grad norm {record['grad_norm']:.3f}",
            f"lr {record['lr']:.2e}",
            f"{show_rate(record['tokens_per_second'])} tok/s",
            f"{record['tflops']:.2f} TFLOP/s",
        ]
        if record["mfu"] is not None:
            parts.append(f"MFU {show_percent(record['mfu'])}")
        parts.append(f"{show_gib(record['memory_gib'])} ({record['memory_pct']:.0f}%)")
        if record["step"] < self.total:
            parts.append(_left(self.pace.seconds_left()))
        return "  ".join(parts)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class _Bar:
    """A live line at the bottom of the terminal: how far the run is, its last loss and rate, and
    when it ends.
    """

    def __init__(self, total_steps: int, start_step: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        words = (f"{{task.fields[{name}]}}" for name in ("figures", "left"))
        columns = [BarColumn(bar_width=None), MofNCompleteColumn(), *map(TextColumn, words)]
        self._progress = Progress(
            *columns,
            console=Console(),  # the one that rich shares shows nothing below another live line
            transient=True,
            expand=True,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(
            "training",
            total=total_steps,
            completed=start_step,
            figures="",
            left=_left(None),
        )
        self._progress.start()

    def show(self, step: int, *, left: str | None = None, **figures: str) -> None:
        """
        Args:
            figures: `loss` and `rate`, if they are known anew.
        """
        fields: dict[str, Any] = {} if left is None else {"left": left}
        if figures:
            fields["figures"] = f"loss {figures['loss']}  {figures['rate']} tok/s"
        self._progress.update(self._task, completed=step, **fields)

    def close(self) -> None:
        self._progress.stop()


def _left(seconds: float | None) -> str:
    """When the run ends."""
    if seconds is None:
        return "left unknown"
    return f"left {show_duration(seconds)}  ends {show_date(time.time() + seconds)}"


def _validation(record: Record, suffix: str) -> str:
    """
    Args:
        suffix: of the keys of one validation set.
    """
    loss, bits, tokens = (
        record[f"validation_{key}{suffix}"] for key in ("loss", "bits_per_byte", "tokens")
    )
    per_byte = f", {bits:.4f} bits per byte," if bits is not None else ""
    name = f" of {suffix[1:]}" if suffix else ""
    average = record.get(f"validation_loss_ema{suffix}")
    averaged = f" ({show_loss(average)} averaged)" if average is not None else ""
    return (
        f"validation loss{name} {show_loss(loss)}{averaged}{per_byte} over "
        f"{show_tokens(tokens)} tokens"
    )
