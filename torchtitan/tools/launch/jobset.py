"""Kubernetes: a JobSet (jobset.x-k8s.io/v1alpha2) for each run, and the configuration they share.

Nodes are the pods of one Indexed Job, which meet at the first pod's name. A pod that ends with
status 75, or is evicted, fails the Job for a reason of its own (`PodFailurePolicy`), upon which the
JobSet restarts without counting. Any other failure counts. With a range of nodes, the Job replaces
single pods instead, and the others train on.
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
from torchtitan.tools.launch.container_options import GRACE_SECONDS, workdir

_ROLE = "node"
_CONTAINER = "train"
_FOLDER = "/etc/torchtitan"
_FILE = "config.toml"
_RUN = "torchtitan/run"
"""Annotation: the name of a grid's run."""
_GROUP = 1000
"""Of the image's user, who writes to the volumes."""
_TAKEOVER = 3
"""Pods at which the launchers may meet, if the number of nodes varies."""
_LABEL = 63
"""Longest name of a pod's host."""
_SAVED = {
    "name": "saved",
    "action": "RestartJobSetAndIgnoreMaxRestarts",
    "onJobFailureReasons": ["PodFailurePolicy"],
}
"""Rule of the JobSet for a Job that `_pod_failures` has failed."""
_SUFFIX = len("-12345")
"""Kubernetes adds this to the name of a pod."""


def longest_name(nodes: int, runs: int) -> int:
    """Characters of a job's name, so that the names of its pods are valid."""
    number = len(f"-{runs - 1}") if runs else 0
    return _LABEL - number - len(f"-{_ROLE}-0-{nodes - 1}") - _SUFFIX


def jobset_files(
    options: argparse.Namespace, config: str, runs: Sequence[ClusterRun], comments: Sequence[str]
) -> tuple[dict[Path, str], list[str]]:
    """The file to apply, and the commands that do so.

    Args:
        options: the job's; see `add_container_options`.
        config: text of the TOML file, which goes to a ConfigMap.
        comments: lines on top of the file.
    """
    shared = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(options, options.job_name),
        "data": {_FILE: config},
    }
    path = Path(options.output or f"{options.job_name}.jobset.yaml")
    text = to_yaml([shared, *(_jobset(options, run) for run in runs)], comments)
    namespace = f" --namespace {options.namespace}" if options.namespace else ""
    secret = (
        f"openssl rand -hex 16 | kubectl create secret generic {options.job_name}{namespace} "
        f"--from-file={SECRET}=/dev/stdin"
    )
    several = any(run.nodes[1] > 1 for run in runs)
    apply = f"kubectl apply -f {shlex.quote(str(path))}"
    return {path: text}, [*([secret] if several else []), apply]


def _metadata(options: argparse.Namespace, name: str) -> dict[str, Any]:
    place = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **place, "labels": {"app.kubernetes.io/name": "torchtitan"}}


def _jobset(options: argparse.Namespace, run: ClusterRun) -> dict[str, Any]:
    metadata = _metadata(options, run.name)
    if options.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = options.queue
    if run.title:
        metadata["annotations"] = {_RUN: run.title}
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": run.nodes[1],
        "parallelism": run.nodes[1],
        "backoffLimit": run.restarts if run.elastic else 0,
        "podFailurePolicy": {"rules": _pod_failures("Ignore" if run.elastic else "FailJob")},
    }
    if run.elastic:  # a pod that joins when the others are done would wait for them
        job["successPolicy"] = {"rules": [{"succeededCount": 1}]}
    job["template"] = {"spec": _pod(options, run)}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    }
    if not run.elastic:
        spec["failurePolicy"] = {"maxRestarts": run.restarts, "rules": [_SAVED]}
    spec["replicatedJobs"] = [{"name": _ROLE, "replicas": 1, "template": {"spec": job}}]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": spec,
    }


def _pod_failures(action: str) -> list[dict[str, Any]]:
    """What isn't a failure of the run: it has saved, or its pod was taken away."""
    saved = {"containerName": _CONTAINER, "operator": "In", "values": [os.EX_TEMPFAIL]}
    evicted = {"type": "DisruptionTarget", "status": "True"}
    return [
        {"action": action, "onExitCodes": saved},
        {"action": action, "onPodConditions": [evicted]},
    ]


def _pod(options: argparse.Namespace, run: ClusterRun) -> dict[str, Any]:
    grace = options.grace or GRACE_SECONDS
    claims = {f"volume-{i}": one for i, one in enumerate(options.volume)}
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": options.container,
        "command": _command(run, grace),
    }
    if folder := workdir(options):
        container["workingDir"] = folder
        if run.own_code:
            container["env"] = [{"name": "PYTHONPATH", "value": folder}]
    secret = {"name": options.job_name, "optional": run.nodes[1] == 1}
    container |= {
        "envFrom": [{"secretRef": secret}],
        "resources": {"limits": {"nvidia.com/gpu": run.ranks}},
        "volumeMounts": [
            {"name": "config", "mountPath": _FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": name, "mountPath": one.path} for name, one in claims.items()),
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "securityContext": {"fsGroup": _GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    pod["containers"] = [container]
    pod["volumes"] = [
        {"name": "config", "configMap": {"name": options.job_name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *(
            {"name": name, "persistentVolumeClaim": {"claimName": one.name}}
            for name, one in claims.items()
        ),
    ]
    return pod


def _command(run: ClusterRun, grace: int) -> list[str]:
    """The launcher with its arguments, in which Kubernetes replaces `$(NAME)`, and `$$` by `$`."""
    most = run.nodes[1]
    flags = [launcher_grace(grace)]
    endpoints = ""
    if most > 1:
        hosts = [_host(run, str(i)) for i in range(min(most, _TAKEOVER) if run.elastic else 1)]
        endpoints = ",".join(f"{host}:{PORT}" for host in hosts)
        # DNS may not know its name yet, so a pod is told which one it is.
        flags.append(f"--local-addr={_host(run, '$(JOB_COMPLETION_INDEX)')}")
    if run.elastic:
        flags.append(f"--max-restarts={run.restarts}")
    # Python accepts a signal that arrives while it starts later; process 1 would ignore it.
    words = ["env", "--block-signal=TERM", "torchtitan"]
    words += train_words(run, f"{_FOLDER}/{_FILE}", endpoints, flags)
    overrides = [word.replace("$", "$$") for word in run.flags]
    return [*words, *(["--", *overrides] if overrides else [])]


def _host(run: ClusterRun, index: str) -> str:
    """A pod's name in the JobSet's network."""
    return f"{run.name}-{_ROLE}-0-{index}.{run.name}"
