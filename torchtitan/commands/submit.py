"""Write a job for Slurm, Kubernetes or SkyPilot, or jobs for many runs of a configuration, after
checking everything:

    torchtitan submit my.toml --gpus-per-node 8 --time 24:00:00 --training.steps 100000
    torchtitan submit my.toml --gpus-per-node 8 --nodes 1 --grid optimizer.lr=1e-4,3e-4
    torchtitan submit my.toml --gpus-per-node 8 --to jobset --container IMAGE --volume CLAIM:/data
    torchtitan submit my.toml --gpus-per-node 8 --to skypilot --accelerator H100 --spot

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

from torchtitan.commands.train import check, node_range
from torchtitan.config import Config, load_config
from torchtitan.config.load.command_line import parse_args
from torchtitan.tools.launch import slurm_jobs
from torchtitan.tools.launch.cluster_jobs import (
    LONGEST_TASK_NAME,
    jobset_files,
    longest_name,
    skypilot_files,
)
from torchtitan.tools.launch.container import ClusterRun, check_outputs, config_text, needed_files
from torchtitan.tools.launch.container_options import (
    JOBSET,
    SLURM,
    TARGETS,
    add_container_options,
    check_name,
    check_target,
    cluster_name,
    restarts,
    workdir,
)
from torchtitan.tools.launch.grid import (
    GridRun,
    flags_with_folder,
    group_problems,
    make_runs,
    run_in_turn,
)
from torchtitan.tools.launch.slurm_script import (
    SlurmJob,
    add_job_options,
    array_log,
    array_script,
    check_words,
    job_name,
    local_folder,
    nodes_and_ranks,
    sbatch_log,
    script,
    single_line,
)
from torchtitan.utils.accelerators import count_gpus
from torchtitan.utils.argument_types import command_parser, count
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.files import write_output
from torchtitan.utils.wording import aligned, plural, printable


def parser() -> argparse.ArgumentParser:
    parser = command_parser("submit", __doc__)
    add = parser.add_argument
    add(
        "--to",
        choices=TARGETS,
        default=SLURM,
        help="the scheduler: Slurm, a JobSet of Kubernetes, or SkyPilot (slurm)",
    )
    add("--gpus-per-node", type=count, metavar="N", help="ranks on a node; required unless --local")
    add(
        "--nodes",
        type=node_range,
        metavar="N|MIN:MAX",
        help="number of nodes, or a range (from the layout's degrees)",
    )
    add("--job-name", type=job_name, metavar="NAME", help="name of the job (the configuration's)")
    add_job_options(parser)
    add_container_options(parser)
    add(
        "--output",
        type=single_line,
        metavar="FILE",
        help="file to write (<job name>.sbatch, .jobset.yaml or .sky.yaml)",
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
    add("--at-most", type=count, metavar="N", help="run only so many at once")
    add(
        "--folder", type=local_folder, metavar="FOLDER", help="of the runs (<job.dump_folder>-grid)"
    )
    add("--local", action="store_true", help="run them here, one after the other, instead")
    add("--dry-run", action="store_true", help="print what would be written, and write nothing")
    add("--submit", action="store_true", help="submit the job too")
    return parser


@dataclass(frozen=True)
class _RunSize:
    """Nodes and ranks of a run."""

    nodes: tuple[int, int]
    """Minimum and maximum number of nodes."""
    ranks: int
    """Ranks per node."""

    def __str__(self) -> str:
        fewest, most = self.nodes
        number = plural(most, "node") if fewest == most else f"{fewest} to {most} nodes"
        return f"{number} of {plural(self.ranks, 'rank')}"


@dataclass(frozen=True)
class _Batch:
    """A checked submission: one job, or several runs."""

    config: str
    base: Config
    """The configuration of the job, or what all runs have in common."""
    runs: list[GridRun]
    """Runs of a grid; empty for one job."""
    commands: list[list[str]]
    """The overrides of the job, or of each run."""
    folder: Path
    """The folder of all runs, or the job's dump folder."""
    sizes: list[_RunSize]
    """Size of the job, or of each run."""
    configs: list[Config]
    """Completed configuration of the job, or of each run."""


