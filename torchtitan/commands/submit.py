"""Write a Slurm job for a configuration, or a job array for many runs of it, after checking
everything:

    torchtitan submit my.toml --gpus-per-node 8 --time 24:00:00 --training.steps 100000 torchtitan
    submit my.toml --gpus-per-node 8 --nodes 1 --grid optimizer.lr=1e-4,3e-4 --grid debug.seed=1,2,3

The number of nodes follows from the layout, or is given by `--nodes`. Prints the command that
submits the job.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.commands.train import check, count_gpus, node_range
from torchtitan.config import load_config
from torchtitan.config.load.command_line import parse_args
from torchtitan.tools.launch import jobs
from torchtitan.tools.launch.grid import GridRun, in_folder, make_runs, run_in_turn, together
from torchtitan.tools.launch.job import (
    Job,
    add_job_options,
    array_script,
    check_words,
    job_name,
    nodes_and_ranks,
    one_line,
    script,
)
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.files import write_all
from torchtitan.utils.text import aligned, count, plural


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--gpus-per-node",
        type=count,
        metavar="N",
        help="ranks on a node; required for a Slurm job",
    )
    add(
        "--nodes",
        type=node_range,
        metavar="N|MIN:MAX",
        help="number of nodes, or a range (from the layout's degrees)",
    )
    add(
        "--job-name",
        type=job_name,
        metavar="NAME",
        help="name of the job (the configuration's)",
    )
    add_job_options(parser)
    add(
        "--output",
        type=one_line,
        metavar="FILE",
        help="file to write (<job name>.sbatch)",
    )
    add(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="a run for each value, or each combination of several --grid; lists as "
        "KEY='[[...], ...]'",
    )
    add(
        "--runs",
        type=Path,
        metavar="FILE",
        help="a run for each line of flags, or [[runs]] table of a .toml",
    )
    add(
        "--at-most",
        type=count,
        metavar="N",
        help="run only so many at once",
    )
    add(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="of the runs (<job.dump_folder>-grid)",
    )
    add(
        "--local",
        action="store_true",
        help="run them here, one after the other, instead",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print what would be written, and write nothing",
    )
    add(
        "--submit",
        action="store_true",
        help="submit the job too",
    )
    return parser


@dataclass(frozen=True)
class _Batch:
    """What is to be submitted, checked: one job, or an array of runs."""

    config: str
    runs: list[GridRun]
    """Empty for one job."""
    commands: list[list[str]]
    """The overrides of the job, or of each run."""
    folder: Path
    """The folder of all runs, or the job's dump folder."""
    nodes: tuple[int, int]
    ranks: int


def main(argv: list[str]) -> int:
    own = parser()
    options, config_argv = parse_args(own, argv, file_required=True)
    several = bool(options.grid or options.runs)
    if options.gpus_per_node is None and not options.local:
        own.error("the following arguments are required: --gpus-per-node")
    if not several and (options.at_most or options.folder or options.local):
        own.error("--at-most, --folder and --local are for several runs; add --grid or --runs")
    overrides = [word for word in config_argv if word != f"--job.config_file={options.config}"]
    check_words(options.config, overrides)
    if options.job_name is None:
        try:
            options.job_name = job_name(Path(options.config).stem)
        except argparse.ArgumentTypeError as error:
            raise ConfigError([f"--job-name: give one, as the file's name {error}"]) from error
    runs = make_runs(options.grid, options.runs) if several else []
    if runs and any(word.partition("=")[0] == "--job.dump_folder" for word in overrides):
        raise ConfigError(["--job.dump_folder: each run has its own, below --folder; give that"])
    batch = _checked(options, overrides, runs)
    return _run_here(options, batch) if options.local else _write(options, batch)


