"""Metrics for people: one line per record, and a progress bar on a terminal."""

import sys

from torchtitan.observe.sinks import Record
from torchtitan.utils.logging import logger


class ConsoleSink:
    """One readable line per record, and on a terminal a live progress bar below."""

    def __init__(self, total_steps: int, start_step: int, plain: bool):
        self.total = total_steps
        self.progress = None
        if not plain and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.progress = Progress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=True
            )
            self.task = self.progress.add_task("training", total=total_steps, completed=start_step)
            self.progress.start()

    def advance(self, step: int) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=step)

    def log(self, record: Record) -> None:
        for line in self.line(record).splitlines():
            logger.info(line)

    def line(self, record: Record) -> str:
        """The record in words."""
        step = f"step {record['step']:>{len(str(self.total))}}/{self.total}"
        losses = (key.removeprefix("validation_loss") for key in record if key.startswith("validation_loss"))
        if sets := [suffix for suffix in losses if not suffix.startswith("_")]:
            return "\n".join(f"{step}  {_validation(record, name)}" for name in sets)
        if found := {key.removeprefix("eval/"): value for key, value in record.items() if key.startswith("eval/")}:
            shown = (f"{name} {value:.4f}" for name, value in found.items() if "_stderr" not in name)
            return f"{step}  eval  {'  '.join(shown)}"
        parts = [
            step,
            f"loss {record['loss']:.4f}",
            f"grad norm {record['grad_norm']:.3f}",
            f"lr {record['lr']:.2e}",
            f"{record['tokens_per_second']:,.0f} tok/s",
            f"{record['tflops']:.2f} TFLOP/s",
        ]
        if record["mfu"] is not None:
            parts.append(f"MFU {record['mfu']:.1f}%")
        parts.append(f"{record['memory_gib']:.2f} GiB ({record['memory_pct']:.0f}%)")
        return "  ".join(parts)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()


def _validation(record: Record, suffix: str) -> str:
    """
    Args:
        suffix: of the keys of one validation set.
    """
    loss, bits, tokens = (record[f"validation_{key}{suffix}"] for key in ("loss", "bits_per_byte", "tokens"))
    per_byte = f", {bits:.4f} bits per byte," if bits is not None else ""
    name = f" of {suffix[1:]}" if suffix else ""
    average = record.get(f"validation_loss_ema{suffix}")
    averaged = f" ({average:.4f} averaged)" if average is not None else ""
    return f"validation loss{name} {loss:.4f}{averaged}{per_byte} over {tokens:,} tokens"