def main(argv: list[str]) -> int:
    command = parser()
    options, config_argv = parse_args(command, argv, file_required=True)
    several = bool(options.grid or options.runs)
    if options.gpus_per_node is None and not options.local:
        command.error("the following arguments are required: --gpus-per-node")
    if not several and (options.at_most or options.folder or options.local):
        command.error("--at-most, --folder and --local are for several runs; add --grid or --runs")
    if options.local and options.to != SLURM:
        command.error(f"--local runs here, not with --to {options.to}")
    check_target(options)
    overrides = [word for word in config_argv if word != f"--job.config_file={options.config}"]
    check_words(options.config, overrides)
    if options.job_name is None and options.to == SLURM:
        try:
            options.job_name = job_name(Path(options.config).stem)
        except argparse.ArgumentTypeError as error:
            raise ConfigError([f"--job-name: give one, as the file's name {error}"]) from error
    runs = make_runs(options.grid, options.runs) if several else []
    if runs and any(word.partition("=")[0] == "--job.dump_folder" for word in overrides):
        raise ConfigError(["--job.dump_folder: each run has its own, below --folder; give that"])
    batch = _check_runs(options, overrides, runs)
    if options.local:
        return _run_here(options, batch)
    return _write(options, batch) if options.to == SLURM else _write_cluster(options, batch)


def _check_runs(options: argparse.Namespace, overrides: list[str], runs: list[GridRun]) -> _Batch:
    """Check every run as its nodes will check it.

    Raises:
        ConfigError: problems of all runs.
    """
    base = load_config([f"--job.config_file={options.config}", *overrides]).config
    dump = base.job.dump_folder
    folder = Path(options.folder or (f"{dump.rstrip('/')}-grid" if runs else dump))
    if options.to == SLURM:  # the other schedulers' nodes have other folders
        folder = Path(os.path.abspath(folder))
    commands = [
        [*overrides, *flags_with_folder(run, folder, base.checkpoint.folder)] for run in runs
    ] or [overrides]
    problems: dict[str, list[str]] = {}
    sizes: dict[str, _RunSize] = {}
    configs = []
    for name, words in zip([run.name for run in runs] or [""], commands, strict=True):
        argv = [f"--job.config_file={options.config}", *words]
        try:
            check_words(options.config, words)
            sizes[name] = _size(options, argv)
            config = _check_run(options, argv, sizes[name])
            configs.append(config)
        except ConfigError as error:
            problems[name] = error.problems
    if problems:
        raise ConfigError(group_problems(problems) if runs else problems[""])
    if options.to == SLURM:
        _check_sizes(sizes)
    return _Batch(
        options.config,
        base,
        runs,
        commands,
        folder=folder,
        sizes=list(sizes.values()),
        configs=configs,
    )


def _check_run(options: argparse.Namespace, argv: list[str], size: _RunSize) -> Config:
    """The complete configuration of a run.

    Raises:
        ConfigError: problems of the configuration.
    """
    elsewhere = options.to != SLURM
    config = check(argv, size.nodes, size.ranks, output=False, elsewhere=elsewhere)
    if elsewhere:
        check_outputs(config, options.volume, workdir(options))
    return config


def _check_sizes(sizes: dict[str, _RunSize]) -> None:
    """
    Raises:
        ConfigError: the tasks of an array would have different sizes.
    """
    names = {size: name for name, size in reversed(sizes.items())}
    if len(names) > 1:
        need = " and ".join(
            f"{plural(size.nodes[1] * size.ranks, 'rank')} ({name})"
            for size, name in reversed(names.items())
        )
        raise ConfigError(
            [
                f"--grid: the runs need {need}, but all tasks of an array have as many; "
                "submit them apart"
            ]
        )


def _size(options: argparse.Namespace, argv: list[str]) -> _RunSize:
    if options.local:
        return _RunSize((1, 1), options.gpus_per_node or count_gpus() or 1)
    return _RunSize(
        *nodes_and_ranks(load_config(argv).config, options.gpus_per_node, options.nodes)
    )


# ---- Slurm