def _checked(
    options: argparse.Namespace,
    overrides: list[str],
    runs: list[GridRun],
) -> _Batch:
    """Check every run as its nodes will.

    Raises:
        ConfigError: what any of them is refused for.
    """
    base = [f"--job.config_file={options.config}", *overrides]
    config = load_config(base).config
    dump = config.job.dump_folder
    folder = Path(os.path.abspath(options.folder or (f"{dump.rstrip('/')}-grid" if runs else dump)))
    commands = [
        [*overrides, *in_folder(run, folder, config.checkpoint.folder)] for run in runs
    ] or [overrides]
    problems: dict[str, list[str]] = {}
    sizes: dict[tuple[tuple[int, int], int], str] = {}
    for name, words in zip([run.name for run in runs] or [""], commands, strict=True):
        argv = [f"--job.config_file={options.config}", *words]
        try:
            check_words(options.config, words)
            size = _size(options, argv)
            check(argv, *size, output=False)
            sizes.setdefault(size, name)
        except ConfigError as error:
            problems[name] = error.problems
    if problems:
        raise ConfigError(together(problems) if runs else problems[""])
    if len(sizes) > 1:
        need = " and ".join(
            f"{plural(nodes[1] * ranks, 'rank')} ({name})" for (nodes, ranks), name in sizes.items()
        )
        raise ConfigError(
            [
                f"--grid: the runs need {need}, but all tasks of an array have as many; "
                "submit them apart"
            ]
        )
    return _Batch(options.config, runs, commands, folder, *next(iter(sizes)))


def _size(options: argparse.Namespace, argv: list[str]) -> tuple[tuple[int, int], int]:
    """Fewest and most nodes, and the ranks on each."""
    if options.local:
        return (1, 1), options.gpus_per_node or count_gpus() or 1
    return nodes_and_ranks(load_config(argv).config, options.gpus_per_node, options.nodes)


def _write(options: argparse.Namespace, batch: _Batch) -> int:
    """Write the job, print how to submit it, and perhaps do so."""
    # A % in a folder's name is none of Slurm's patterns.
    log = f"{str(batch.folder).replace('%', '%%')}/%x-%A_%a.log" if batch.runs else None
    job = Job(options.job_name, batch.nodes, batch.ranks, options, log)
    if batch.runs:
        text = array_script(job, batch.config, batch.commands, options.at_most)
    else:
        text = script(job, batch.config, batch.commands[0])
    name = f"{options.job_name}.sbatch"
    path = Path(options.output or (batch.folder / name if batch.runs else name))
    fewest, most = batch.nodes
    number = plural(most, "node") if fewest == most else f"{fewest} to {most} nodes"
    each = f"{plural(len(batch.runs), 'run')}, each on " if batch.runs else ""
    if options.dry_run:
        print(
            f"{path}, not written: {each}{number} of {plural(batch.ranks, 'rank')}", file=sys.stderr
        )
        settings = "\n".join(line for line in text.splitlines() if line.startswith("#SBATCH"))
        print(f"{_table(batch.runs)}\n{settings}" if batch.runs else text.rstrip())
        return 0
    record = jobs.JobRecord(
        options.job_name,
        log or f"{str(Path.cwd()).replace('%', '%%')}/%x-%j.log",
        [run.name for run in batch.runs],
    )
    files = {path: os.fsencode(text)}
    if batch.runs:
        batch.folder.mkdir(parents=True, exist_ok=True)
        files[batch.folder / jobs.RECORD] = record.encode()
    write_all(files)
    print(f"{path}: {each}{number} of {plural(batch.ranks, 'rank')}", file=sys.stderr)
    print(f"sbatch {shlex.quote(str(path))}")
    if options.submit:
        jobs.submit(path, record, batch.folder)
    return 0


def _table(runs: Sequence[GridRun]) -> str:
    return aligned(
        [
            ["task", "run", "flags"],
            *([str(i), run.name, " ".join(run.flags)] for i, run in enumerate(runs)),
        ]
    )


def _run_here(options: argparse.Namespace, batch: _Batch) -> int:
    if options.dry_run:
        print(_table(batch.runs))
        return 0
    commands = [
        ["train", batch.config, "--nproc-per-node", str(batch.ranks), "--", *words]
        for words in batch.commands
    ]
    return run_in_turn([run.name for run in batch.runs], commands, batch.folder)
