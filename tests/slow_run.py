"""A tiny run whose steps take their time, watched through its files while others interrupt it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import arguments, losses, read_metrics, train

ENDLESS = 100_000
"""Steps of a run that is stopped."""
_SLOW = """
import time
from torchtitan.config.registry import callbacks
from torchtitan.train.callbacks import Callback

@callbacks.register("slow")
class Slow(Callback):
    def after_step(self, run, result):
        time.sleep({seconds})
"""


class SlowRun:
    """A run in `folder`, which has to be on `PYTHONPATH`; subclasses start it."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        seconds: float = 0.1,
        steps: int = ENDLESS,
        global_batch: int = 8,
    ):
        """
        Args:
            seconds: how long each step sleeps.
        """
        self.folder = folder
        self.dump = folder / "out"
        (folder / "slow_steps.py").write_text(_SLOW.format(seconds=seconds))
        plain = [
            "--checkpoint.enable",
            f"--lr_scheduler.total_steps={ENDLESS}",
            "--optimizer.lr=1e-3",
        ]
        self._plain = arguments(folder, *plain, *flags, steps=steps, global_batch=global_batch)
        slow = ["--experimental.custom_import=slow_steps", "--training.callbacks=slow"]
        self.argv = [*self._plain, *slow]

    def log(self) -> str:
        """What it has printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("*log")))

    def starts(self) -> list[dict[str, Any]]:
        path = self.dump / "run.json"
        return json.loads(path.read_text())["starts"] if path.exists() else []

    def wait(self, what: str, condition: Callable[[], bool], timeout: float = 150) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.starts()}\n{self.log()[-4000:]}"
            time.sleep(0.1)

    def wait_for_ranks(self, world: int, starts: int, steps: int = 3, timeout: float = 150) -> None:
        """Until the `starts`-th start, with `world` ranks, has made `steps` steps."""

        def trains() -> bool:
            last = (self.starts() or [{"ranks": 0, "step": 0, "resumed_step": 0}])[-1]
            return (
                len(self.starts()) >= starts
                and last["ranks"] == world
                and last["step"] >= last["resumed_step"] + steps
            )

        self.wait(f"{world} ranks", trains, timeout)

    def check(self, ranks: Callable[..., list[Any]]) -> None:
        """The whole curve, against a run of one rank to the same step."""
        metrics = [r for r in read_metrics(self.dump) if "loss" in r]
        steps = metrics[-1]["step"]
        assert [r["step"] for r in metrics] == list(range(1, steps + 1))
        argv = [
            *self._plain,
            f"--training.steps={steps}",
            f"--job.dump_folder={self.folder / 'whole'}",
        ]
        whole = ranks(1, train, argv, timeout=200)[0]
        assert [r["loss"] for r in metrics] == pytest.approx(losses(whole), rel=1e-4)
        assert metrics[-1]["tokens"] == whole["metrics"][-1]["tokens"]
