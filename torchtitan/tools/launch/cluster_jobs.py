"""Jobs for Kubernetes and SkyPilot: fills in `jobset.yaml.j2` and `skypilot.yaml.j2`.

Every inserted value becomes a YAML scalar, with quotes around text. So no name, path or flag can
change the structure of the file.
"""

import argparse
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import yaml

from torchtitan.tools.launch.container import PORT, ClusterRun, train_words
from torchtitan.tools.launch.container_options import GRACE_SECONDS
from torchtitan.tools.launch.ranks import SECRET_ENV
from torchtitan.utils.assets import CHECKOUT
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import escaped

_CONFIG = "/etc/torchtitan/config.toml"
"""Path of the configuration in a pod."""
_TAKEOVER = 3
"""Number of pods that may host the rendezvous when the number of nodes varies."""
_LABEL = 63
"""Maximum length of a pod's host name."""
_SUFFIX = len("-12345")
"""Length of the suffix that Kubernetes adds to a pod's name."""
LONGEST_TASK_NAME = 63
"""Maximum length of a task's name in SkyPilot."""
_END = "END_OF_TOML"
"""Line that ends the configuration in SkyPilot's script."""

Files = dict[Path, str]


# ---- templates


class Yaml(str):
    """YAML text that a template inserts unchanged."""


def render(template: Path, values: dict[str, Any], comments: Sequence[str]) -> str:
    """Fill in a template and put one-line comments above it.

    Raises:
        ConfigError: the template is not valid.
    """
    environment = jinja2.Environment(
        finalize=_inserted,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"block": block, "line": line, "lines": lines}
    try:
        body = environment.from_string(template.read_text()).render(values)
        list(yaml.safe_load_all(body))
    except (OSError, UnicodeDecodeError, jinja2.TemplateError, yaml.YAMLError) as error:
        where = f":{error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError([f"{template}{where}: {error}"]) from error
    return "".join(f"# {comment}\n" for comment in comments) + body


def _inserted(value: object) -> str:
    """Text that a template writes for a value."""
    if isinstance(value, jinja2.Undefined):
        return str(value)  # raises the error that names it
    return value if isinstance(value, Yaml) else scalar(value)


def scalar(value: object) -> Yaml:
    """A value as YAML on one line, text in double quotes: kubectl and PyYAML disagree on which
    plain words are text (`1e3`, `0o17`, `y`).
    """
    style = '"' if isinstance(value, str) else None
    readable = not isinstance(value, str) or escaped(value) == value
    text = yaml.safe_dump(value, default_style=style, allow_unicode=readable, width=float("inf"))
    return Yaml(text.removesuffix("\n").removesuffix("\n..."))


