"""Metrics on the console: one line per record, and a progress bar on a terminal."""

import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any, NamedTuple

from torchtitan.telemetry.trackers import Record
from torchtitan.utils.logging import logger
from torchtitan.utils.process import unescaped
from torchtitan.utils.wording import (
    show_date,
    show_duration,
    show_gib,
    show_loss,
    show_percent,
    show_rate,
    show_tokens,
    validation_title,
)

_RECENT = 100
"""Number of intervals from which the current speed is estimated."""
_OUTLIER = 3.0
"""An interval longer than this many median intervals includes something besides a step."""


class StageCost(NamedTuple):
    """The cost of a step in one stage of the data."""

    first: int
    """The first step, counted from 1."""
    flops_per_token: float
    tokens: int
    """Tokens of a step."""


class ConsoleSink:
    """One readable line per record, and on a terminal a live progress bar below."""

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        plain: bool,
        stages: Sequence[StageCost] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            stages: cost of a step in each stage of the data; empty: all cost the same.
        """
        self.total = total_steps
        self.pace = Pace(total_steps, clock, stages)
        self.bar = None if plain or not sys.stdout.isatty() else _Bar(total_steps, start_step)

    def advance(self, step: int) -> None:
        """Record that `step` has just ended."""
        self.pace.record_step(step)
        if self.bar is not None:
            self.bar.show(step, eta=_eta(self.pace.remaining_seconds()))

    def log(self, record: Record) -> None:
        for line in self.line(record).splitlines():
            logger.info(line)
        if self.bar is not None and "loss" in record:
            rate = show_rate(record["tokens_per_second"])
            self.bar.show(record["step"], figures=f"{_loss(record)}  {rate} tok/s")

    def line(self, record: Record) -> str:
        """The record as text, with a line for each set of a validation."""
        step = f"step {record['step']:>{len(str(self.total))}}/{self.total}"
        fields = _evals(record) or self._training(record)
        sets = [key.removeprefix("validation_loss") for key in record if _is_loss_of_set(key)]
        lines = [_validation(record, name) for name in sets] or ["  ".join(fields)]
        return "\n".join(f"{step}  {line}" for line in lines)

    def _training(self, record: Record) -> list[str]:
        if "loss" not in record:
            return []
        norm = record["grad_norm"]
        fields = [
            _loss(record),
            *([] if norm is None else [f"grad norm {norm:.3f}"]),
            f"lr {record['lr']:.2e}",
            f"{show_rate(record['tokens_per_second'])} tok/s",
            f"{record['tflops']:.2f} TFLOP/s",
        ]
        if record["mfu"] is not None:
            fields.append(f"MFU {show_percent(record['mfu'])}")
        fields.append(f"{show_gib(record['memory_gib'])} ({record['memory_pct']:.0f}%)")
        if record["step"] < self.total:
            fields.append(_eta(self.pace.remaining_seconds()))
        return fields

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Pace:
    """Estimates the remaining time of a run from the intervals between its steps.

    An interval includes everything between two steps: validation, saves, waiting for data,
    compilation. Its excess over three median intervals is an interruption. The estimate assumes
    that the remaining steps last as long as recent ones without interruptions, and are interrupted
    as much as all steps since the start. So a validation every thousand steps is included in
    proportion, and a single pause changes the estimate only a little. Where rows become longer, the
    time of a step grows in proportion to its FLOPs.
    """

    def __init__(
        self,
        total_steps: int,
        clock: Callable[[], float] = time.monotonic,
        stages: Sequence[StageCost] = (),
    ):
        self.total = total_steps
        self._clock = clock
        self._firsts = [stage.first for stage in stages[1:]]
        costs = [stage.flops_per_token * stage.tokens for stage in stages]
        self._costs = [cost / costs[0] for cost in costs] or [1.0]
        """Cost of a step in each stage, relative to the first stage."""
        self._intervals: deque[float] = deque(maxlen=_RECENT)
        """Recent intervals, in seconds for each unit of cost."""
        self._count = 0
        self._interruptions = 0.0
        """Seconds of interruptions before `_intervals`."""
        self._last: float | None = None
        self._step = 0

    def record_step(self, step: int) -> None:
        """Record that `step` has just ended."""
        now = self._clock()
        self._step = step
        if self._last is not None:
            cost = self._costs[bisect_right(self._firsts, step)]
            if len(self._intervals) == _RECENT:
                excess = self._intervals[0] - self._interruption_limit()
                self._interruptions += max(0.0, excess) * cost
            self._intervals.append((now - self._last) / cost)
            self._count += 1
        self._last = now

    def _interruption_limit(self) -> float:
        return _OUTLIER * median_low(self._intervals)

    def remaining_seconds(self) -> float | None:
        """Seconds to the end of the last step; None before the first interval.

        The first interval begins at the end of the first step, which compiles.
        """
        steps = self.total - self._step
        if not self._intervals:
            return None if steps else 0.0
        limit = self._interruption_limit()
        mean = sum(min(interval, limit) for interval in self._intervals) / len(self._intervals)
        excess = sum(max(0.0, interval - limit) for interval in self._intervals)
        cost = self._costs[bisect_right(self._firsts, self._step)]
        interruptions = self._interruptions + excess * cost
        # After few steps, a single interruption is a poor estimate of their frequency.
        share = interruptions / max(self._count, min(_RECENT, self.total // 10))
        return self._remaining_cost() * mean + steps * share

    def _remaining_cost(self) -> float:
        """Cost of the remaining steps."""
        ends = [*(first - 1 for first in self._firsts), self.total]
        begin = self._step
        total = 0.0
        for cost, end in zip(self._costs, ends, strict=True):
            steps = max(min(end, self.total) - begin, 0)
            total += cost * steps
            begin += steps
        return total


class _Bar:
    """A live line at the bottom of the terminal: progress, the last loss and rate, and the ETA."""

    def __init__(self, total_steps: int, start_step: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[eta]}"),
            # rich's shared console shows nothing below another live line
            console=Console(file=unescaped(sys.stdout)),
            transient=True,
            expand=True,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(
            "training", total=total_steps, completed=start_step, figures="", eta=_eta(None)
        )
        self._progress.start()

    def show(self, step: int, **fields: Any) -> None:
        """
        Args:
            fields: `figures` or `eta`, if they have changed.
        """
        self._progress.update(self._task, completed=step, **fields)

    def close(self) -> None:
        self._progress.stop()


def _loss(record: Record) -> str:
    loss = record["loss"]
    return "no predicted tokens" if loss is None else f"loss {show_loss(loss)}"


def _eta(seconds: float | None) -> str:
    """`ETA 22 s (12:04:16)`, with the date unless it is today."""
    if seconds is None:
        return "ETA unknown"
    now = time.time()
    today, _, _ = show_date(now).partition(" ")
    end = show_date(now + seconds).removeprefix(f"{today} ")
    return f"ETA {show_duration(seconds)} ({end})"


def _evals(record: Record) -> list[str]:
    """Scores of benchmarks; empty if the record has none."""
    scores = [
        f"{key.removeprefix('eval/')} {value:.4f}"
        for key, value in record.items()
        if key.startswith("eval/") and "_stderr" not in key
    ]
    return ["eval", *scores] if scores else []


def _is_loss_of_set(key: str) -> bool:
    """Whether a key is the loss of a validation set with the weights themselves, not averaged."""
    return key.startswith("validation_loss") and not key.startswith("validation_loss_")


def _validation(record: Record, suffix: str) -> str:
    """
    Args:
        suffix: the ending of one validation set's keys.
    """
    bits = record[f"validation_bits_per_byte{suffix}"]
    average = record.get(f"validation_loss_ema{suffix}")
    text = validation_title(suffix[1:])
    loss = record[f"validation_loss{suffix}"]
    if loss is None:
        return f"{text}: no predicted tokens"
    text += f" {show_loss(loss)}"
    if average is not None:
        text += f" ({show_loss(average)} averaged)"
    if bits is not None:
        text += f", {bits:.4f} bits per byte,"
    return f"{text} over {show_tokens(record[f'validation_tokens{suffix}'])} tokens"