def _write(options: argparse.Namespace, batch: _Batch) -> int:
    """Write the job and print the command that submits it; with --submit, also run it."""
    log = array_log(batch.folder) if batch.runs else None
    size = batch.sizes[0]
    job = SlurmJob(options.job_name, size.nodes, size.ranks, options, log)
    if batch.runs:
        runs = [(batch.config, words) for words in batch.commands]
        text = array_script(job, runs, options.at_most)
    else:
        text = script(job, batch.config, batch.commands[0])
    script_folder = batch.folder if batch.runs else Path()
    path = Path(options.output or script_folder / f"{options.job_name}.sbatch")
    each = f"{plural(len(batch.runs), 'run')}, each on " if batch.runs else ""
    if options.dry_run:
        print(f"{path}, not written: {each}{size}", file=sys.stderr)
        settings = "\n".join(line for line in text.splitlines() if line.startswith("#SBATCH"))
        print(f"{_table(batch.runs)}\n{settings}" if batch.runs else text.rstrip())
        return 0
    working_folder = str(Path.cwd()).replace("%", "%%")
    record = slurm_jobs.JobRecord(
        options.job_name,
        os.path.join(working_folder, sbatch_log(options.sbatch) or log or "%x-%j.log"),
        [run.name for run in batch.runs],
        slurm_jobs.submitted(batch.folder),
    )
    files = {path: os.fsencode(text)}
    if batch.runs or options.submit:
        files[batch.folder / slurm_jobs.RECORD] = record.encode()
    write_output(files)
    print(f"{path}: {each}{size}", file=sys.stderr)
    print(f"sbatch {shlex.quote(str(path))}")
    if options.submit:
        slurm_jobs.submit(path, record, batch.folder)
    return 0


# ---- Kubernetes and SkyPilot


def _write_cluster(options: argparse.Namespace, batch: _Batch) -> int:
    """Write the jobs. Print the commands that submit them and the files their containers need."""
    files_of = jobset_files if options.to == JOBSET else skypilot_files
    relative = "image" if options.to == JOBSET else "this folder, which is sent"
    most = max(size.nodes[1] for size in batch.sizes)
    longest = longest_name(most, len(batch.runs)) if options.to == JOBSET else LONGEST_TASK_NAME
    if options.job_name is None:
        options.job_name = cluster_name(Path(batch.config).stem)
    check_name(options.job_name, longest)
    inputs = [
        line
        for config in batch.configs
        for line in needed_files(config, options.volume, workdir(options), relative)
    ]
    notes = [f"The container must have {printable(line)}" for line in dict.fromkeys(inputs)]
    text = config_text(batch.base, printable(batch.config))
    files, commands = files_of(options, text, _cluster_runs(options, batch), notes)
    if options.dry_run:
        print("".join(files.values()), end="")
    else:
        write_output({path: text.encode() for path, text in files.items()})
    state = ", not written" if options.dry_run else ""
    each = f"{plural(len(batch.runs), 'run')}, each on " if batch.runs else ""
    size = " or ".join(dict.fromkeys(map(str, batch.sizes)))
    written = [f"{path}{state}: {each}{size}" for path in list(files)[:1]]
    print("\n".join([*written, *notes]), file=sys.stderr)
    if not options.dry_run:
        print("\n".join(commands))
    return 0


def _cluster_runs(options: argparse.Namespace, batch: _Batch) -> list[ClusterRun]:
    """The runs as jobs, with names and sizes."""
    job_names: list[tuple[str, str | None, Sequence[str]]] = [
        (
            f"{options.job_name}-{index}",
            run.name,
            flags_with_folder(run, batch.folder, batch.base.checkpoint.folder),
        )
        for index, run in enumerate(batch.runs)
    ] or [(options.job_name, None, [])]
    return [
        ClusterRun(
            *names,
            size.nodes,
            size.ranks,
            restarts(options, size.nodes),
            own_code=bool(config.experimental.custom_import),
        )
        for names, size, config in zip(job_names, batch.sizes, batch.configs, strict=True)
    ]


# ---- grids


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
        ["train", batch.config, "--nproc-per-node", str(batch.sizes[0].ranks), "--", *words]
        for words in batch.commands
    ]
    return run_in_turn([run.name for run in batch.runs], commands, batch.folder)
