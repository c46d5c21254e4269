"""The best few proposals of a search, measured: each trains for some steps, and the fastest is
adopted.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from torchtitan.tools.planner.calibrate import Measured, read_run
from torchtitan.tools.planner.planner import planned_toml
from torchtitan.tools.planner.predict import Plan
from torchtitan.utils.errors import UserError
from torchtitan.utils.wording import aligned, plural, show_gib, show_rate

STEPS = 20
SCRIPT = "try.sh"


def folder_of(output: Path) -> Path:
    """The folder of the trials whose fastest is written to `output`."""
    return output.with_name(f"{output.stem}-tries")


def trial_files(plans: Sequence[Plan], flags: list[str], output: Path) -> dict[Path, bytes]:
    """A TOML for each plan, and a script that trains each on a node and adopts the fastest.

    Args:
        flags: the configuration that the plans were made from.
        output: file for the fastest.
    """
    folder = folder_of(output)
    files = {
        folder / f"{i}.toml": planned_toml(plan, flags).encode() for i, plan in enumerate(plans, 1)
    }
    world = plans[0].workload.world
    ranks = min(world, plans[0].hardware.gpus_per_host or plans[0].hardware.gpus_per_node)
    lines = [
        "#!/bin/sh",
        f"# Trains each of {plural(len(plans), 'layout')} for {STEPS} steps and writes the fastest "
        f"to {output}.",
    ]
    if world > ranks:
        lines.append(
            "# Start it on every node, with options of `torchtitan train` such as --nnodes."
        )
    for file in files:
        words = [
            *("torchtitan", "train", str(file), "--nproc-per-node", str(ranks)),
            f"--job.dump_folder={_run_folder(file)}",
            *(f"--training.steps={STEPS}", "--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1"),
            *("--checkpoint.no-enable", "--validation.no-enable"),
        ]
        lines.append(f'{shlex.join(words)} "$@"')
    lines.append(shlex.join(["torchtitan", "plan", f"--adopt={folder}", f"--write={output}"]))
    files[folder / SCRIPT] = ("\n".join(lines) + "\n").encode()
    return files


def _run_folder(file: Path) -> Path:
    return file.with_name(f"run-{file.stem}")


def fastest_trial(folder: Path) -> tuple[str, bytes]:
    """A table of the trials in a folder, and the TOML of the fastest.

    Raises:
        UserError: none has trained.
    """
    measured: list[tuple[Path, Measured]] = []
    rows = [["layout", "tokens/s per rank", "memory"]]
    for file in sorted(folder.glob("*.toml")):
        try:
            run = read_run(_run_folder(file))
        except UserError:
            rows.append([str(file), "failed", "-"])
            continue
        measured.append((file, run))
        rows.append(
            [str(file), show_rate(run.tokens_per_second), show_gib(run.taken.peak_gib or 0.0)]
        )
    if not measured:
        raise UserError(f"--adopt: no run in {folder} has trained; start {folder / SCRIPT} first")
    file, _ = max(measured, key=lambda trial: trial[1].tokens_per_second)
    return f"{aligned(rows)}\nThe fastest: {file}", file.read_bytes()
