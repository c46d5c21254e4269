"""The best few proposals of a search, measured: each trains for some steps, and the fastest is
adopted.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from torchtitan.tools.launch.slurm_jobs import RECORD, JobRecord
from torchtitan.tools.launch.slurm_script import SlurmJob, add_job_options, array_log, array_script
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
    """A TOML for each plan, and a script that trains each and adopts the fastest: here, or as jobs
    of Slurm if that takes several nodes.

    Args:
        flags: the configuration that the plans were made from.
        output: file for the fastest.
    """
    hardware = plans[0].hardware
    world = plans[0].workload.world
    most = min(world, hardware.devices_per_host)
    ranks = next(number for number in range(most, 0, -1) if world % number == 0)
    output = output.absolute() if world > ranks else output  # a node's folder may be another
    folder = folder_of(output)
    trials = {folder / f"{i}.toml": plan for i, plan in enumerate(plans, 1)}
    files = {file: planned_toml(plan, flags).encode() for file, plan in trials.items()}
    adopt = shlex.join(["torchtitan", "plan", f"--adopt={folder}", f"--write={output}"])
    if world > ranks:
        job = _job(folder, world // ranks, ranks)
        runs = [(str(file), _trial_flags(file)) for file in trials]
        array = folder / "try.sbatch"
        files[array] = array_script(job, runs, at_most=1).encode()  # or they share the network
        files[folder / RECORD] = JobRecord(
            job.name, str(job.log), [_run_folder(file).name for file in trials]
        ).encode()
        commands = _slurm_commands(job, array, adopt)
    else:
        train = ["torchtitan", "train", "--nproc-per-node", str(ranks)]
        commands = [
            f'{shlex.join([*train, str(file), *_trial_flags(file)])} "$@"' for file in trials
        ]
        commands.append(adopt)
    intro = f"# Trains each of {plural(len(plans), 'layout')} for {STEPS} steps and writes the"
    lines = ["#!/bin/sh", f"{intro} fastest to {output}.", *commands]
    files[folder / SCRIPT] = ("\n".join(lines) + "\n").encode()
    return files


def _trial_flags(file: Path) -> list[str]:
    return [
        *(f"--job.dump_folder={_run_folder(file)}", f"--training.steps={STEPS}"),
        *("--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1"),
        *("--checkpoint.no-enable", "--validation.no-enable"),
    ]


def _job(folder: Path, nodes: int, ranks: int) -> SlurmJob:
    """The job of the trials in a folder, with the settings of `submit` left to sbatch's options."""
    options = argparse.ArgumentParser()
    add_job_options(options)
    defaults = options.parse_args([])
    return SlurmJob(folder.name, (nodes, nodes), ranks, defaults, array_log(folder), beside=True)


def _slurm_commands(job: SlurmJob, array: Path, adopt: str) -> list[str]:
    """Commands that submit the trials, and a job that adopts the fastest when all have ended."""
    log = str(job.log).replace("%A_%a", "%j")
    adopting = [f"--job-name={job.name}-adopt", f"--output={log}"]
    return [
        "# Options are those of sbatch, as --partition, for all jobs.",
        f'trials=$(sbatch --parsable "$@" {shlex.quote(str(array))}) || exit',
        f'sbatch --dependency="afterany:${{trials%%;*}}" --ntasks=1 {shlex.join(adopting)} "$@" '
        f"--wrap={shlex.quote(adopt)}",
    ]


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
