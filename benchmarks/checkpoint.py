"""Training time lost per save, by async mode: `python benchmarks/checkpoint.py [--folder DIR] [--saves 4]`.

A model whose full state (weights and AdamW's two moments) is about 500 MB trains on one process. For each mode the
script measures what a save adds to the step that makes it, and to the steps while it is being written. The
first save of each mode, which allocates staging buffers, is shown but not counted.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

STEPS_BETWEEN = 6
MODES = ["disabled", "async", "async_with_pinned_mem"]


def measure(mode: str, folder: Path, saves: int) -> dict[str, float]:
    """Seconds lost per save: the caller's wait, and everything the saves added to the run."""
    from torchtitan.config import resolve
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    argv = [
        f"--job.dump_folder={folder / mode}",
        f"--training.steps={(saves + 1) * STEPS_BETWEEN * 2}",
        "--training.seq_len=128",
        "--training.local_batch_size=4",
        "--training.mixed_precision_param=float32",
        "--checkpoint.enable",
        "--checkpoint.interval=1000000",
        "--checkpoint.keep_latest_k=2",
        f"--checkpoint.async_mode={mode}",
        "--model.overrides.dim=768",
        "--model.overrides.n_heads=12",
        "--model.overrides.n_kv_heads=12",
        "--model.overrides.ffn_dim=2048",
        "--metrics.log_freq=1000000",
    ]
    config = resolve(argv, 1).config
    trainer = Trainer(config, preflight(config))
    batches = iter(trainer.parts.loader)
    count = sum(p.numel() for p in trainer.parts.models[0].parameters())

    def steps() -> float:
        """Seconds for a stretch of steps, including any wait for a copy being made."""
        start = time.perf_counter()
        for _ in range(STEPS_BETWEEN):
            trainer._train_one(batches)
        return time.perf_counter() - start

    steps()
    plain, blocked, stretch = [], [], []
    for _ in range(saves + 1):
        trainer.checkpointer.wait()
        plain.append(steps())
        start = time.perf_counter()
        trainer._save()
        blocked.append(time.perf_counter() - start)
        waiting = time.perf_counter()
        trainer.checkpointer.wait_staged()
        blocked[-1] += time.perf_counter() - waiting if mode == "async" else 0.0
        stretch.append(steps())
    trainer.checkpointer.close()
    trainer.close()
    base = statistics.median(plain)
    return {
        "state_mb": 3 * 4 * count / 1e6,
        "first_blocked_s": blocked[0],
        "blocked_s": statistics.median(blocked[1:]),
        "slowdown_s": statistics.median(s - base for s in stretch[1:]),
        "step_s": base / STEPS_BETWEEN,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        print(f"time a save keeps training waiting, sync / {mode}: {sync / results[mode]['blocked_s']:.1f}x")


if __name__ == "__main__":
    main()
