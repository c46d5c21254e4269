"""Runs two ways of doing the same thing in turn, each in a process of its own, and compares what they cost.

A side is a command that prints one JSON line last. Costs are user + system seconds of the process and its children, as
the operating system counts them: on a shared machine wall time is noise.
"""

import json
import os
import statistics
import subprocess
import sys


def run(command: list[str], threads: int) -> dict[str, float]:
    """Run one side; its JSON line. Raises if it fails."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "LOG_RANK": "none"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def alternate(sides: dict[str, list[str]], rounds: int, threads: int) -> dict[str, list[dict[str, float]]]:
    """All sides in turn, `rounds` times, after one round that is not counted (it fills the file cache)."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name, command in sides.items():
            result = run(command, threads)
            if i:
                results[name].append(result)
                print(f"  round {i}  {name:12} " + "  ".join(f"{k} {v:,.4g}" for k, v in result.items()), flush=True)
    return results


def ratios(results: dict[str, list[dict[str, float]]], ours: str, theirs: str, key: str) -> str:
    """Median, minimum and maximum over the rounds of ours / theirs."""
    values = [a[key] / b[key] for a, b in zip(results[ours], results[theirs], strict=True)]
    return f"{statistics.median(values):.3f} (min {min(values):.3f}, max {max(values):.3f})"
