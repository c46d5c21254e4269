"""Low-precision recipes against a band of seeds: `python benchmarks/precision.py --out FOLDER`.

A small Llama trains on the demo text with several seeds in bf16, which gives the band in which
runs that differ by nothing but chance lie; then with the same seeds in each 8-bit recipe, emulated,
so that it runs anywhere. A seed decides initial weights and order of data. Two controls say what
the comparison can see: fp32, which should lie in the band, and bf16 weights without a master copy,
which should not.

Every run adds its rows to FOLDER/curves.csv; one that is there isn't repeated, so the command may
be killed and run again, also with more seeds. The table is printed at the end.
"""

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SIZES = {
    "model.overrides.n_layers": 4,
    "model.overrides.dim": 128,
    "model.overrides.n_heads": 4,
    "model.overrides.n_kv_heads": 4,
    "model.overrides.ffn_dim": 384,
    "training.seq_len": 128,
    "training.local_batch_size": 8,
}
"""A model of 1.4 M parameters."""
VALIDATION_STEPS = 16
WINDOW = 20
"""Steps over which a training loss is averaged."""

BF16 = ["training.mixed_precision_param=bfloat16"]
FLOAT8 = [
    *BF16,
    "model.converters=float8",
    "quantize.linear.float8.emulate=true",
    "quantize.linear.float8.filter_fqns=output",
]
MX = [*BF16, "model.converters=mx", "quantize.linear.mx.recipe_name=mxfp8_emulated"]
BAND = "bf16"
RECIPES = {
    BAND: BF16,
    "Float8 tensorwise": [*FLOAT8, "quantize.linear.float8.recipe_name=tensorwise"],
    "Float8 rowwise": [*FLOAT8, "quantize.linear.float8.recipe_name=rowwise"],
    "MXFP8": MX,
    "control: bf16 weights": [*BF16, "training.dtype=bfloat16"],
    "control: fp32": ["training.mixed_precision_param=float32"],
    "Float8 rowwise_with_gw_hp": [*FLOAT8, "quantize.linear.float8.recipe_name=rowwise_with_gw_hp"],
}

Curve = dict[int, float]
"""Loss by step."""
Curves = dict[tuple[str, int], Curve]
"""By recipe and seed."""
FINAL = -1
"""The key of a curve's validation loss."""


def train(name: str, seed: int, steps: int) -> Curve:
    """Train one model in a process of its own.

    Returns:
        The loss of every step, and the validation loss at the end, of the same rows for all runs.
    """
    with tempfile.TemporaryDirectory(prefix="titan-precision-") as folder:
        settings = {
            **SIZES,
            "job.dump_folder": folder,
            "debug.seed": seed,
            "training.dataset": "demo",
            "training.steps": steps,
            "optimizer.lr": 2e-3,
            "lr_scheduler.warmup_steps": 20,
            "lr_scheduler.min_lr_factor": 0.1,
            "activation_checkpoint.mode": "none",
            "metrics.log_freq": 1,
            "validation.enable": "true",
            "validation.dataset": "demo_validation",
            "validation.freq": steps,
            "validation.steps": VALIDATION_STEPS,
        }
        flags = [f"--{key}={value}" for key, value in settings.items()]
        flags += [f"--{setting}" for setting in RECIPES[name]]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [sys.executable, "-m", "torchtitan", "train", *flags],
            capture_output=True,
            text=True,
            env=environment,
        )
        if done.returncode:
            sys.exit(f"{name}, seed {seed} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    curve = Curve()
    for line in map(json.loads, lines):
        if "loss" in line:
            curve[line["step"]] = line["loss"]
        if "validation_loss" in line:
            curve[FINAL] = line["validation_loss"]
    return curve


def read(path: Path) -> Curves:
    """The complete curves of earlier runs, by recipe and seed."""
    curves: Curves = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                curve = curves.setdefault((row["recipe"], int(row["seed"])), {})
                curve[int(row["step"])] = float(row["loss"])
    return {key: curve for key, curve in curves.items() if FINAL in curve}


def write(path: Path, curves: Curves) -> None:
    """Replace the file as a whole, so that no row is ever cut off."""
    new = path.with_suffix(".new")
    with new.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["recipe", "seed", "step", "loss"])
        for (name, seed), curve in curves.items():
            rows.writerows([name, seed, step, loss] for step, loss in curve.items())
    new.replace(path)


