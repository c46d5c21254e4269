"""Write a Slurm job for a configuration, after checking it:

    torchtitan submit my.toml --gpus-per-node 8 --time 24:00:00 --training.steps 100000

The number of nodes follows from the layout, or is given by `--nodes`. Prints the command that submits the job.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

from torchtitan.commands.train import check, node_range
from torchtitan.config import Config, load_config
from torchtitan.config.command_line import parse_args
from torchtitan.config.derive import axis_degrees
from torchtitan.utils.assets import ASSETS, CHECKOUT, find_config
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.text import count, plural

TEMPLATE = Path(__file__).with_name("slurm.sbatch")
MARK = "# -- `torchtitan submit` writes here\n"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus-per-node", type=count, required=True, metavar="N", help="ranks on a node")
    add("--nodes", type=node_range, metavar="N|MIN:MAX", help="number of nodes, or a range (from the layout's degrees)")
    add("--job-name", type=job_name, metavar="NAME", help="name of the job (the configuration's)")
    add("--time", type=one_line, metavar="TIME", help="time limit; the run saves and is requeued 5 minutes before it")
    add("--partition", type=one_line, metavar="NAME")
    add("--account", type=one_line, metavar="NAME")
    add(
        "--container",
        type=one_line,
        metavar="IMAGE",
        help="image for pyxis (docker://..., .sqsh), or a .sif for Apptainer",
    )
    add(
        "--sbatch",
        type=one_line,
        action="append",
        default=[],
        metavar="LINE",
        help="another #SBATCH line, as --sbatch=--qos=high",
    )
    add("--output", type=one_line, metavar="FILE", help="file to write (<job name>.sbatch)")
    add("--submit", action="store_true", help="submit the job too")
    return parser


def one_line(text: str) -> str:
    """Argument type of what becomes a part of a line of the script, which a newline would end."""
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} has a newline or another unprintable character")
    return text


def job_name(text: str) -> str:
    """Argument type of a job's name. Slurm puts it into the name of the log, as `submit` does into the script's."""
    if not text or "/" in text or text[0] in ".-":
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be part of a file name: no '/', and no '.' or '-' in front; --output takes a path"
        )
    return one_line(text)


def _check_file_and_flags(config: str, overrides: list[str]) -> None:
    """Check what argparse doesn't: the configuration's flags, and the file's name, which may become the job's.

    Raises:
        ConfigError: what can't stand in one line of the script.
    """
    problems, flag = [], "the configuration's file"
    for word in [config, *overrides]:
        if word.startswith("--"):
            flag = word.partition("=")[0]
        try:
            one_line(word)
        except argparse.ArgumentTypeError as error:
            problems.append(f"{flag}: {error}")
    if problems:
        raise ConfigError(problems)


def nodes_and_ranks(config: Config, options: argparse.Namespace) -> tuple[tuple[int, int], int]:
    """Fewest and most nodes, and the ranks on each.

    Raises:
        ConfigError: the layout leaves the number of nodes open, or doesn't fill whole nodes.
    """
    per_node = options.gpus_per_node
    if options.nodes is not None:
        return options.nodes, per_node
    if config.parallelism.data_parallel_shard_degree < 1:
        raise ConfigError(
            ["--nodes: parallelism.data_parallel_shard_degree = -1 uses all ranks; give the number of nodes"]
        )
    world = math.prod(axis_degrees(config.parallelism).values())
    if world > per_node and world % per_node:
        raise ConfigError(
            [
                f"--gpus-per-node: the degrees of [parallelism] make {world} ranks, which don't fill nodes of "
                f"{per_node}; set data_parallel_shard_degree so that they do, or give a divisor of {world}"
            ]
        )
    nodes = max(1, world // per_node)
    return (nodes, nodes), min(world, per_node)


def job(options: argparse.Namespace, overrides: list[str], nodes: tuple[int, int], ranks: int) -> str:
    """The text of the job's script."""
    fewest, most = nodes
    settings = {
        "job-name": options.job_name,
        "nodes": most,
        "gpus-per-node": ranks,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
    }
    header = [f"--{name}={shlex.quote(str(value))}" for name, value in settings.items() if value is not None]
    header += ["--no-kill"] if fewest < most else []
    environment = {
        "TORCHTITAN_ROOT": CHECKOUT,
        "TORCHTITAN_PYTHON": None if CHECKOUT or options.container else sys.executable,
        "NGPU": ranks,
        "NNODES": f"{fewest}:{most}" if fewest < most else most,
        "CONTAINER": options.container,
    }
    body = [f"export {name}={shlex.quote(str(value))}" for name, value in environment.items() if value is not None]
    file = find_config(options.config).resolve()
    # A container has its own installation, with the shipped files elsewhere.
    shipped = options.container and not CHECKOUT and file.is_relative_to(ASSETS)
    body.append(shlex.join(["set", "--", options.config if shipped else str(file), *overrides]))
    inserted = [f"#SBATCH {line}" for line in [*header, *options.sbatch]] + body
    return TEMPLATE.read_text().replace(MARK, "\n".join(inserted) + "\n")


def main(argv: list[str]) -> int:
    options, config_argv = parse_args(parser(), argv, file_required=True)
    overrides = [word for word in config_argv if word != f"--job.config_file={options.config}"]
    _check_file_and_flags(options.config, overrides)
    if options.job_name is None:
        try:
            options.job_name = job_name(Path(options.config).stem)
        except argparse.ArgumentTypeError as error:
            raise ConfigError([f"--job-name: give one, as the file's name {error}"]) from error
    nodes, ranks = nodes_and_ranks(load_config(config_argv).config, options)
    check(config_argv, nodes, ranks, output=False)
    path = Path(options.output or f"{options.job_name}.sbatch")
    write_whole(path, os.fsencode(job(options, overrides, nodes, ranks)))
    fewest, most = nodes
    number = plural(most, "node") if fewest == most else f"{fewest} to {most} nodes"
    print(f"{path}: {number} of {plural(ranks, 'rank')}", file=sys.stderr)
    print(f"sbatch {shlex.quote(str(path))}")
    if not options.submit:
        return 0
    try:
        return subprocess.run(["sbatch", str(path)]).returncode
    except FileNotFoundError as error:
        raise UserError(f"--submit: this machine has no sbatch; submit {path} on one that has") from error
