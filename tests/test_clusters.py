"""Jobs for Kubernetes and SkyPilot: valid by the published schemas, and what containers run."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import jsonschema
import pytest
import tomli
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from kubeflow_trainer_api import models

from tests.slurm_stand_ins import BASE, ROOT
from torchtitan.commands.submit import main
from torchtitan.config import load_config
from torchtitan.tools.launch.cluster_jobs import block, lines, scalar
from torchtitan.utils.errors import ConfigError

JOBSET = ["--to=jobset", "--container=reg/image:1", "--volume=runs:/runs"]
SKY = ["--to=skypilot", "--container=reg/image:1", "--accelerator=H100", "--volume=runs:/runs"]
SKY += ["--job.dump_folder=/runs/x"]
ELASTIC = ["--nodes=1:2", "--", "--training.global_batch_size=128", "--fault_tolerance.elastic"]
GRID = ["--nodes=2", "--grid=optimizer.lr=1e-4,3e-4"]
HOSTILE = "'\"`touch injected`$(touch injected);touch injected|&<>(){}*?[]!#~\\ %x $$(A) $HOME"
SKY_SCHEMA = ROOT / "tests/assets/skypilot_task.schema.json"
SCHEMAS = {"JobSet": models.JobsetV1alpha2JobSet, "ConfigMap": models.IoK8sApiCoreV1ConfigMap}
"""Models of the `kubeflow_trainer_api` package, made from the schemas of JobSet and Kubernetes."""
JOB_FAILURE_REASONS = {
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
}
"""What JobSet accepts in `onJobFailureReasons`: the reasons of Kubernetes' batch/v1."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def submit(*arguments):
    assert main([str(BASE), "--gpus-per-node=8", *arguments]) == 0


def documents(path="debug-model.jobset.yaml"):
    return list(yaml.safe_load_all(Path(path).read_text()))


def job_of(jobset):
    (node,) = jobset["spec"]["replicatedJobs"]
    return node["template"]["spec"]


def container_of(jobset):
    (container,) = job_of(jobset)["template"]["spec"]["containers"]
    return container


def refused(*arguments):
    with pytest.raises(ConfigError) as error:
        main([str(BASE), "--gpus-per-node=8", *arguments])
    assert not list(Path().iterdir())
    return error.value.problems


# ---- schemas

ALL_OPTIONS = [
    "--nodes=2",
    "--namespace=team",
    "--queue=team-queue",
    "--node-selector=cloud.google.com/gke-accelerator=nvidia-h100-80gb",
    "--service-account=trainer",
    "--volume=data:/data",
    "--max-restarts=7",
    "--grace=600",
]
JOBSETS = {
    "one node": ["--nodes=1"],
    "nodes": ["--nodes=16"],
    "elastic": ELASTIC,
    "all options": ALL_OPTIONS,
    "grid": GRID,
}


@pytest.mark.parametrize("case", JOBSETS)
def test_a_jobset_is_valid_by_its_schema(case):
    """Every key is one of the schema's: the models drop others."""
    submit(*JOBSET, *JOBSETS[case])
    found = documents()
    assert [one["kind"] for one in found] == ["ConfigMap", *["JobSet"] * (len(found) - 1)]
    for one in found:
        assert SCHEMAS[one["kind"]].from_dict(one).to_dict() == one
    for one in found[1:]:
        check_beyond_the_schema(one)


