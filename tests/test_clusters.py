"""The files for Kubernetes and SkyPilot in `examples/`: valid by the published schemas, and what
their containers run.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from kubeflow_trainer_api import models

from tests.cluster_files import KUBERNETES, SKY, container_of, job_of, read
from tests.slurm_stand_ins import ROOT
from torchtitan.commands import train

SKY_SCHEMA = ROOT / "tests/assets/skypilot_task.schema.json"
JOB_FAILURE_REASONS = {
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
}
"""What JobSet accepts in `onJobFailureReasons`: the reasons of Kubernetes' batch/v1."""
EDITS = {
    "as shipped": (),
    "elastic": ("elastic",),
    "optional": ("optional",),
    "both": ("elastic", "optional"),
}


@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_the_jobset_is_valid_by_its_schema(edits):
    """By the models of the `kubeflow_trainer_api` package, made from the schemas of JobSet and
    Kubernetes. Every key is one of the schema's: the models drop others.
    """
    jobset = read(KUBERNETES, *edits)
    assert models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset
    # What JobSet and Kubernetes check when a JobSet is applied, and their schemas don't say.
    job = job_of(jobset)
    assert job["completions"] == job["parallelism"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "as podFailurePolicy requires"
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert set(rule["onJobFailureReasons"]) <= JOB_FAILURE_REASONS
    mounts = container_of(jobset)["volumeMounts"]
    assert sorted(v["name"] for v in pod["volumes"]) == sorted(m["name"] for m in mounts)
    assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {
        "Ignore" if "elastic" in edits else "FailJob"
    }


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_the_job_in_the_jobset_is_valid_by_the_strict_schemas_of_kubernetes(edits, version):
    """1.31 is the first with what a range of nodes needs."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
    kubernetes.validate(job | {"spec": job_of(read(KUBERNETES, *edits))}, version, strict=True)


@pytest.mark.parametrize("edits", [(), ("optional",)])
def test_the_skypilot_task_is_valid_by_its_schema(edits):
    task = read(SKY, *edits)
    schema = jsonschema.Draft202012Validator(json.loads(SKY_SCHEMA.read_text()))
    # SkyPilot, too, removes keys without a value first.
    schema.validate(task)
    broken = task | {"resources": task["resources"] | {"acelerators": "H100:8"}}
    assert not schema.is_valid(broken)


@pytest.mark.slow
def test_the_schema_kept_here_is_skypilots():
    schemas = pytest.importorskip("sky.utils.schemas")
    task = schemas.get_task_schema()
    hooks = task["properties"]["config"]["properties"]["hooks"]
    task["properties"]["config"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"hooks": hooks},
    }
    task["properties"]["resources"] = schemas._get_single_resources_schema()
    kept = json.loads(SKY_SCHEMA.read_text())
    assert kept.pop("$comment").startswith("SkyPilot 0.14.1")
    assert kept == json.loads(json.dumps(task))


@pytest.mark.parametrize(
    ("edits", "nodes", "restarts"), [((), (2, 2), 0), (("elastic",), (1, 2), 10)]
)
def test_the_command_of_a_pod(monkeypatch, edits, nodes, restarts):
    """The launcher accepts it, its numbers are those of the job, and its hosts are the pods'."""
    monkeypatch.setenv("RDZV_SECRET", "x" * 16)
    jobset = read(KUBERNETES, *edits)
    job, container = job_of(jobset), container_of(jobset)
    at = container["command"].index("train")
    options, torchrun, config = train._parse(container["command"][at + 1 :])
    assert options.nnodes == nodes
    assert nodes[1] == job["completions"]
    assert options.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (options.max_restarts, job["backoffLimit"]) == (restarts, restarts)
    assert options.grace < job["template"]["spec"]["terminationGracePeriodSeconds"]
    (config_mount,) = (m for m in container["volumeMounts"] if m["name"] == "config")
    assert config == [f"--job.config_file={config_mount['mountPath']}/config.toml"]
    name = jobset["metadata"]["name"]
    pod = f"{name}-{jobset['spec']['replicatedJobs'][0]['name']}-0-{{}}.{name}"
    assert torchrun == [f"--local-addr={pod.format('$(JOB_COMPLETION_INDEX)')}"]
    hosts = [f"{pod.format(i)}:29500" for i in range(2 if edits else 1)]
    assert options.rdzv_endpoint == ",".join(hosts)


STAND_IN = """#!{python}
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
json.dump(sys.argv[1:], open("called.part", "w"))
os.rename("called.part", "called")
time.sleep({seconds})
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_the_script_of_a_machine(tmp_path, monkeypatch, stopped):
    """With a stand-in for the launcher; its end is the script's, also when the hook stops it."""
    task = read(SKY)
    for name, text in {
        "python": STAND_IN.format(python=sys.executable, seconds=30 if stopped else 0),
        "scripts/setup.sh": f"#!/bin/sh\necho {tmp_path}/python\n",
        "script": task["run"],
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    env = os.environ | {"HOME": str(tmp_path), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    process = subprocess.Popen(
        ["bash", "-i", "script"],  # as SkyPilot does
        env=env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    called = tmp_path / "called"
    if stopped:
        while not called.exists():
            assert process.poll() is None
        (hook,) = task["config"]["hooks"]
        subprocess.run(["bash", "-c", hook["run"]], env=env, timeout=30, check=True)
    assert process.wait(timeout=30) == (75 if stopped else 0)
    monkeypatch.setenv("RDZV_SECRET", "x" * 16)
    _, _, command, *words = json.loads(called.read_text())
    options, _, config = train._parse(words)
    assert command == "train"
    assert options.nnodes == (task["num_nodes"],) * 2
    assert f"H100:{options.nproc_per_node}" == task["resources"]["accelerators"]
    assert options.rdzv_endpoint == "127.0.0.1:29500"
    assert config == ["--job.config_file=my.toml", "--checkpoint.folder=s3://my-bucket/my-run"]


def test_the_secret_is_in_no_file():
    assert container_of(read(KUBERNETES))["envFrom"] == [{"secretRef": {"name": "my-run"}}]
    assert read(SKY)["secrets"] == {"RDZV_SECRET": None}


def test_the_dockerfile_passes_hadolint():
    folder = Path(sys.executable).parent
    hadolint = shutil.which("hadolint", path=f"{folder}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
