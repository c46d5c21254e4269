"""SkyPilot: the YAML of a managed job.

All machines run the same script. Status 75 recovers the job, on new machines if need be, and isn't
counted among the restarts.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.tools.launch.container import (
    PORT,
    SECRET,
    ClusterRun,
    launcher_grace,
    to_yaml,
    train_words,
)
from torchtitan.tools.launch.container_options import GRACE_SECONDS
from torchtitan.utils.assets import CHECKOUT
from torchtitan.utils.errors import ConfigError

_END = "END_OF_TOML"
_CHECKOUT = "~/torchtitan"
"""The project on the machines, if they run no image that has it."""
LONGEST_NAME = 63


def skypilot_files(
    options: argparse.Namespace, config: str, runs: Sequence[ClusterRun], comments: Sequence[str]
) -> tuple[dict[Path, str], list[str]]:
    """A file for each run, and the commands that launch them.

    Args:
        options: the job's; see `add_container_options`.
        config: text of the TOML file, which becomes part of the script.
        comments: lines on top of the files.

    Raises:
        ConfigError: what SkyPilot can't do.
    """
    _check(options, config, runs)
    files = {}
    commands = []
    for run in runs:
        path = Path(options.output or f"{run.name}.sky.yaml")
        files[path] = to_yaml([_task(options, run, config)], comments)
        command = f"sky jobs launch {shlex.quote(str(path))}"
        if run.nodes[1] > 1:
            command = (
                f"{SECRET}=$(openssl rand -hex 16) "
                f"sky jobs launch --secret {SECRET} {shlex.quote(str(path))}"
            )
        commands.append(command)
    return files, commands


def _check(options: argparse.Namespace, config: str, runs: Sequence[ClusterRun]) -> None:
    problems = []
    if any(run.elastic for run in runs):
        problems.append(
            "--nodes: SkyPilot starts a fixed number of machines, and all again when one is lost; "
            f"give --nodes {runs[0].nodes[1]}"
        )
    if not options.container and not CHECKOUT:
        problems.append(
            "--container: give an image with torchtitan, as there is no checkout to send"
        )
    if options.output and len(runs) > 1:
        problems.append(
            "--output: SkyPilot takes one file per run; leave their names to --job-name"
        )
    if _END in config.splitlines():
        problems.append(f"the configuration: a line is {_END}, which ends it in the script")
    if problems:
        raise ConfigError(problems)


def _task(options: argparse.Namespace, run: ClusterRun, config: str) -> dict[str, Any]:
    grace = options.grace or GRACE_SECONDS
    recovery = {"max_restarts_on_errors": run.restarts, "recover_on_exit_codes": [os.EX_TEMPFAIL]}
    resources: dict[str, Any] = {"accelerators": f"{options.accelerator}:{run.ranks}"}
    if options.infra:
        resources["infra"] = options.infra
    if options.spot:
        resources["use_spot"] = True
    if options.container:
        resources["image_id"] = f"docker:{options.container}"
    task: dict[str, Any] = {
        "name": run.name,
        "num_nodes": run.nodes[1],
        "resources": {**resources, "job_recovery": recovery},
        "workdir": os.getcwd(),
    }
    if options.volume:
        task["volumes"] = {one.path: one.name for one in options.volume}
    if not options.container:
        task["file_mounts"] = {_CHECKOUT: str(CHECKOUT)}
        task["setup"] = f"{_CHECKOUT}/scripts/setup.sh\n"
    if run.nodes[1] > 1:
        task["secrets"] = {SECRET: None}
    task["run"] = _script(options, run, config, grace)
    stop = f'pid=$(cat ~/{run.name}.pid) && kill -TERM "$pid" && tail --pid="$pid" -f /dev/null\n'
    task["config"] = {"hooks": [{"run": stop, "events": ["preemption"], "timeout": grace}]}
    return task


def _script(options: argparse.Namespace, run: ClusterRun, config: str, grace: int) -> str:
    """What each machine runs. The launcher's process number is kept for the hook."""
    launcher = "torchtitan"
    modules = ["$PWD"] if run.own_code else []
    lines = [f"cat >~/{run.name}.toml <<'{_END}'", config.rstrip(), _END]
    if not options.container:
        lines.append(f"python=$({_CHECKOUT}/scripts/setup.sh)")
        launcher = '"$python" -m torchtitan'
        modules.append(_CHECKOUT.replace("~", "$HOME"))
    if modules:
        lines.append(f'export PYTHONPATH="{":".join(modules)}"')
    if run.nodes[1] > 1:
        lines.append('first=$(head -n 1 <<<"$SKYPILOT_NODE_IPS")')
    words = train_words(run, f"~/{run.name}.toml", f'"$first":{PORT}', [launcher_grace(grace)])
    command = " ".join([launcher, *words, *([shlex.join(["--", *run.flags])] if run.flags else [])])
    # Python accepts a signal that arrives while it starts later.
    lines.append(f"(echo $BASHPID >~/{run.name}.pid; exec env --block-signal=TERM {command})")
    return "\n".join(lines) + "\n"
