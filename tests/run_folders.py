"""Folders like those that runs write, without training: curves, starts, events and where the time
went.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0
STEP_SECONDS = 30.0
STEP_TOKENS = 2**19
FLOPS_PER_TOKEN = 5e10


def record(
    step: int, *, shift: float = 0.0, seed: int = 0, at: float | None = None, **more: Any
) -> dict[str, Any]:
    """A record of training; the same for the same arguments."""
    noise = random.Random(f"{seed} {step}")
    loss = shift + 2 + 6 / math.sqrt(step) + noise.gauss(0, 0.04)
    rate = 7800 + noise.gauss(0, 40)
    return {
        "step": step,
        "loss": loss,
        "max_loss": loss + 0.4,
        "grad_norm": 0.5 + 3 / math.sqrt(step) + abs(noise.gauss(0, 0.1)),
        "lr": 3e-4 * min(1, step / 100),
        "tokens": step * STEP_TOKENS,
        "tokens_per_second": rate,
        "tflops": rate * FLOPS_PER_TOKEN / 1e12,
        "mfu": 40.57 + noise.gauss(0, 0.2),
        "memory_gib": 71.2,
        "step_time_s": STEP_SECONDS,
        "time": BEGAN + STEP_SECONDS * step if at is None else at,
    } | more


def append(folder: Path, *records: dict[str, Any]) -> None:
    """Add records to the run's metrics."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


PROMPTS = ("The capital of France is", "<b>Once</b> upon a time,\n")


def write_samples(folder: Path, *steps: int) -> None:
    """Add a text for each prompt and step to the run's samples."""
    with (folder / "samples.jsonl").open("a") as file:
        for step in steps:
            for i, prompt in enumerate(PROMPTS):
                text = f" text {i} of step {step} </script><script>alert(3)</script>"
                one = {"step": step, "prompt": prompt, "text": text, "end": "length"}
                file.write(json.dumps(one) + "\n")


def write_scores(folder: Path, step: int, value: float, **settings: Any) -> None:
    """Add what `torchtitan eval` records of a checkpoint."""
    scores = {"arc_easy/acc": value, "arc_easy/acc_stderr": 0.01}
    one = {"step": step, "time": BEGAN, "settings": settings, "scores": scores}
    with (folder / "evals.jsonl").open("a") as file:
        file.write(json.dumps(one) + "\n")


def write_run(
    folder: Path,
    steps: int = 300,
    *,
    every: int = 1,
    shift: float = 0.0,
    seed: int = 0,
    rich: bool = True,
    end: str | None = "completed",
    config: str = "",
) -> Path:
    """A run of so many steps: validations, and if `rich` sources, experts, benchmarks, three starts
    and some events.
    """
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(every, steps + 1, every):
            one = record(step, shift=shift, seed=seed)
            if rich:
                one |= {
                    "loss/web": one["loss"] + 0.3,
                    "loss/code": one["loss"] - 0.6,
                    "expert_load_max": 1 + 40 / (step + 20),
                }
                one |= {"expert_entropy": 1 - 2 / (step + 20)}
            file.write(json.dumps(one) + "\n")
            if step % (50 * every) == 0:
                at = {"step": step, "time": one["time"] + 5}
                file.write(json.dumps({"validation_loss": one["loss"] + 0.1, **at}) + "\n")
                if rich:
                    scores = {
                        "eval/arc_easy/acc": 0.25 + step / steps / 3,
                        "eval/arc_easy/acc_stderr": 0.02,
                    }
                    file.write(json.dumps({**scores, **at}) + "\n")
                    write_samples(folder, step)
    about = {
        "git": f"{'0af1' * 10}-dirty",
        "ranks": 16,
        "devices": {"NVIDIA H100 80GB HBM3": 16},
        "layout": {"dp_shard": 16},
    }
    whole = {
        "time": BEGAN,
        "last_seen": BEGAN + steps * STEP_SECONDS,
        "resumed_step": 0,
        "step": steps,
        "end": end,
    }
    starts = [whole | about]
    third = steps // 3
    if rich:
        ends = [BEGAN + third * i * STEP_SECONDS for i in range(4)]
        starts = [
            about
            | {
                "time": ends[0],
                "last_seen": ends[1] - 600,
                "resumed_step": 0,
                "step": third,
                "end": "preempted",
            },
            about
            | {
                "time": ends[1],
                "last_seen": ends[2] - 1200,
                "resumed_step": third,
                "step": 2 * third,
                "end": "failed: rank 5: CUDA error: uncorrectable ECC error encountered",
            },
            about
            | {
                "time": ends[2],
                "last_seen": ends[3],
                "resumed_step": 2 * third,
                "step": steps,
                "end": end,
                "ranks": 8,
                "layout": {"dp_shard": 4, "tp": 2},
            },
        ]
        kinds = [
            ("saved", step, f"Saved {folder}/checkpoint/step-{step}")
            for step in range(20, steps + 1, 20)
        ]
        kinds += [("spike", third // 2, f"step {third // 2}: loss 9.81 is a spike")]
        kinds += [
            ("rewound", third // 2, f"rewound to step {third // 2 - 10}"),
            ("stage", third, "stage 2 of data: annealing"),
        ]
        kinds += [("straggler", 2 * third, "rank 3 on node-7 is 34% slower than the others")]
        with (folder / "events.jsonl").open("w") as file:
            for kind, step, message in sorted(kinds, key=lambda one: one[1]):
                event = {
                    "time": BEGAN + step * STEP_SECONDS,
                    "kind": kind,
                    "step": step,
                    "message": message,
                }
                file.write(json.dumps(event) + "\n")
    seconds = {
        "steps": steps * STEP_SECONDS * 0.9,
        "start": 90.0,
        "saves": steps * 1.5,
        "restart": 120.0 * len(starts),
    }
    share = 100 * seconds["steps"] / sum(seconds.values())
    goodput = {"percent": share, "seconds": seconds}
    (folder / "run.json").write_text(
        json.dumps({"format": 1, "goodput": goodput, "starts": starts})
    )
    (folder / "config.toml").write_text(
        f'[job]\ndescription = "a test"\n[training]\nsteps = {steps}\n'
        f"[validation]\nenable = true\nfreq = {50 * every}\n{config}"
    )
    return folder