_NOT_IN_A_BLOCK = re.compile(
    "[^\n\x20-\x7e\xa0-\u061b\u061d-\u200d\u2010-\u2027\u202f-\u2065\u206a-\ud7ff"
    "\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
"""Characters that YAML changes or refuses in unquoted text, or that turn a line's direction."""


def block(text: str, indent: int) -> Yaml:
    """Filter: text as a YAML block with this indentation; in quotes if it can't be one."""
    if _NOT_IN_A_BLOCK.search(text) or not re.fullmatch(r"\S(.*\n)*.*\S\n", text):
        return scalar(text)
    return Yaml("|\n" + textwrap.indent(text, " " * indent).removesuffix("\n"))


def line(text: str) -> Yaml:
    """Filter: unchanged text for one line of a block."""
    if "\n" in text:
        raise jinja2.TemplateRuntimeError(f"{text!r} has several lines")
    return lines(text, 0)


def lines(text: str, indent: int) -> Yaml:
    """Filter: unchanged text for lines of a block with this indentation."""
    if match := _NOT_IN_A_BLOCK.search(text):
        raise jinja2.TemplateRuntimeError(f"a script can't hold the character {match[0]!r}")
    return Yaml(re.sub("\n(?!\n)", "\n" + " " * indent, text.rstrip("\n")))


# ---- Kubernetes


def longest_name(nodes: int, runs: int) -> int:
    """Maximum length of a job's name for which its pods' names are valid."""
    number = len(f"-{runs - 1}") if runs else 0
    return _LABEL - number - len(f"-node-0-{nodes - 1}") - _SUFFIX


def jobset_files(
    options: argparse.Namespace, config: str, runs: Sequence[ClusterRun], comments: Sequence[str]
) -> tuple[Files, list[str]]:
    """The file to apply, and the commands that apply it.

    Args:
        options: the job's options, see `add_container_options`.
        config: text of the TOML file, which goes to a ConfigMap.
        comments: lines on top of the file.
    """
    values = {
        **_shared_values(options, config, _pod_command),
        "job": options.job_name,
        "namespace": options.namespace,
        "queue": options.queue,
        "node_selector": dict(options.node_selector),
        "service_account": options.service_account,
        "runs": runs,
    }
    path = Path(options.output or f"{options.job_name}.jobset.yaml")
    text = render(_template(options, "jobset"), values, comments)
    namespace = f" --namespace {options.namespace}" if options.namespace else ""
    secret = (
        f"openssl rand -hex 16 | kubectl create secret generic {options.job_name}{namespace} "
        f"--from-file={SECRET_ENV}=/dev/stdin"
    )
    several = any(run.nodes[1] > 1 for run in runs)
    apply = f"kubectl apply -f {shlex.quote(str(path))}"
    return {path: text}, [*([secret] if several else []), apply]


def _pod_command(options: argparse.Namespace, grace: int, run: ClusterRun) -> list[str]:
    """The launcher's arguments. Kubernetes replaces `$(NAME)` in them, and `$$` by `$`."""
    most = run.nodes[1]
    flags = []
    endpoints = ""
    if most > 1:
        hosts = [_host(run, str(i)) for i in range(min(most, _TAKEOVER) if run.elastic else 1)]
        endpoints = ",".join(f"{host}:{PORT}" for host in hosts)
        # DNS may not know its name yet, so a pod is told which one it is.
        flags.append(f"--local-addr={_host(run, '$(JOB_COMPLETION_INDEX)')}")
    if run.elastic:
        flags.append(f"--max-restarts={run.restarts}")
    overrides = [word.replace("$", "$$") for word in run.flags]
    words = train_words(run, _CONFIG, endpoints, grace, flags)
    return [*words, *(["--", *overrides] if overrides else [])]


def _host(run: ClusterRun, index: str) -> str:
    """A pod's name in the JobSet's network."""
    return f"{run.name}-node-0-{index}.{run.name}"


# ---- SkyPilot


def skypilot_files(
    options: argparse.Namespace, config: str, runs: Sequence[ClusterRun], comments: Sequence[str]
) -> tuple[Files, list[str]]:
    """A file for each run, and the commands that launch them.

    Args:
        options: the job's options, see `add_container_options`.
        config: text of the TOML file, which becomes part of the script.
        comments: lines on top of the files.

    Raises:
        ConfigError: SkyPilot can't run this job.
    """
    _check_skypilot(options, config, runs)
    values = {
        **_shared_values(options, config, _machine_command),
        "accelerator": options.accelerator,
        "infra": options.infra,
        "spot": options.spot,
        "workdir": os.getcwd(),
        "checkout": str(CHECKOUT),
    }
    files = {}
    commands = []
    for run in runs:
        path = Path(options.output or f"{run.name}.sky.yaml")
        files[path] = render(_template(options, "skypilot"), {**values, "run": run}, comments)
        several = run.nodes[1] > 1
        secret = f"{SECRET_ENV}=$(openssl rand -hex 16) " if several else ""
        option = f"--secret {SECRET_ENV} " if several else ""
        commands.append(f"{secret}sky jobs launch {option}{shlex.quote(str(path))}")
    return files, commands


def _check_skypilot(options: argparse.Namespace, config: str, runs: Sequence[ClusterRun]) -> None:
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


def _machine_command(options: argparse.Namespace, grace: int, run: ClusterRun) -> str:
    """The launcher's command line for a shell."""
    launcher = "torchtitan" if options.container else '"$python" -m torchtitan'
    words = train_words(run, f"~/{run.name}.toml", f'"$first":{PORT}', grace)
    overrides = [shlex.join(["--", *run.flags])] if run.flags else []
    return " ".join([launcher, *words, *overrides])


# ---- both


def _template(options: argparse.Namespace, name: str) -> Path:
    return options.template or Path(__file__).with_name(f"{name}.yaml.j2")


def _shared_values(
    options: argparse.Namespace, config: str, command: Callable[..., list[str] | str]
) -> dict[str, Any]:
    grace = options.grace or GRACE_SECONDS
    return {
        "image": options.container,
        "volumes": options.volume,
        "grace": grace,
        "config": config,
        "command": partial(command, options, grace),
    }
