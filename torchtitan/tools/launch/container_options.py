"""Options of jobs for Kubernetes and SkyPilot, and checks of the names in them."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from torchtitan.tools.launch.ranks import ELASTIC_RESTARTS
from torchtitan.tools.launch.slurm_script import single_line
from torchtitan.utils.argument_types import count
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import brief

SLURM, JOBSET, SKYPILOT = "slurm", "jobset", "skypilot"
TARGETS = (SLURM, JOBSET, SKYPILOT)
RESTARTS = 3
"""Default number of restarts; losing a node may count as a failure."""
GRACE_SECONDS = 300
"""Seconds from the signal to stop until the container is killed."""

_EDIT = "edit the file that is written"
_ELSEWHERE: dict[str, dict[str, str]] = {
    "partition": {JOBSET: "use --queue or --node-selector", SKYPILOT: "use --infra"},
    "account": {JOBSET: "use --queue or --namespace", SKYPILOT: "choose a workspace of SkyPilot"},
    "time": dict.fromkeys(
        (JOBSET, SKYPILOT), "these jobs have no time limit; training.steps ends the run"
    ),
    "sbatch": {JOBSET: _EDIT, SKYPILOT: _EDIT},
    "submit": {
        JOBSET: "run the kubectl command that is printed",
        SKYPILOT: "run the sky command that is printed",
    },
    "at_most": {
        JOBSET: "the quota of a Kueue queue limits what runs at once (--queue)",
        SKYPILOT: "all are started; launch fewer of the files",
    },
    "volume": {SLURM: "nodes share a file system; for a container, set CONTAINER_MOUNTS"},
    "max_restarts": {SLURM: "set MAX_RESTARTS in the job's environment"},
    "grace": {SLURM: "use --sbatch=--signal=B:USR1@SECONDS"},
    "template": {SLURM: "edit the script that is written"},
    "queue": {SLURM: "use --partition", SKYPILOT: "only Kubernetes has queues of Kueue"},
    "namespace": {SLURM: "use --account", SKYPILOT: "it belongs to SkyPilot's configuration"},
    "node_selector": {SLURM: "use --sbatch=--constraint=...", SKYPILOT: "use --infra"},
    "service_account": {SLURM: "use --account", SKYPILOT: "it belongs to SkyPilot's configuration"},
    "accelerator": {SLURM: "use --partition", JOBSET: "use --node-selector"},
    "infra": {SLURM: "use --partition", JOBSET: "kubectl's context chooses the cluster"},
    "spot": {SLURM: "use --partition", JOBSET: "use --node-selector"},
}
"""Options that a target lacks, with advice for each such target."""


@dataclass(frozen=True)
class Volume:
    """A volume of the cluster and its path in a container."""

    name: str
    path: str


def add_container_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `--to jobset` and `--to skypilot`."""
    shared = parser.add_argument_group("--to jobset, --to skypilot")
    shared.add_argument(
        "--volume",
        type=volume,
        action="append",
        default=[],
        metavar="NAME:PATH",
        help="volume (Kubernetes: claim) to mount at PATH; a pod works in the first one",
    )
    shared.add_argument(
        "--max-restarts",
        type=partial(count, fewest=0),
        metavar="N",
        help=f"restarts after failures ({RESTARTS}; {ELASTIC_RESTARTS} with MIN:MAX nodes); "
        "status 75 isn't one",
    )
    shared.add_argument(
        "--grace",
        type=partial(count, fewest=30, most=7 * 24 * 3600),
        metavar="SECONDS",
        help=f"time to save when stopped ({GRACE_SECONDS})",
    )
    shared.add_argument(
        "--template",
        type=Path,
        metavar="FILE",
        help="Jinja template of the file (TARGET.yaml.j2 in torchtitan/tools/launch)",
    )
    jobset = parser.add_argument_group("--to jobset")
    jobset.add_argument("--namespace", type=dns_label, metavar="NAME")
    jobset.add_argument("--queue", type=dns_label, metavar="NAME", help="local queue of Kueue")
    jobset.add_argument(
        "--node-selector",
        type=label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="label of the nodes to run on",
    )
    jobset.add_argument(
        "--service-account", type=dns_label, metavar="NAME", help="gives the pods access to buckets"
    )
    skypilot = parser.add_argument_group("--to skypilot")
    skypilot.add_argument(
        "--accelerator", type=gpu, metavar="NAME", help="kind of GPU, as H100; required"
    )
    skypilot.add_argument(
        "--infra",
        type=cloud_location,
        metavar="CLOUD[/REGION[/ZONE]]",
        help="where to run (the cheapest place)",
    )
    skypilot.add_argument("--spot", action="store_true", help="use machines that can be preempted")


