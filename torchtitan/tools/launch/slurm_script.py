"""Scripts of Slurm jobs: the template with a job's settings filled in."""

import argparse
import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.config import Config
from torchtitan.config.derive import axis_degrees
from torchtitan.config.load.command_line import config_flags
from torchtitan.utils.assets import ASSETS, CHECKOUT, PACKAGE, find_config
from torchtitan.utils.errors import EMPTY, ConfigError
from torchtitan.utils.files import read_regular, text_of
from torchtitan.utils.limits import RUNS_FILE_BYTES
from torchtitan.utils.storage import is_url
from torchtitan.utils.wording import plural

TEMPLATE = PACKAGE / "commands" / "slurm.sbatch"
MARK = "# -- `torchtitan submit` writes here\n"


def single_line(text: str) -> str:
    """Argument type of text without newlines, which would end its line of the script."""
    if not text:
        raise argparse.ArgumentTypeError(EMPTY)
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} has a newline or another unprintable character")
    return text


def job_name(text: str) -> str:
    """Argument type of a job's name, from which its log and script are named."""
    if "/" in text or text[:1] in ("", ".", "-"):
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be part of a file name: no '/', and no '.' or '-' in front; "
            "--output takes a path"
        )
    return single_line(text)


def check_words(config: str, overrides: Sequence[str]) -> None:
    """Check the configuration's flags, and its file's name, which may name the job.

    Raises:
        ConfigError: one of them can't be part of a line of the script.
    """
    problems = []
    flag = "the configuration's file"
    for word in filter(None, [config, *overrides]):
        if word.startswith("--"):
            flag = word.partition("=")[0]
        try:
            single_line(word)
        except argparse.ArgumentTypeError as error:
            problems.append(f"{flag}: {error}")
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class JobSize:
    """Nodes and ranks of a job."""

    nodes: tuple[int, int]
    """Minimum and maximum number of nodes."""
    ranks: int
    """Ranks per node."""

    def __str__(self) -> str:
        fewest, most = self.nodes
        nodes = plural(most, "node") if fewest == most else f"{fewest} to {most} nodes"
        return f"{nodes} of {plural(self.ranks, 'rank')}"


