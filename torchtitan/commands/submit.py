"""Write a Slurm job for a configuration, once that is known to be right:

    torchtitan submit my.toml --gpus-per-node 8 --time 24:00:00 -- --training.steps 100000

The number of nodes follows from the layout, unless `--nodes` says it. Prints the command that submits the job;
`--submit` runs it. The job is `scripts/slurm.sbatch` with these settings filled in.
"""

import argparse
import math
import shlex
import subprocess
import sys
from pathlib import Path

from torchtitan.commands.train import check, node_range
from torchtitan.config import Config, load_config
from torchtitan.config.derive import axis_degrees
from torchtitan.data.tokenizer import PROJECT
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.text import count

TEMPLATE = PROJECT / "scripts/slurm.sbatch"
MARK = "# -- `torchtitan submit` writes here\n"


def ranks_of(config: Config, gpus_per_node: int, nodes: tuple[int, int] | None) -> tuple[tuple[int, int], int]:
    """(fewest and most nodes, ranks on each).

    Raises:
        ConfigError: the layout doesn't say, or doesn't fill whole nodes.
    """
    if nodes is not None:
        return nodes, gpus_per_node
    if config.parallelism.data_parallel_shard_degree < 1:
        raise ConfigError(
            ["--nodes: parallelism.data_parallel_shard_degree = -1 takes all ranks there are; say how many nodes"]
        )
    world = math.prod(axis_degrees(config.parallelism).values())
    if world > gpus_per_node and world % gpus_per_node:
        raise ConfigError(
            [
                f"--gpus-per-node: the degrees of [parallelism] make {world} ranks, which don't fill nodes of "
                f"{gpus_per_node}; set data_parallel_shard_degree so that they do, or a divisor of {world} here"
            ]
        )
    count = max(1, world // gpus_per_node)
    return (count, count), min(world, gpus_per_node)


def job(options: argparse.Namespace, overrides: list[str], nodes: tuple[int, int], ranks: int) -> str:
    """The text of the job's script."""
    fewest, most = nodes
    lines = {
        "job-name": options.job_name or Path(options.config).stem,
        "nodes": most,
        "gpus-per-node": ranks,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
    }
    header = [f"--{name}={value}" for name, value in lines.items() if value is not None]
    header += ["--no-kill"] if fewest < most else []
    environment = {
        "TORCHTITAN_ROOT": PROJECT,
        "NGPU": ranks,
        "NNODES": f"{fewest}:{most}" if fewest < most else most,
        "CONTAINER": options.container,
    }
    body = [f"export {name}={shlex.quote(str(value))}" for name, value in environment.items() if value is not None]
    body.append(shlex.join(["set", "--", str(Path(options.config).resolve()), *overrides]))
    inserted = [f"#SBATCH {line}" for line in [*header, *options.sbatch]] + body
    return TEMPLATE.read_text().replace(MARK, "\n".join(inserted) + "\n")


def main(argv: list[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="torchtitan submit", usage="%(prog)s CONFIG.toml [options] [-- --section.key value ...]"
    )
    parser.add_argument("config", help="TOML file")
    parser.add_argument("--gpus-per-node", type=count, required=True, help="ranks on a node")
    parser.add_argument("--nodes", type=node_range, help="number of nodes, or MIN:MAX (from the layout's degrees)")
    parser.add_argument("--job-name", help="(the file's name)")
    parser.add_argument("--time", help="time limit; 5 minutes before it the run saves and is put back in the queue")
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--container", help="image for pyxis (docker://..., .sqsh), or a .sif for Apptainer")
    parser.add_argument("--sbatch", action="append", default=[], metavar="--OPTION=VALUE", help="another #SBATCH line")
    parser.add_argument("--output", help="file to write (<job name>.sbatch)")
    parser.add_argument("--submit", action="store_true", help="submit it, too")
    options = parser.parse_args(argv[:split])
    overrides = argv[split + 1 :]
    train_argv = ["--job.config_file", options.config, *overrides]
    nodes, ranks = ranks_of(load_config(train_argv).config, options.gpus_per_node, options.nodes)
    check(train_argv, nodes, ranks, output=False)
    path = Path(options.output or f"{options.job_name or Path(options.config).stem}.sbatch")
    write_whole(path, job(options, overrides, nodes, ranks).encode())
    print(f"{path}: {'-'.join(str(n) for n in sorted(set(nodes)))} node(s) of {ranks} rank(s)", file=sys.stderr)
    print(f"sbatch {shlex.quote(str(path))}")
    if not options.submit:
        return 0
    try:
        return subprocess.run(["sbatch", str(path)]).returncode
    except FileNotFoundError as error:
        raise UserError(f"--submit: there is no sbatch on this machine; submit {path} where there is") from error
