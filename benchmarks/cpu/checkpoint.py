"""Training time lost per save, by async mode: `python benchmarks/cpu/checkpoint.py [--folder DIR]
[--saves 4]`.

A model whose full state (weights and AdamW's two moments) is about 500 MB trains on one process.
For each mode the script measures what a save adds to the step that makes it, and to the steps while
it is being written. The first save of each mode, which allocates staging buffers, is shown but not
counted.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STRETCH = 6
"""Steps that are timed together: two stretches from save to save, one while it is written, one
undisturbed.
"""
MODES = ["disabled", "async", "async_with_pinned_mem"]


def measure(
    mode: str, folder: Path, saves: int, *, stretch: int = STRETCH, extra: Sequence[str] = ()
) -> dict[str, float]:
    """Seconds lost per save: the caller's wait, and everything the saves added to the run.

    Args:
        stretch: steps that are timed together.
        extra: flags that change the model.
    """
    from torchtitan.config import resolve
    from torchtitan.train.callbacks import Callback
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    argv = [
        f"--job.dump_folder={folder / mode}",
        f"--training.steps={(saves + 1) * 2 * stretch + stretch + 1}",
        "--training.seq_len=128",
        "--training.local_batch_size=4",
        "--training.mixed_precision_param=float32",
        "--checkpoint.enable",
        f"--checkpoint.interval={2 * stretch}",
        "--checkpoint.keep_latest_k=2",
        f"--checkpoint.async_mode={mode}",
        "--model.overrides.dim=768",
        "--model.overrides.n_heads=12",
        "--model.overrides.n_kv_heads=12",
        "--model.overrides.ffn_dim=2048",
        "--metrics.log_freq=1000000",
        *extra,
    ]
    config = resolve(argv, 1).config

    class After(Callback):
        def __init__(self, function: Callable[[], None]):
            self.function = function

        def after_step(self, run: Any, result: Any) -> None:
            self.function()

    before = After(lambda: times.before_save())
    after = After(lambda: times.after_save())
    trainer = Trainer(config, preflight(config), arrange=lambda ours: (before, *ours, after))
    count = sum(p.numel() for p in trainer.engine.models[0].parameters())
    times = _Times(trainer, stretch)
    trainer.train()
    trainer.close()
    base = statistics.median(times.plain)
    return {
        "state_mb": 3 * 4 * count / 1e6,
        "first_blocked_s": times.blocked[0],
        "blocked_s": statistics.median(times.blocked[1:]),
        "slowdown_s": statistics.median(s - base for s in times.writing[1:]),
        "step_s": base / stretch,
    }


class _Times:
    """Seconds of each save, and of the stretches of steps before it and while it is being
    written.
    """

    def __init__(self, trainer: Any, stretch: int):
        self.trainer = trainer
        self.stretch = stretch
        self.plain: list[float] = []
        self.blocked: list[float] = []
        self.writing: list[float] = []
        self._mark = 0.0

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds = now - self._mark
        self._mark = now
        return seconds

    def before_save(self) -> None:
        if self.trainer.progress.step % (2 * self.stretch) == 0:
            self.plain.append(self._lap())

    def after_save(self) -> None:
        step = self.trainer.progress.step
        checkpointer = self.trainer.checkpointer
        if step % (2 * self.stretch) == 0:
            if self.trainer.config.checkpoint.async_mode == "async":
                # as the next update does; a copy to pinned memory is over by then
                checkpointer.wait_staged()
            self.blocked.append(self._lap())
        elif step % self.stretch == 0:
            if step > self.stretch:
                self.writing.append(self._lap())
            checkpointer.wait()
            self._lap()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=None, help="where to write (a new temporary folder)")
    parser.add_argument("--saves", type=int, default=4)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="titan-checkpoint-", dir=options.folder))
    try:
        results = {mode: measure(mode, folder, options.saves) for mode in MODES}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for mode, result in results.items():
        print(f"{mode:24}" + "  ".join(f"{k} {v:.4g}" for k, v in result.items()))
    sync = results["disabled"]["blocked_s"]
    for mode in MODES[1:]:
        print(
            f"time a save keeps training waiting, sync / {mode}: "
            f"{sync / results[mode]['blocked_s']:.1f}x"
        )


if __name__ == "__main__":
    main()