def job_size(config: Config, per_node: int, nodes: tuple[int, int] | None) -> JobSize:
    """The size of a configuration's job.

    Args:
        nodes: number of nodes; None derives it from the layout's degrees.

    Raises:
        ConfigError: the layout leaves the number of nodes open, or doesn't fill whole nodes.
    """
    if nodes is not None:
        return JobSize(nodes, per_node)
    if config.parallelism.data_parallel_shard_degree < 1:
        raise ConfigError(
            [
                "--nodes: parallelism.data_parallel_shard_degree = -1 uses all ranks; "
                "give the number of nodes"
            ]
        )
    world = math.prod(axis_degrees(config.parallelism).values())
    if world > per_node and world % per_node:
        raise ConfigError(
            [
                f"--gpus-per-node: the degrees of [parallelism] make {world} ranks, which don't "
                f"fill nodes of {per_node}; set data_parallel_shard_degree so that they do, or "
                f"give a divisor of {world}"
            ]
        )
    number = max(1, world // per_node)
    return JobSize((number, number), min(world, per_node))


@dataclass(frozen=True)
class Run:
    """A run of an array."""

    where: str
    """File and line of its flags, as the beginning of a message."""
    flags: list[str]
    """Flags that override the shared configuration."""


def script(
    options: argparse.Namespace,
    size: JobSize,
    overrides: Sequence[str],
    runs: Sequence[Run],
    folder: Path,
) -> str:
    """The script of a job that trains a configuration.

    Args:
        options: options of `torchtitan submit`.
        runs: runs of an array, each a task; empty for one job.
        folder: folder of an array's logs.
    """
    fewest, most = size.nodes
    limit = f"%{options.at_most}" if options.at_most else ""
    here = has_slurm()
    literal = str(folder.absolute() if here else folder)
    literal = literal.replace("%", "%%")  # a % in it is none of Slurm's patterns
    settings = {
        "job-name": options.job_name,
        "output": f"{literal}/%x-%A_%a.log" if runs else None,
        "nodes": most,
        "gpus-per-node": size.ranks,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "array": f"0-{len(runs) - 1}{limit}" if runs else None,
    }
    environment = {
        "TORCHTITAN_ROOT": CHECKOUT if here else None,
        "TORCHTITAN_PYTHON": sys.executable
        if here and not (CHECKOUT or options.container)
        else None,
        "NGPU": size.ranks,
        "NNODES": f"{fewest}:{most}" if fewest < most else most,
        "CONTAINER": options.container,
    }
    lines = [
        *(f"#SBATCH --{name}={value}" for name, value in _quoted(settings)),
        *(["#SBATCH --no-kill"] if fewest < most else []),
        *(f"#SBATCH {line}" for line in options.sbatch),
        *(f"export {name}={value}" for name, value in _quoted(environment)),
        shlex.join(["set", "--", _config_file(options), *overrides]),
    ]
    if runs:
        tasks = [f'    {i}) set -- "$@" {shlex.join(run.flags)} ;;' for i, run in enumerate(runs)]
        lines += ["case $SLURM_ARRAY_TASK_ID in", *tasks]
        lines += ['    *) echo "error: no run $SLURM_ARRAY_TASK_ID" >&2 && exit 2 ;;', "esac"]
    return TEMPLATE.read_text().replace(MARK, "\n".join(lines) + "\n")


def _quoted(settings: Mapping[str, object]) -> list[tuple[str, str]]:
    """The settings that have a value, quoted for a shell."""
    return [
        (name, shlex.quote(str(value))) for name, value in settings.items() if value is not None
    ]


def has_slurm() -> bool:
    """Whether this machine is one of a Slurm cluster. For another one, a script has no paths of
    this machine.
    """
    return shutil.which("sbatch") is not None


def _config_file(options: argparse.Namespace) -> str:
    file = find_config(options.config).resolve()
    # A container has its own installation, with the shipped files elsewhere.
    shipped = options.container and not CHECKOUT and file.is_relative_to(ASSETS)
    return options.config if shipped or not has_slurm() else str(file)


# ---- arrays


def read_runs(path: Path, dump: str) -> list[Run]:
    """Read a file with the flags of a run on each line; `#` starts a comment.

    Args:
        dump: `job.dump_folder` of the shared configuration, which gets a folder for each task.

    Raises:
        ConfigError: the file can't be read, or a line has something else than flags.
    """
    try:
        text = text_of(read_regular(path, RUNS_FILE_BYTES, links=True))
    except OSError as error:
        raise ConfigError([f"--runs: can't read {path}: {error.strerror or error}"]) from None
    except ValueError as error:
        raise ConfigError([f"--runs: {path}: {error}"]) from None
    runs: list[Run] = []
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}: "
        line_problems: list[str] = []
        words: list[str] = []
        try:
            words = shlex.split(line, comments=True)
            keys = [key for key, _ in config_flags(words, line_problems)]
            if "job.config_file" in keys:
                line_problems.append("--config: all runs have one configuration; name it once")
        except ValueError as error:
            line_problems.append(str(error).lower())
        problems += [f"--runs: {where}{problem}" for problem in line_problems]
        if words and not line_problems:
            runs.append(Run(where, [f"--job.dump_folder={dump}/{len(runs)}", *words]))
    if problems or not runs:
        raise ConfigError(problems or [f"--runs: {path} has no line with flags"])
    return runs


def check_folders(configs: Mapping[str, Config]) -> None:
    """
    Args:
        configs: configurations of an array's runs, by `Run.where`.

    Raises:
        ConfigError: two runs would write to one folder.
    """
    writers: dict[tuple[str, str], str] = {}
    for where, config in configs.items():
        folders = {"job.dump_folder": config.job.dump_folder}
        checkpoints = config.checkpoint.folder
        if is_url(checkpoints) or Path(checkpoints).is_absolute():
            folders["checkpoint.folder"] = checkpoints
        for key, folder in folders.items():
            if (first := writers.setdefault((key, folder), where)) != where:
                raise ConfigError(
                    [f"{where}{key}: {folder} is also that of {first}give each line another"]
                )
