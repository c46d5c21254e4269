"""The files of `examples/` for Kubernetes and SkyPilot, as a reader edits them."""

import re

import yaml

from tests.slurm_stand_ins import ROOT

KUBERNETES = ROOT / "examples/kubernetes/train.yaml"
SKY = ROOT / "examples/sky/train.yaml"


def edited(text: str, kind: str) -> str:
    """`text` with what its comments `# KIND: ...` say: a line of its own, or another value."""
    text = re.sub(rf"^( *)# {kind}: ", r"\1", text, flags=re.M)
    return re.sub(rf"\S+ +# {kind}: ", "", text)


def job_of(jobset):
    (node,) = jobset["spec"]["replicatedJobs"]
    return node["template"]["spec"]


def container_of(jobset):
    (container,) = job_of(jobset)["template"]["spec"]["containers"]
    return container


def read(file, *kinds: str):
    text = file.read_text()
    for kind in kinds:
        text = edited(text, kind)
    return yaml.safe_load(text)