def band_at(curves: Curves, step: int) -> list[float]:
    """The losses of all seeds of the band at a step."""
    return [smoothed(curve, step) for (name, _), curve in curves.items() if name == BAND]


def smoothed(curve: Curve, step: int) -> float:
    """The mean training loss of the `WINDOW` steps up to `step`; the validation loss at `FINAL`."""
    if step == FINAL:
        return curve[FINAL]
    return statistics.mean(curve[i] for i in range(max(1, step - WINDOW + 1), step + 1))


def compared(curves: Curves) -> dict[str, list[int]]:
    """The seeds of each recipe beside the band, of those that have been trained."""
    seeds = {
        name: sorted(seed for other, seed in curves if other == name and (BAND, seed) in curves)
        for name in RECIPES
    }
    return {name: found for name, found in seeds.items() if name != BAND and len(found) > 1}


def table(curves: Curves, at: Sequence[int]) -> str:
    """A Markdown table of losses at the steps `at` and in validation: the band, and each recipe's
    mean with the number of its runs that lie in the band.
    """
    lines = ["| loss | " + " | ".join([*(f"step {step}" for step in at), "validation"]) + " |"]
    lines.append("|---" * (len(at) + 2) + "|")
    points = [*at, FINAL]
    band = {step: band_at(curves, step) for step in points}
    runs = len(band[FINAL])
    for what, choose in (("mean", statistics.mean), ("minimum", min), ("maximum", max)):
        cells = " | ".join(f"{choose(band[step]):.4f}" for step in points)
        lines.append(f"| {BAND}, {what} of {runs} seeds | {cells} |")
    for name, seeds in compared(curves).items():
        cells = []
        for step in points:
            losses = [smoothed(curves[name, seed], step) for seed in seeds]
            inside = sum(min(band[step]) <= loss <= max(band[step]) for loss in losses)
            cells.append(f"{statistics.mean(losses):.4f} ({inside}/{len(seeds)})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(curves: Curves, last: int) -> str:
    """A Markdown table: distances at the end, in the band's standard deviations, and by pairs."""
    lines = [
        "| | runs | z, training | z, validation | minus bf16 of the same seed, validation |",
        "|---|---|---|---|---|",
    ]
    for name, seeds in compared(curves).items():
        scores = []
        for step in (last, FINAL):
            deviation = statistics.stdev(band_at(curves, step))
            pairs = [
                smoothed(curves[name, seed], step) - smoothed(curves[BAND, seed], step)
                for seed in seeds
            ]
            scores.append(f"{statistics.mean(pairs) / deviation:+.2f}")
        error = statistics.stdev(pairs) / math.sqrt(len(pairs))
        paired = f"{statistics.mean(pairs):+.4f} ± {error:.4f}"
        lines.append(f"| {name} | {len(seeds)} | {' | '.join(scores)} | {paired} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for curves.csv")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--report", action="store_true", help="only print what has been trained")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: one run has no band")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "curves.csv"
    curves = read(path)
    seeds = range(1, options.seeds + 1)
    for name in [] if options.report else RECIPES:
        for seed in seeds:
            done = curves.get((name, seed), {})
            if max(done, default=0) != options.steps:
                curves[name, seed] = train(name, seed, options.steps)
                write(path, curves)
            final = curves[name, seed][FINAL]
            print(f"  {name}, seed {seed}: validation loss {final:.4f}", flush=True)
    at = [options.steps * i // 4 for i in range(1, 5)]
    print(f"\n{table(curves, at)}\n\n{verdicts(curves, options.steps)}")


if __name__ == "__main__":
    main()
