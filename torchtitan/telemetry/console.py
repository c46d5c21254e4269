"""Metrics for people: one line per record, and a progress bar on a terminal."""

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
)

_RECENT = 100
"""Number of steps that show the current speed."""
_USUAL = 3.0
"""An interval longer than this many usual ones includes something that isn't a step."""


class StageCost(NamedTuple):
    """The cost of the steps of one stage of the data."""

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
            stages: cost of the steps of each stage of the data; empty: all cost the same.
        """
        self.total = total_steps
        self.pace = Pace(total_steps, clock, stages)
        self.bar = None if plain or not sys.stdout.isatty() else _Bar(total_steps, start_step)

    def advance(self, step: int) -> None:
        """Record that `step` has just ended."""
        self.pace.step_done(step)
        if self.bar is not None:
            self.bar.show(step, eta=_eta(self.pace.seconds_left()))

    def log(self, record: Record) -> None:
        for line in self.line(record).splitlines():
            logger.info(line)
        if self.bar is not None and "loss" in record:
            rate = show_rate(record["tokens_per_second"])
            self.bar.show(record["step"], figures=f"{_loss(record)}  {rate} tok/s")

    def line(self, record: Record) -> str:
        """The record in words; a line for each set of a validation."""
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
            fields.append(_eta(self.pace.seconds_left()))
        return fields

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Pace:
    """Estimates how long a run still takes, from the time between its steps.

    An interval holds all that happens between two steps: validation, saves, waiting for data,
    compilation. What it takes beyond three usual ones counts as an interruption. The steps that are
    left are expected to take as long as recent ones do without interruptions, and to be interrupted
    as often as all since the start. So a validation every thousand steps counts in proportion, and
    a single pause changes the estimate by little. Where rows become longer, steps are expected to
    take longer in proportion to their FLOPs.
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
        """Cost of a step of each stage, in units of the first's."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Seconds for each unit of cost."""
        self._count = 0
        self._interrupted = 0.0
        """Seconds of interruptions before the recent intervals."""
        self._last: float | None = None
        self._step = 0

    def step_done(self, step: int) -> None:
        """Record that `step` has just ended."""
        now = self._clock()
        self._step = step
        if self._last is not None:
            cost = self._costs[bisect_right(self._firsts, step)]
            if len(self._recent) == _RECENT:
                self._interrupted += max(0.0, self._recent[0] - self._longest_usual()) * cost
            self._recent.append((now - self._last) / cost)
            self._count += 1
        self._last = now

    def _longest_usual(self) -> float:
        return _USUAL * median_low(self._recent)

    def seconds_left(self) -> float | None:
        """Seconds to the end of the last step; None before there is an interval to judge from.

        The first interval begins at the end of the first step, which compiles.
        """
        left = self.total - self._step
        if not self._recent:
            return None if left else 0.0
        limit = self._longest_usual()
        usual = sum(min(interval, limit) for interval in self._recent) / len(self._recent)
        interrupted = self._interrupted
        over = sum(max(0.0, interval - limit) for interval in self._recent)
        interrupted += over * self._costs[bisect_right(self._firsts, self._step)]
        # After few steps, a single interruption says little about how often there will be one.
        share = interrupted / max(self._count, min(_RECENT, self.total // 10))
        return self._cost_left() * usual + left * share

    def _cost_left(self) -> float:
        """Cost of the steps after the last."""
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
            # the one that rich shares shows nothing below another live line
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
            fields: `figures` and `eta`, those that have changed.
        """
        self._progress.update(self._task, completed=step, **fields)

    def close(self) -> None:
        self._progress.stop()


def _loss(record: Record) -> str:
    loss = record["loss"]
    return "no predicted tokens" if loss is None else f"loss {show_loss(loss)}"


def _eta(seconds: float | None) -> str:
    """`ETA 22 s (12:04:16)`, with the date unless that is today."""
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
    """Whether a key is the loss of a validation set, not the one of the averaged weights."""
    return key.startswith("validation_loss") and not key.startswith("validation_loss_")


def _validation(record: Record, suffix: str) -> str:
    """
    Args:
        suffix: the ending of one validation set's keys.
    """
    bits = record[f"validation_bits_per_byte{suffix}"]
    average = record.get(f"validation_loss_ema{suffix}")
    text = "validation loss"
    if suffix:
        text += f" of {suffix[1:]}"
    loss = record[f"validation_loss{suffix}"]
    if loss is None:
        return f"{text}: no predicted tokens"
    text += f" {show_loss(loss)}"
    if average is not None:
        text += f" ({show_loss(average)} averaged)"
    if bits is not None:
        text += f", {bits:.4f} bits per byte,"
    return f"{text} over {show_tokens(record[f'validation_tokens{suffix}'])} tokens"
