"""Train on this machine, or on this node of several.

Starts the ranks through torchrun, and adds to it: the configuration is checked before any rank
starts, for every number of nodes that may join; restarts get a fresh store; SIGTERM, SIGUSR1,
SIGHUP and Ctrl-C make the ranks save and exit with status 75; and a failure is reported as its
cause in one sentence. Options that are not listed here are passed to torchrun.
"""

import argparse
import os
import re
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from torchtitan.config import complete, load_config
from torchtitan.config.load.command_line import parse_args, show_help, split_args
from torchtitan.config.load.decode import LoadedConfig
from torchtitan.config.sections.schema import Config
from torchtitan.tools.launch.ranks import ELASTIC_RESTARTS, SECRET_ENV, StopHandler
from torchtitan.tools.launch.torchrun import no_cpp_stacks, run_ranks, what_lowers_memory
from torchtitan.train.preflight import preflight
from torchtitan.train.rank_main import main as train
from torchtitan.utils.accelerators import count_gpus, refuse_unusable
from torchtitan.utils.argument_types import command_parser, count, number
from torchtitan.utils.assets import shipped_configs
from torchtitan.utils.errors import ConfigError, OutOfMemoryError, did_you_mean
from torchtitan.utils.limits import NODE_RANGE, NODES, RANKS_PER_NODE
from torchtitan.utils.lock import local_conflict
from torchtitan.utils.process import refuse_several_tasks
from torchtitan.utils.wording import brief

RENDEZVOUS = "last_call_timeout=3,join_timeout=600,keep_alive_interval=2,keep_alive_max_attempt=5"
"""Late nodes join within 3 seconds; a node that is silent for 10 is dropped."""
MIN_SECRET = 16


# ---- options