def check_target(options: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: options that the target doesn't support, with advice, or required ones that
            are missing.
    """
    to = options.to
    problems = [
        f"--{name.replace('_', '-')}: not for --to {to}: {instead[to]}"
        for name, instead in _ELSEWHERE.items()
        if to in instead and _is_set(getattr(options, name))
    ]
    if to == JOBSET and not options.container:
        problems.append("--container: give the image that the pods run, as registry/name:tag")
    if to == SKYPILOT and not options.accelerator:
        problems.append("--accelerator: give the kind of GPU, as SkyPilot calls it: H100")
    if options.container and to != SLURM:
        if not re.fullmatch(r"[\w./:@-]+", options.container):
            image = brief(options.container)
            problems.append(f"--container: {image} is not an image as registry/name:tag")
        elif "://" in options.container:
            problems.append("--container: name the image without docker://")
    paths = [volume.path for volume in options.volume]
    if len(set(paths)) < len(paths):
        problems.append("--volume: two are at one path")
    if problems:
        raise ConfigError(problems)


def _is_set(value: object) -> bool:
    """Whether an option was set; 0 counts as set."""
    return bool(value) or (value == 0 and value is not False)


def restarts(options: argparse.Namespace, nodes: tuple[int, int]) -> int:
    """Number of restarts after failures."""
    requested: int | None = options.max_restarts
    if requested is not None:
        return requested
    return RESTARTS if nodes[0] == nodes[1] else ELASTIC_RESTARTS


def workdir(options: argparse.Namespace) -> str | None:
    """A pod's working folder; None for the default of the image or of SkyPilot."""
    return options.volume[0].path if options.to == JOBSET and options.volume else None


def _matching(pattern: str, otherwise: str) -> Callable[[str], str]:
    """Argument type of text that matches `pattern`; an error says `otherwise` of other text."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{brief(text)}{otherwise}")
        return text

    return parse


dns_label = _matching(
    "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
    ": must be at most 63 lower-case letters, digits and '-', with '-' at neither end",
)
"""Argument type of a name in Kubernetes."""
gpu = _matching(
    r"[A-Za-z0-9][\w.-]*", " is not a kind of GPU, as H100; --gpus-per-node says how many"
)
"""Argument type of a kind of GPU, without the number that a node has."""
cloud_location = _matching(r"[\w.*:@-]+(/[\w.*:@-]+)*", " is not CLOUD[/REGION[/ZONE]]")
"""Argument type of a cloud, region and zone."""


def label(text: str) -> tuple[str, str]:
    """Argument type of a label in Kubernetes."""
    key, equals, value = text.partition("=")
    name = "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
    if (
        not equals
        or not re.fullmatch(f"([a-z0-9.-]{{1,253}}/)?{name}", key)
        or not re.fullmatch(f"({name})?", value)
    ):
        raise argparse.ArgumentTypeError(f"{brief(text)} is not KEY=VALUE of a label")
    return key, value


def volume(text: str) -> Volume:
    """Argument type of `NAME:PATH`."""
    name, _, path = text.partition(":")
    taken = ("/", "/dev/shm", "/etc/torchtitan")
    plain = PurePosixPath("/", path.lstrip("/"))
    if not path.startswith("/") or ":" in path or ".." in plain.parts or str(plain) in taken:
        raise argparse.ArgumentTypeError(
            f"{brief(text)} is not NAME:PATH, with a path that starts with / and isn't one of "
            f"{', '.join(taken)}"
        )
    return Volume(dns_label(name), single_line(str(plain)))


# ---- names


def cluster_name(name: str) -> str:
    """A job's name from a file's: `my_run.v2` becomes `my-run-v2`.

    Raises:
        ConfigError: the file's name yields no valid name.
    """
    plain = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    if not re.fullmatch("[a-z][a-z0-9-]*", plain):
        raise ConfigError([f"--job-name: give one, as {brief(name)} has no letter in front"])
    return plain


def check_name(name: str, longest: int) -> None:
    """
    Args:
        longest: maximum length that the scheduler allows.

    Raises:
        ConfigError: it is not a valid name for pods and services.
    """
    if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise ConfigError(
            [
                f"--job-name: {brief(name)}: must be lower-case letters, digits and '-', with a "
                "letter in front and no '-' at the end"
            ]
        )
    if len(name) > longest:
        raise ConfigError([f"--job-name: {brief(name)}: must have at most {longest} characters"])
