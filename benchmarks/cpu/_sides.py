"""Runs several ways of doing the same thing in turn, each in a process of its own, and compares
what they cost.

A side is a command that prints one JSON line last. Costs are user + system seconds of the process
and its children, as the operating system counts them: on a shared machine wall time is noise.
"""

import json
import os
import statistics
import subprocess
import sys

Results = dict[str, list[dict[str, float]]]
"""Each side's measurements, by round. Round 0 fills the file cache and the compiler's, and is not
counted.
"""


def run(command: list[str], threads: int) -> dict[str, float]:
    """Run one side; its JSON line. Ends the program if the side fails."""
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "LOG_RANK": "none",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def alternate(sides: dict[str, list[str]], rounds: int, threads: int) -> Results:
    """All sides in turn, `rounds` times after round 0."""
    results: Results = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name, command in sides.items():
            result = run(command, threads)
            results[name].append(result)
            print(
                f"  round {i}  {name:22} " + "  ".join(f"{k} {v:,.6g}" for k, v in result.items()),
                flush=True,
            )
    return results


def ratios(results: Results, ours: str, theirs: str, key: str) -> str:
    """Median, minimum and maximum over the counted rounds of ours / theirs."""
    values = [a[key] / b[key] for a, b in zip(results[ours][1:], results[theirs][1:], strict=True)]
    return f"{statistics.median(values):.3f} (min {min(values):.3f}, max {max(values):.3f})"


def median(results: Results, side: str, key: str) -> float:
    """Over the counted rounds."""
    return statistics.median(result[key] for result in results[side][1:])