def parser() -> argparse.ArgumentParser:
    parser = command_parser("train", __doc__)
    parser.allow_abbrev = False
    add = parser.add_argument
    ranks = partial(count, most=RANKS_PER_NODE)
    add("--nproc-per-node", type=ranks, metavar="N", help="ranks on this node (its GPUs, else 1)")
    add(
        "--nnodes",
        type=node_range,
        default=(1, 1),
        metavar="N|MIN:MAX",
        help="number of nodes, or a range (1)",
    )
    add(
        "--rdzv-endpoint",
        type=_endpoints,
        metavar="HOST:PORT[,...]",
        help="the first node, if there are several; more, which take over when it is lost",
    )
    add(
        "--rdzv-conf",
        default=RENDEZVOUS,
        metavar="KEY=VALUE,...",
        help=f"rendezvous ({RENDEZVOUS})",
    )
    add(
        "--max-restarts",
        type=partial(count, fewest=0),
        metavar="N",
        help=f"restarts after a failure, from the last checkpoint (0; {ELASTIC_RESTARTS} with "
        "a range of nodes)",
    )
    add(
        "--grace",
        type=partial(number, zero=True, most=10**9),
        default=600,
        metavar="SECONDS",
        help="time to save when stopped (600)",
    )
    add(
        "--numa-binding",
        choices=("node", "socket", "exclusive", "core-complex"),
        help="bind each rank to the CPUs next to its GPU, as torchrun does; needs numactl (off)",
    )
    return parser


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The launcher's options with their defaults, torchrun's options, and the configuration's
    flags.
    """
    ours = parser()
    words, flags = split_args(argv)
    words, torchrun_argv = _take_out_torchrun(ours, words)
    options, config_argv = parse_args(ours, [*words, "--", *flags])
    if options.nnodes[1] > 1:
        if not options.rdzv_endpoint:
            ours.error(
                "--rdzv-endpoint: with several nodes, give all of them HOST:PORT of the first"
            )
        if len(os.environ.get(SECRET_ENV, "")) < MIN_SECRET:
            ours.error(
                f"{SECRET_ENV}: with several nodes, set this environment variable on all of them "
                f"to the same secret of {MIN_SECRET} characters or more, such as `openssl rand "
                "-hex 16` prints once"
            )
    if options.nproc_per_node is None:
        options.nproc_per_node = count_gpus() or 1
    if options.numa_binding:
        if not count_gpus():
            ours.error("--numa-binding: no GPU here whose CPUs could be chosen; leave it out")
        if not shutil.which("numactl"):
            ours.error(
                "--numa-binding: torchrun starts the ranks through numactl, which isn't here; "
                "install it, as by `apt-get install numactl`, or leave the option out"
            )
    if options.max_restarts is None:
        options.max_restarts = ELASTIC_RESTARTS if options.nnodes[0] < options.nnodes[1] else 0
    return options, torchrun_argv, config_argv


def _take_out_torchrun(
    ours: argparse.ArgumentParser, words: list[str]
) -> tuple[list[str], list[str]]:
    """Split `words` into this command's words, and torchrun's options with their values."""
    names = [option for action in ours._actions for option in action.option_strings]
    launcher_words: list[str] = []
    torchrun_words: list[str] = []
    needs_value = False
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")  # torchrun accepts both
            if name not in names and (hint := _spelling_hint(name, names)):
                ours.error(f"unrecognized option {word}{hint}")
            (launcher_words if name in names else torchrun_words).append(name + equals + value)
            needs_value = name not in names and not equals
        else:
            is_value = needs_value and not word.endswith(".toml") and word not in shipped_configs()
            (torchrun_words if is_value else launcher_words).append(word)
            needs_value = False
    return launcher_words, torchrun_words


_ELSEWHERE = {
    **dict.fromkeys(
        (
            "-n",
            "-np",
            "--np",
            "--nprocs",
            "--ngpus",
            "--gpus",
            "--num-gpus",
            "--num-processes",
            "--devices",
        ),
        "--nproc-per-node",
    ),
    **dict.fromkeys(("--nodes", "--num-nodes", "--num-machines"), "--nnodes"),
}
"""Options of other launchers, mapped to their names here. torchrun has none of them."""


def _spelling_hint(name: str, names: list[str]) -> str:
    """A hint if `name` abbreviates or nearly matches an option; torchrun would accept the
    abbreviation of one of its options.
    """
    if name in _ELSEWHERE:
        return f"; did you mean {_ELSEWHERE[name]!r}?"
    longer = [option for option in names if option.startswith(name)]
    return f"; did you mean {longer[0]!r}?" if longer else did_you_mean(name, names, cutoff=0.9)


def node_range(text: str) -> tuple[int, int]:
    """Argument type of `N` or `MIN:MAX`: the fewest and most nodes."""
    fewest, _, most = text.partition(":")
    nodes = (
        (int(fewest), int(most or fewest))
        if re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", text)
        else (0, 0)
    )
    if not 1 <= nodes[0] <= nodes[1]:
        raise argparse.ArgumentTypeError(f"{brief(text)} is neither a number of nodes nor MIN:MAX")
    if nodes[1] > NODES or nodes[1] - nodes[0] > NODE_RANGE:
        raise argparse.ArgumentTypeError(
            f"{brief(text)}: must be at most {NODES:,} nodes, and MAX at most {NODE_RANGE:,} above "
            "MIN"
        )
    return nodes


def _endpoints(text: str) -> str:
    """Argument type of one or more `HOST:PORT`, separated by commas."""
    several = text.split(",")
    for endpoint in several if len(several) > 1 or not text else []:
        host, _, port = endpoint.rpartition(":")
        if not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", host) or not re.fullmatch(
            "[1-9][0-9]{0,4}", port
        ):
            raise argparse.ArgumentTypeError(
                f"{brief(endpoint)} is not HOST:PORT; of several, all need a port"
            )
    if len(set(several)) < len(several):
        raise argparse.ArgumentTypeError(f"{brief(text)}: an endpoint is given twice")
    return text


# ---- checks before the start


def check(
    config_argv: list[str], nodes: tuple[int, int], ranks: int, *, output: bool = True
) -> Config:
    """Check the configuration for every number of nodes in the range, with `ranks` on each.

    Args:
        output: also create the dump folder, and check that it is writable.

    Returns:
        The configuration for the largest number of nodes.

    Raises:
        ConfigError: all problems found.
    """
    _, most = nodes
    show_help(config_argv)
    loaded = load_config(config_argv)
    resolved = complete(loaded, most * ranks, check=False)
    config = resolved.config
    preflight(
        config,
        world=most * ranks,
        sources=loaded.sources,
        other_problems=_problems_of_fewer_nodes(loaded, nodes, ranks),
        output=output,
    )
    # A node that joins a running job finds its folder in use.
    if output and most == 1 and (problem := local_conflict(Path(config.job.dump_folder))):
        raise ConfigError([f"job.dump_folder: {problem}"])
    return config


def _problems_of_fewer_nodes(loaded: LoadedConfig, nodes: tuple[int, int], ranks: int) -> list[str]:
    """Problems of the first number of nodes below the largest that can't train."""
    fewest, most = nodes
    if fewest < most and not loaded.config.fault_tolerance.elastic:
        need = f"{fewest}:{most} nodes need fault_tolerance.elastic = true"
        return [f"--nnodes: {need}, which keeps the global batch the same on any number of them"]
    number = most
    try:
        for number in (most, *range(fewest, most)):
            complete(loaded, number * ranks)
    except ConfigError as error:
        if number < most:  # else they are reported with all problems of the largest number
            return [f"with {number} of {most} nodes: {problem}" for problem in error.problems]
    return []


# ---- starting


def main(argv: list[str]) -> int:
    options, torchrun_argv, config_argv = _parse(argv)
    if options.nnodes[1] == 1:  # else each task is the launcher of a node
        refuse_several_tasks()
    stop = StopHandler(options.grace)
    several = options.nnodes[1] * options.nproc_per_node > 1
    needs_launcher = options.max_restarts or options.numa_binding or torchrun_argv
    alone = not (several or needs_launcher)
    with nullcontext() if alone else no_cpp_stacks():
        # A module of the user may import torch here.
        config = check(config_argv, options.nnodes, options.nproc_per_node)
        if not alone:
            refuse_unusable(options.nproc_per_node)  # imports torch
    if alone:
        try:
            return train(config_argv)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{error}\n{what_lowers_memory(config, world=1)}".rstrip()
            ) from error
    return run_ranks(options, torchrun_argv, config_argv, config, stop=stop)
