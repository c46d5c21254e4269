"""Write a Slurm job after checking everything, or an array of jobs for many runs:

    torchtitan submit my.toml --gpus-per-node 8 --time 24:00:00 --training.steps 100000
    torchtitan submit my.toml --gpus-per-node 8 --nodes 1 --runs runs.txt --at-most 4

The number of nodes follows from the layout, or is given by `--nodes`. Prints the command that
submits the job.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from torchtitan.commands.train import check, node_range
from torchtitan.config import load_config
from torchtitan.config.load.command_line import parse_args
from torchtitan.tools.launch.slurm_script import (
    JobSize,
    Run,
    check_folders,
    check_words,
    has_slurm,
    job_name,
    job_size,
    read_runs,
    script,
    single_line,
)
from torchtitan.utils.argument_types import command_parser, count, path_or_url
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.files import write_output
from torchtitan.utils.wording import plural


def parser() -> argparse.ArgumentParser:
    parser = command_parser("submit", __doc__)
    add = parser.add_argument
    add("--gpus-per-node", type=count, required=True, metavar="N", help="ranks on a node")
    add(
        "--nodes",
        type=node_range,
        metavar="N|MIN:MAX",
        help="number of nodes, or a range (from the layout's degrees)",
    )
    add("--job-name", type=job_name, metavar="NAME", help="name of the job (the configuration's)")
    add(
        "--time",
        type=single_line,
        metavar="TIME",
        help="time limit; the run saves and is requeued 5 minutes before it",
    )
    add("--partition", type=single_line, metavar="NAME")
    add("--account", type=single_line, metavar="NAME")
    add(
        "--container",
        type=single_line,
        metavar="IMAGE",
        help="image: docker://..., .sqsh (pyxis), .sif (Apptainer); others: registry/name:tag",
    )
    add(
        "--sbatch",
        type=single_line,
        action="append",
        default=[],
        metavar="LINE",
        help="another #SBATCH line, as --sbatch=--qos=high",
    )
    add(
        "--output",
        type=lambda text: path_or_url(single_line(text)),
        metavar="FILE",
        help="file to write (<job name>.sbatch)",
    )
    add(
        "--runs",
        type=Path,
        metavar="FILE",
        help="an array, with a run for each line of flags; folders are <job.dump_folder>/<task>",
    )
    add("--at-most", type=count, metavar="N", help="with --runs: run only so many at once")
    add("--dry-run", action="store_true", help="print what would be written, and write nothing")
    add("--submit", action="store_true", help="submit the job too")
    return parser


def main(argv: list[str]) -> int:
    command = parser()
    options, overrides = parse_args(command, argv, file_required=True)
    if options.at_most and not options.runs:
        command.error("--at-most is for an array; add --runs")
    overrides = [word for word in overrides if word != f"--job.config_file={options.config}"]
    check_words(options.config, overrides)
    if options.job_name is None:
        try:
            options.job_name = job_name(Path(options.config).stem)
        except argparse.ArgumentTypeError as error:
            raise ConfigError([f"--job-name: give one, as the file's name {error}"]) from error
    config = [f"--job.config_file={options.config}", *overrides]
    path = Path(f"{options.job_name}.sbatch")
    runs = []
    if options.runs:
        dump = load_config(config).config.job.dump_folder
        runs = read_runs(options.runs, dump)
        path = Path(dump, path)
    path = Path(options.output or path)
    size = _check(options, config, runs or [Run("", [])])
    text = script(options, size, overrides, runs, path.parent)
    each = f"{plural(len(runs), 'run')}, each on " if runs else ""
    return _write(options, path, text, f"{each}{size}")


def _check(options: argparse.Namespace, config: list[str], runs: list[Run]) -> JobSize:
    """Check every run as its nodes will check it, and return the size of each.

    Args:
        config: flags of the configuration that all runs share.

    Raises:
        ConfigError: problems of all runs, or the runs need different numbers of ranks.
    """
    where: dict[str, str] = {}
    sizes: dict[JobSize, str] = {}
    configs = {}
    for run in runs:
        try:
            argv = [*config, *run.flags]
            check_words(options.config, run.flags)
            size = job_size(load_config(argv).config, options.gpus_per_node, options.nodes)
            sizes.setdefault(size, run.where)
            configs[run.where] = check(argv, size.nodes, size.ranks, output=False)
        except ConfigError as error:
            for problem in error.problems:
                where.setdefault(problem, run.where)
    if where:
        raise ConfigError([f"{line}{problem}" for problem, line in where.items()])
    check_folders(configs)
    first, *others = sizes
    for other in others:
        raise ConfigError(
            [
                f"{sizes[other]}needs {other}, the first run {first}; all tasks of an array have "
                "one size: submit them apart"
            ]
        )
    return first


def _write(options: argparse.Namespace, path: Path, text: str, size: str) -> int:
    """Write the job and print the command that submits it; with --submit, also run it."""
    if options.dry_run:
        print(f"{path}, not written: {size}", file=sys.stderr)
        print(text.rstrip())
        return 0
    write_output({path: os.fsencode(text)})
    print(f"{path}: {size}", file=sys.stderr)
    if not has_slurm():
        print(
            "There is no Slurm here, so the job has no paths of this machine: on the cluster, run "
            f"sbatch in a folder with {options.config}; TORCHTITAN_ROOT names the checkout, if it "
            "isn't that folder, TORCHTITAN_PYTHON the interpreter of an installed package",
            file=sys.stderr,
        )
    print(f"sbatch {shlex.quote(str(path))}", flush=True)
    return _submit(path) if options.submit else 0


def _submit(script: Path) -> int:
    """Submit a job; its number is sbatch's output.

    Raises:
        UserError: there is no Slurm here.
    """
    try:
        return subprocess.run(["sbatch", str(script)], check=False).returncode
    except FileNotFoundError:
        raise UserError(
            f"--submit: this machine has no sbatch; submit {script} on a machine that has Slurm"
        ) from None
