"""The training guard: finds spikes, and skips their update or rewinds to a checkpoint.

All ranks judge the same global numbers and so make the same calls.
"""

import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch.distributed as dist

from torchtitan.checkpoint import Checkpointer, Resumed
from torchtitan.config.sections import schema
from torchtitan.config.sections.training import Training
from torchtitan.utils.activity import phase
from torchtitan.utils.errors import GuardError, NonFiniteError
from torchtitan.utils.logging import event, logger
from torchtitan.utils.run_files import RunFile

_SIGMA = 1.4826
"""Standard deviation of a normal distribution, in units of its median absolute deviation."""
_MIN_RELATIVE_SIGMA = 0.01
"""Floor of the standard deviation, relative to the median: noise in a flat loss isn't a spike."""


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradient norm is out of the ordinary."""

    step: int
    reason: str
    action: Literal["warn", "skip", "rewind", "stop"]


def deviation(value: float, window: Sequence[float]) -> float:
    """The number of standard deviations by which `value` exceeds the median of `window`.

    The modified z-score (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993). It is
    robust: spikes inside the window barely move the median and the median absolute deviation.
    """
    center = median(window)
    sigma = _SIGMA * median(abs(x - center) for x in window)
    return (value - center) / max(sigma, _MIN_RELATIVE_SIGMA * abs(center), 1e-12)


class SpikeDetector:
    """Finds spikes, and records the rows that the weights have not seen because of them."""

    def __init__(self, config: schema.Guard, rows_per_step: int):
        self.config = config
        self.rows_per_step = rows_per_step
        self.thresholds = {"loss": config.loss_threshold, "grad_norm": config.grad_norm_threshold}
        self.windows = {name: deque[float](maxlen=config.window) for name in self.thresholds}
        self.streak = self.calm = 0
        self.rows = 0
        """Rows of the global order read so far."""
        self.skipped: list[list[int]] = []
        """Ranges [first, after) of rows the weights have not seen."""

    @property
    def acts(self) -> bool:
        """Whether a spike changes the update. If so, all ranks must judge bit-identical numbers."""
        return self.config.policy in ("skip", "rewind")

    def judge(self, step: int, loss: float | None, grad_norm: float) -> Spike | None:
        """Record the outcome of a step. Returns the spike, if it is one.

        Args:
            loss: None if the step predicted nothing. Its rows are read, and other steps aren't
                compared with it.
        """
        config = self.config
        self.rows += self.rows_per_step
        if config.policy == "off" or loss is None:
            return None
        values = {"loss": loss, "grad_norm": grad_norm}
        answers = [self._reason(name, value) for name, value in values.items()]
        reasons = [reason for reason in answers if reason]
        # Under "warn" spikes enter the window too; otherwise a lasting change would be reported
        # forever.
        is_usual = math.isfinite(loss) and math.isfinite(grad_norm) and not (reasons and self.acts)
        if is_usual and step > config.warmup_steps:
            for name, value in values.items():
                self.windows[name].append(value)
        if not reasons:
            self.calm += 1
            enough = config.window if config.policy == "rewind" else 1
            if self.calm >= enough:
                self.streak = 0
            return None
        self.calm = 0
        self.streak += self.acts
        action = "stop" if self.streak > config.limit else config.policy
        return Spike(step, " and ".join(reasons), action)

    def _reason(self, name: str, value: float) -> str | None:
        text = name.replace("_", " ")
        if not math.isfinite(value):
            # otherwise training.on_nonfinite decides
            return f"{text} {value}" if self.acts else None
        window = self.windows[name]
        threshold = self.thresholds[name]
        if not threshold or len(window) < self.config.window:
            return None
        sigmas = deviation(value, window)
        if sigmas <= threshold:
            return None
        return f"{text} {value:.4g}, {sigmas:.1f} standard deviations above {median(window):.4g}"

    def skip_rows(self, first: int) -> list[int]:
        """Record that the weights have not seen the rows since `first`; returns their range."""
        ranges = [r for r in self.skipped if r[1] < first]
        for r in self.skipped[len(ranges) :]:
            first = min(first, r[0])
        self.skipped = [*ranges, [first, self.rows]]
        return self.skipped[-1]

    def skip_step(self) -> list[int]:
        """`skip_rows` of the step just judged."""
        return self.skip_rows(self.rows - self.rows_per_step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "windows": {name: list(values) for name, values in self.windows.items()},
            "streak": self.streak,
            "calm": self.calm,
            "rows": self.rows,
            "skipped": [list(r) for r in self.skipped],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name, values in state["windows"].items():
            self.windows[name] = deque(values, maxlen=self.config.window)
        self.streak = state["streak"]
        self.calm = state["calm"]
        self.rows = state["rows"]
        self.skipped = [list(r) for r in state["skipped"]]


class UpdateGuard:
    """Decides about each step's update, and carries out a spike's action."""

    def __init__(
        self,
        config: schema.Guard,
        training: Training,
        checkpointer: Checkpointer,
        dump_folder: str,
        *,
        updates_in_backward: bool,
    ):
        """
        Args:
            updates_in_backward: `optimizer.early_step_in_backward`: gradients are applied before
            they can be judged.
        """
        self.config = config
        self.on_nonfinite = training.on_nonfinite
        self.advice = "Lower optimizer.lr or training.max_norm"
        if not training.max_norm:
            self.advice = "Lower optimizer.lr or set training.max_norm = 1.0"
        self.checkpointer = checkpointer
        self.updates_in_backward = updates_in_backward
        self.spikes = SpikeDetector(config, training.global_batch_size)
        self.journal = RunFile(Path(dump_folder, "guard.jsonl"))
        self._spike: Spike | None = None
        self._warned_empty = False

    def approve(self, step: int, rows: int, loss: float | None, grad_norm: float) -> bool:
        """Whether to update the weights with this step's gradients.

        Args:
            rows: rows of its batch, over all ranks.
            loss: None if the step predicted nothing.

        Raises:
            NonFiniteError: NaN or infinity, and `training.on_nonfinite = "stop"`.
        """
        self.spikes.rows_per_step = rows
        spike = self.spikes.judge(step, loss, grad_norm)
        if spike is not None and spike.action != "warn":
            self._spike = spike
            return False
        if loss is None:
            self._warn_empty(step)
            return False
        if math.isfinite(loss) and math.isfinite(grad_norm):
            if spike is not None:
                self._record(spike, "the update was made anyway (guard.policy)")
            return True
        what = f"loss {loss}, gradient norm {grad_norm}"
        if self.on_nonfinite == "stop":
            self.checkpointer.wait()
            outcome = "made already" if self.updates_in_backward else "skipped"
            raise NonFiniteError(
                f"step {step}: {what}. Its update was {outcome}; "
                f"{self.checkpointer.last_good()}.\n"
                f'{self.advice}, or set training.on_nonfinite = "skip" to continue without such '
                "updates."
            )
        self.spikes.skip_step()
        logger.warning(f"step {step}: {what}; update skipped", extra=event("skipped", step))
        return False

    def _warn_empty(self, step: int) -> None:
        if not self._warned_empty:
            self._warned_empty = True
            logger.warning(
                f"step {step}: no token of its batch is predicted, so it has no loss, and nothing "
                "is updated (later ones aren't reported). Raise training.global_batch_size or "
                "training.seq_len if turns of users fill whole batches"
            )

    def handle_spike(self) -> Resumed | None:
        """Carry out and log the action if the step's spike stops its update; the checkpoint of a
        rewind.

        Raises:
            GuardError: `guard.limit` is exceeded, or the weights can't be restored.
        """
        spike = self._spike
        self._spike = None
        if spike is None:
            return None
        if spike.action == "stop":
            self.checkpointer.wait()
            raise GuardError(
                f"step {spike.step}: {spike.reason}; {self.config.limit} attempts to recover "
                f"failed (guard.limit); {self.checkpointer.last_good()}.\n{self.advice}, resume "
                "from an earlier step (checkpoint.load_step), or raise guard.limit or the "
                "thresholds."
            )
        resumed = None
        if spike.action == "rewind":
            with phase("other", "rewinding to a checkpoint"):
                resumed = self.checkpointer.rewind(spike.step)
        if spike.action == "rewind" and resumed is None and self.updates_in_backward:
            raise GuardError(
                f"step {spike.step}: {spike.reason}. There is no checkpoint yet to rewind to, and "
                "the weights have already changed (optimizer.early_step_in_backward). Lower "
                "checkpoint.interval or optimizer.lr."
            )
        if resumed is None:
            note = "update skipped"
            if spike.action == "rewind":
                note += "; there is no checkpoint yet"
            self._record(spike, note, rows=self.spikes.skip_step())
            return None
        note = f"rewound to step {resumed.step}; training continues with the data after this step"
        rows = self.spikes.skip_rows(resumed.train_state["guard"]["rows"])
        self._record(spike, note, "rewound", back_to=resumed.step, rows=rows)
        return resumed

    def _record(self, spike: Spike, note: str, kind: str = "spike", **details: Any) -> None:
        details = {"policy": spike.action, "reason": spike.reason, **details}
        logger.warning(
            f"step {spike.step}: {spike.reason}; {note}", extra=event(kind, spike.step, **details)
        )
        if dist.get_rank() == 0:
            line = {"step": spike.step, **details, "time": time.time()}
            self.journal.append(json.dumps(line))