def check_beyond_the_schema(jobset):
    """What JobSet and Kubernetes check when a JobSet is applied, and their schemas don't say."""
    name = jobset["metadata"]["name"]
    job = job_of(jobset)
    assert len(f"{name}-node-0-{job['completions'] - 1}-12345") <= 63
    assert job["completions"] == job["parallelism"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "as podFailurePolicy requires"
    for rule in jobset["spec"].get("failurePolicy", {"rules": []})["rules"]:
        assert set(rule["onJobFailureReasons"]) <= JOB_FAILURE_REASONS
    pod = job["template"]["spec"]
    volumes = [one["name"] for one in pod["volumes"]]
    mounts = container_of(jobset)["volumeMounts"]
    assert sorted(volumes) == sorted(mount["name"] for mount in mounts)
    assert len({mount["mountPath"] for mount in mounts}) == len(mounts)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("case", JOBSETS)
def test_the_job_in_a_jobset_is_valid_by_the_strict_schemas_of_kubernetes(case, version):
    """1.31 is the first with what a range of nodes needs."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    submit(*JOBSET, *JOBSETS[case])
    shared, *jobsets = documents()
    kubernetes.validate(shared, version, strict=True)
    for one in jobsets:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
        kubernetes.validate(job | {"spec": job_of(one)}, version, strict=True)


@pytest.mark.parametrize(
    "arguments",
    [
        [*SKY, "--nodes=1"],
        [*SKY, "--nodes=2", "--spot", "--infra=aws/us-east-1", "--max-restarts=0", "--grace=60"],
        ["--to=skypilot", "--accelerator=H100", "--nodes=2", "--checkpoint.folder=s3://b/run"],
    ],
)
def test_a_skypilot_task_is_valid_by_its_schema(arguments):
    submit(*arguments)
    (task,) = documents("debug-model.sky.yaml")
    schema = json.loads(SKY_SCHEMA.read_text())
    # SkyPilot, too, removes keys without a value first.
    jsonschema.Draft202012Validator(schema).validate(task)
    broken = task | {"resources": task["resources"] | {"acelerators": "H100:8"}}
    assert not jsonschema.Draft202012Validator(schema).is_valid(broken)


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


# ---- a JobSet


def test_status_75_restarts_all_pods_without_counting_and_a_failure_counts():
    submit(*JOBSET, "--nodes=2", "--max-restarts=5")
    jobset = documents()[1]
    job = job_of(jobset)
    saved, evicted = job["podFailurePolicy"]["rules"]
    assert saved["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [75]}
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert saved["action"] == evicted["action"] == "FailJob"
    assert job["backoffLimit"] == 0
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 5
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300
    assert "--grace=290" in container_of(jobset)["command"]


def test_a_range_of_nodes_replaces_single_pods():
    submit(*JOBSET, *ELASTIC)
    jobset = documents()[1]
    job = job_of(jobset)
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore"]
    assert (job["completions"], job["backoffLimit"]) == (2, 10)
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert "failurePolicy" not in jobset["spec"], "the Job replaces pods itself"
    words = container_of(jobset)["command"]
    host = "debug-model-node-0-{}.debug-model"
    assert f"--rdzv-endpoint={host.format(0)}:29500,{host.format(1)}:29500" in words
    assert {"--nnodes=1:2", "--max-restarts=10"} <= set(words)


def test_the_dockerfile_passes_hadolint():
    folder = Path(sys.executable).parent
    hadolint = shutil.which("hadolint", path=f"{folder}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_text_that_kubectl_reads_as_a_number_or_truth_is_quoted():
    """To PyYAML `1e3`, `0o17` and `y` are text."""
    selector = {"a": "1e3", "b": "0o17", "c": "off", "d": "1.5", "e": "y", "f": "v1"}
    labels = [f"--node-selector={key}={value}" for key, value in selector.items()]
    submit(*JOBSET, "--nodes=1", "--namespace=1e3", *labels)
    text = Path("debug-model.jobset.yaml").read_text()
    assert text.count('namespace: "1e3"\n') == 2
    for value in ("1e3", "0o17", "off", "1.5", "y"):
        assert f': "{value}"\n' in text
    assert job_of(documents()[1])["template"]["spec"]["nodeSelector"] == selector


def test_what_is_asked_for_reaches_the_pods(capsys):
    submit(*JOBSET, *ALL_OPTIONS)
    shared, jobset = documents()
    assert shared["metadata"]["namespace"] == jobset["metadata"]["namespace"] == "team"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    pod = job_of(jobset)["template"]["spec"]
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert pod["serviceAccountName"] == "trainer"
    assert pod["terminationGracePeriodSeconds"] == 600
    claims = [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"][2:]]
    assert claims == ["runs", "data"]
    container = container_of(jobset)
    assert container["workingDir"] == "/runs"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert capsys.readouterr().out.splitlines() == [
        "openssl rand -hex 16 | kubectl create secret generic debug-model --namespace team "
        "--from-file=RDZV_SECRET=/dev/stdin",
        "kubectl apply -f debug-model.jobset.yaml",
    ]


@pytest.mark.parametrize("arguments", [JOBSET, SKY])
def test_the_secret_is_not_written(arguments):
    submit(*arguments, "--nodes=2")
    (path,) = Path().iterdir()
    text = path.read_text()
    assert "RDZV_SECRET: null" in text or "secretRef" in text
    assert "optional: true" not in text
    assert "kind: Secret" not in text


def test_the_container_gets_the_configuration_with_its_flags(tmp_path):
    file = tmp_path / "my_own.v2.toml"
    file.write_text(f'extends = "{BASE}"\n[training]\nsteps = 7\n')
    flags = ["--optimizer.lr=2e-4", f"--job.description={HOSTILE}"]
    assert main([str(file), "--gpus-per-node=8", "--nodes=1", *JOBSET, *flags]) == 0
    shared, jobset = documents("my-own-v2.jobset.yaml")
    assert jobset["metadata"]["name"] == "my-own-v2"
    inside = tmp_path / "inside.toml"
    inside.write_text(shared["data"]["config.toml"])
    assert "extends" not in tomli.loads(inside.read_text())
    there, here = (
        load_config([f"--job.config_file={path}", *given]).config.model_dump()
        for path, given in ((inside, []), (file, flags))
    )
    assert there["job"].pop("config_file") != here["job"].pop("config_file")
    assert there == here


def expanded(words, env):
    """Words as Kubernetes passes them on: `$(NAME)` is a variable, and `$$` a `$`."""
    found = []
    for word in words:
        parts = word.split("$$")
        for name, value in env.items():
            parts = [part.replace(f"$({name})", value) for part in parts]
        found.append("$".join(parts))
    return found


def test_a_grid_is_a_jobset_per_run(capsys):
    flag = f"--grid=job.description=['{HOSTILE.replace(chr(39), '')}']"
    submit(*JOBSET, *GRID, flag.replace("\\", ""), "--training.steps=9")
    shared, *jobsets = documents()
    assert tomli.loads(shared["data"]["config.toml"])["training"]["steps"] == 9
    assert [one["metadata"]["name"] for one in jobsets] == ["debug-model-0", "debug-model-1"]
    for one, lr in zip(jobsets, ("1e-4", "3e-4"), strict=True):
        assert one["metadata"]["annotations"]["torchtitan/run"] == f"lr={lr}"
        words = expanded(container_of(one)["command"], {"A": "wrong", "HOME": "wrong"})
        own = words[words.index("--") + 1 :]
        assert own[0] == f"--optimizer.lr={lr}"
        assert own[1] == f"--job.description={HOSTILE.replace(chr(39), '').replace(chr(92), '')}"
        assert own[2] == f"--job.dump_folder=outputs/debug_model-grid/lr={lr}"
        assert own[2].startswith("--job.dump_folder=outputs/"), "below the pod's working folder"
    assert "2 runs, each on 2 nodes of 8 ranks" in capsys.readouterr().err


def test_runs_of_a_grid_may_have_different_sizes():
    submit(*JOBSET, "--grid=parallelism.data_parallel_shard_degree=8,16")
    assert [job_of(one)["completions"] for one in documents()[1:]] == [1, 2]


# ---- files of the container


def test_own_code_is_found_where_the_container_works(tmp_path, monkeypatch):
    (tmp_path / "my_code.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    code = ["--nodes=1", "--experimental.custom_import=my_code", "--output=job"]
    submit(*JOBSET, *code)
    assert container_of(documents("job")[1])["env"] == [{"name": "PYTHONPATH", "value": "/runs"}]
    submit(*SKY, *code)
    assert 'export PYTHONPATH="$PWD"\n' in documents("job")[0]["run"]


def test_inputs_that_are_not_here_are_named_and_checkpoints_are_kept(capsys):
    data = ["--training.dataset=text", "--training.dataset_path=/data/a/*.jsonl"]
    submit(*JOBSET, "--nodes=1", "--volume=corpus:/data", *data)
    needed = "The container must have training.dataset_path = /data/a/*.jsonl (volume corpus)"
    assert capsys.readouterr().err.splitlines() == [
        "debug-model.jobset.yaml: 1 node of 8 ranks",
        needed,
    ]
    assert Path("debug-model.jobset.yaml").read_text().startswith(f"# {needed}\n")


def test_inputs_of_skypilot_are_sent_with_the_folder(tmp_path, capsys):
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}')
    inside = ["--training.dataset=text", "--training.dataset_path=corpus.jsonl"]
    outside = ["--validation.dataset=text", "--validation.dataset_path=/data/held-out.jsonl"]
    submit(*SKY, "--nodes=1", *inside, *outside)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "The container must have training.dataset_path = corpus.jsonl (this folder, which is sent)",
        "The container must have validation.dataset_path = /data/held-out.jsonl (image)",
    ]
    (task,) = documents("debug-model.sky.yaml")
    assert task["workdir"] == str(tmp_path)


def test_data_that_is_here_is_checked():
    Path("corpus.odd").touch()
    data = ["--training.dataset=text", "--training.dataset_path=corpus.odd"]
    with pytest.raises(ConfigError, match=r"corpus.odd has an unknown format"):
        submit(*JOBSET, "--nodes=1", *data)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ([], False),
        (["--volume=runs:/runs"], True),
        (["--volume=runs:/runs", "--job.dump_folder=../x"], False),
        (["--volume=runs:/runs", "--job.dump_folder=/runs/../x"], False),
        (["--volume=runs:/runs/a", "--job.dump_folder=../a/x"], True),
        (["--volume=data:/data", "--job.dump_folder=/runs/x"], False),
        (["--volume=data:/data", "--job.dump_folder=/data/x"], True),
        (["--checkpoint.folder=s3://bucket/run"], True),
        (["--checkpoint.enable=false"], True),
    ],
)
def test_checkpoints_must_outlive_the_container(arguments, kept):
    given = ["--to=jobset", "--container=image", "--nodes=1", *arguments]
    if kept:
        submit(*given)
    else:
        (problem,) = refused(*given)
        assert "in the container and lost with it" in problem


# ---- refusals

REFUSED = {
    "Slurm's options": (
        [*JOBSET, "--partition=p", "--account=a", "--time=1:00", "--sbatch=--qos=x", "--submit"],
        [
            "--partition: not for --to jobset: use --queue or --node-selector",
            "--account: not for --to jobset: use --queue or --namespace",
            "--time: not for --to jobset: these jobs have no time limit; training.steps ends the "
            "run",
            "--sbatch: not for --to jobset: edit the file that is written",
            "--submit: not for --to jobset: run the kubectl command that is printed",
        ],
    ),
    "Kubernetes' with SkyPilot": (
        [*SKY, "--queue=q", "--namespace=n"],
        [
            "--queue: not for --to skypilot: only Kubernetes has queues of Kueue",
            "--namespace: not for --to skypilot: it belongs to SkyPilot's configuration",
        ],
    ),
    "Kubernetes' with Slurm": (
        ["--volume=a:/b", "--spot", "--max-restarts=0"],
        [
            "--volume: not for --to slurm: nodes share a file system; for a container, set "
            "CONTAINER_MOUNTS",
            "--max-restarts: not for --to slurm: set MAX_RESTARTS in the job's environment",
            "--spot: not for --to slurm: use --partition",
        ],
    ),
    "no image": (
        ["--to=jobset"],
        ["--container: give the image that the pods run, as registry/name:tag"],
    ),
    "no GPU": (
        ["--to=skypilot"],
        ["--accelerator: give the kind of GPU, as SkyPilot calls it: H100"],
    ),
    "elastic SkyPilot": (
        [*SKY, *ELASTIC],
        [
            "--nodes: SkyPilot starts a fixed number of machines, and all again when one is lost; "
            "give --nodes 2"
        ],
    ),
    "name": (
        [*JOBSET, "--nodes=1", "--job-name=My_Run"],
        [
            "--job-name: 'My_Run': must be lower-case letters, digits and '-', with a letter in "
            "front and no '-' at the end"
        ],
    ),
    "long name": (
        [*JOBSET, "--nodes=1000", f"--job-name={'a' * 47}", "--training.global_batch_size=64000"],
        [f"--job-name: '{'a' * 47}': must have at most 46 characters"],
    ),
    "pyxis' image": (
        ["--to=jobset", "--container=docker://image"],
        ["--container: name the image without docker://"],
    ),
    "one file for SkyPilot's runs": (
        [*SKY[:-1], "--folder=/runs/grid", *GRID, "--output=all.yaml"],
        ["--output: SkyPilot takes one file per run; leave their names to --job-name"],
    ),
    "two volumes": ([*JOBSET, "--volume=other:/runs"], ["--volume: two are at one path"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_to_do_instead(case):
    arguments, problems = REFUSED[case]
    assert refused(*arguments) == problems


@pytest.mark.parametrize(
    "option",
    [
        "--volume=runs",
        "--volume=Runs:/x",
        "--volume=runs:relative",
        "--volume=runs:/dev/shm",
        "--volume=runs://etc/torchtitan",
        "--volume=runs:/a:/b",
        "--queue=a b",
        "--node-selector=zone",
        "--node-selector=zone=a b",
        "--namespace=a\nb",
        "--grace=5",
        "--max-restarts=-1",
        "--to=pbs",
        "--accelerator=H100:8",
        "--infra=aws us-east-1",
    ],
)
def test_values_that_the_scheduler_would_refuse_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        main([str(BASE), "--gpus-per-node=8", *JOBSET, option])
    assert option.partition("=")[0] in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_runs_on_this_machine_have_no_scheduler(capsys):
    with pytest.raises(SystemExit):
        main([str(BASE), *JOBSET, "--local", "--grid=debug.seed=1,2"])
    assert "--local runs here, not with --to jobset" in capsys.readouterr().err


def test_a_dry_run_prints_the_file_and_writes_nothing(capsys):
    submit(*JOBSET, "--nodes=2", "--dry-run")
    out = capsys.readouterr()
    assert [one["kind"] for one in yaml.safe_load_all(out.out)] == ["ConfigMap", "JobSet"]
    assert out.err == "debug-model.jobset.yaml, not written: 2 nodes of 8 ranks\n"
    assert not list(Path().iterdir())


# ---- SkyPilot


def test_a_skypilot_job_recovers_from_75_without_counting(capsys):
    submit(*SKY, "--nodes=2", "--spot")
    (task,) = documents("debug-model.sky.yaml")
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"] == {
        "max_restarts_on_errors": 3,
        "recover_on_exit_codes": [75],
    }
    assert task["secrets"] == {"RDZV_SECRET": None}
    assert capsys.readouterr().out == (
        "RDZV_SECRET=$(openssl rand -hex 16) sky jobs launch --secret RDZV_SECRET "
        "debug-model.sky.yaml\n"
    )


def test_a_grid_is_a_skypilot_file_per_run(capsys):
    submit(*SKY[:-1], "--folder=/runs/grid", *GRID)
    files = ["debug-model-0.sky.yaml", "debug-model-1.sky.yaml"]
    assert sorted(path.name for path in Path().iterdir()) == files
    commands = capsys.readouterr().out.splitlines()
    assert [
        shlex.split(line.replace("$(openssl rand -hex 16)", ""))[-1] for line in commands
    ] == files
    assert "--job.dump_folder=/runs/grid/lr=3e-4" in Path(files[1]).read_text()


def run_sky(task, folder, rank=0, **env):
    """Run a task's script as SkyPilot does on a machine."""
    home = folder / f"home{rank}"
    home.mkdir(exist_ok=True)
    env = os.environ | {
        "HOME": str(home),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NODE_RANK": str(rank),
        **env,
    }
    script = home / "script"
    script.write_text(task["run"])
    command = ["bash", "-i", str(script)]
    return subprocess.Popen(
        command, env=env, cwd=folder, text=True, stdin=subprocess.DEVNULL, start_new_session=True
    )


STAND_IN = """#!{python}
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
json.dump([sys.argv[1:], open(sys.argv[2]).read()], open("called.part", "w"))
os.rename("called.part", "called")
time.sleep(30 if "--training.steps=1" in sys.argv else 0)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_the_script_of_a_machine(tmp_path, stopped):
    """With a stand-in for the launcher; its end is the script's, also when the hook stops it."""
    flags = ["--runs=runs.toml"]
    steps = 1 if stopped else 2
    Path("runs.toml").write_text(
        f"[[runs]]\njob.description = '''{HOSTILE}'''\ntraining.steps = {steps}\n"
    )
    submit(*SKY[:-1], "--folder=/runs/grid", "--nodes=2", "--job-name=it", *flags)
    (task,) = documents("it-0.sky.yaml")
    launcher = tmp_path / "bin/torchtitan"
    launcher.parent.mkdir()
    launcher.write_text(STAND_IN.format(python=sys.executable))
    launcher.chmod(0o755)
    process = run_sky(task, tmp_path, PATH=f"{launcher.parent}:{os.environ['PATH']}")
    if stopped:
        while not Path("called").exists():
            assert process.poll() is None
        (hook,) = task["config"]["hooks"]
        env = os.environ | {"HOME": str(tmp_path / "home0")}
        subprocess.run(["bash", "-c", hook["run"]], env=env, timeout=30, check=True)
    assert process.wait(timeout=30) == (75 if stopped else 0)
    words, text = json.loads(Path("called").read_text())
    assert words[2:5] == ["--nproc-per-node=8", "--nnodes=2", "--rdzv-endpoint=127.0.0.1:29500"]
    assert words[5:8] == ["--grace=290", "--", f"--job.description={HOSTILE}"]
    assert tomli.loads(text)["job"]["description"] == "Llama 3 debug model"
    assert not list(tmp_path.rglob("injected"))


# ---- templates


@given(text=st.text(max_size=40))
@example(text="a\n- b: c\n---\n")
@example(text='": x\n')
@example(text=" a\n b\n")
@example(text="a\n\n")
@example(text="a\u0085b\u2028c\n")
def test_no_text_changes_the_structure_of_a_file(text):
    for inserted in (scalar(text), block(text, 6)):
        file = f"a:\n  - b: {inserted}\n    c: 1\nd: {scalar(text)}\n"
        assert yaml.safe_load(file) == {"a": [{"b": text, "c": 1}], "d": text}
    with contextlib.suppress(jinja2.TemplateError):
        file = f"a: |\n  begin\n  {lines(text, 2)}\n  end\nb: 1\n"
        assert yaml.safe_load(file) == {"a": f"begin\n{text.rstrip(chr(10))}\nend\n", "b": 1}


def test_a_template_of_the_user(tmp_path):
    template = tmp_path / "mine.j2"
    shipped = (ROOT / "torchtitan/tools/launch/jobset.yaml.j2").read_text()
    limits = "                  nvidia.com/gpu: {{ run.ranks }}\n"
    assert limits in shipped
    template.write_text(shipped.replace(limits, f"{limits}                  rdma/hca: 8\n"))
    submit(*JOBSET, "--nodes=2", f"--template={template}", "--output=job")
    resources = container_of(documents("job")[1])["resources"]
    assert resources == {"limits": {"nvidia.com/gpu": 8, "rdma/hca": 8}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\n{% if x %}\n", "mine.j2:2: Unexpected end of template"),
        ("name: {{ nmae }}\n", "'nmae' is undefined"),
        ("a: [1\n", "expected ',' or ']'"),
        ("a: |\n  {{ config | line }}\n", "has several lines"),
    ],
)
def test_a_template_that_is_wrong(tmp_path, monkeypatch, text, problem):
    template = tmp_path / "mine.j2"
    template.write_text(text)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    (said,) = refused(*JOBSET, "--nodes=1", f"--template={template}")
    assert str(template) in said
    assert problem in said
