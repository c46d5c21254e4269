"""The Slurm script and the tool that fills it in, with stand-ins for sbatch, srun, scontrol and the
launcher.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm_stand_ins import BASE, ROOT, calls
from torchtitan.commands.submit import main
from torchtitan.commands.train import node_range
from torchtitan.tools.launch.slurm_script import MARK, TEMPLATE
from torchtitan.utils.errors import ConfigError, UserError

ENDPOINTS = "node7:23456,node8:23456,node9:23456"
"""Those after the first take over when it is lost, where the number of nodes may change."""


def test_every_node_runs_the_launcher_with_the_first_as_meeting_point(slurm, tmp_path):
    job = slurm(TEMPLATE, "my.toml", "--training.dataset_path", "a b/*.jsonl")
    assert job.wait(timeout=30) == 0, job.stderr.read()
    task = json.loads(calls(tmp_path, "task")[0])
    assert len(set(task.pop("RDZV_SECRET"))) > 4, "32 random hexadecimal digits"
    assert task == {
        "argv": ["--training.dataset_path", "a b/*.jsonl"],
        "CONFIG_FILE": "my.toml",
        "NNODES": "3",
        "RDZV_ENDPOINT": "node7:23456",
        "NGPU": None,
    }
    assert calls(tmp_path, "setup") == ["set up"]
    assert calls(tmp_path, "srun") == ["--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    assert not any("requeue" in call for call in calls(tmp_path, "scontrol"))


def test_without_a_checkout_the_installed_package_runs(slurm, tmp_path):
    python = tmp_path / "python"
    (slurm.root / "run_train.sh").rename(python)
    job = slurm(
        TEMPLATE,
        "my.toml",
        "--training.steps=7",
        TORCHTITAN_PYTHON=str(python),
        NGPU="8",
        NNODES="2:3",
    )
    assert job.wait(timeout=30) == 0, job.stderr.read()
    launcher = [
        "-m",
        "torchtitan",
        "train",
        "my.toml",
        "--nnodes",
        "2:3",
        "--rdzv-endpoint",
        ENDPOINTS,
    ]
    argv = json.loads(calls(tmp_path, "task")[0])["argv"]
    assert argv == [*launcher, "--nproc-per-node", "8", "--", "--training.steps=7"]
    assert not calls(tmp_path, "setup")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED"])
def test_a_signal_reaches_the_launcher_and_the_job_is_put_back(slurm, tmp_path, number, state):
    job = slurm(TEMPLATE, "my.toml", seconds=60, STATE=state)
    assert stopped(job, tmp_path, number) == 75
    assert ("requeue 123456" in calls(tmp_path, "scontrol")) == (state == "RUNNING")


@pytest.mark.parametrize("nodes", ["3", "2:3"])
def test_a_killed_launcher_does_not_hide_that_the_others_have_saved(slurm, tmp_path, nodes):
    """srun's status is the highest; with a range of nodes the run goes on without a launcher."""
    job = slurm(TEMPLATE, "my.toml", seconds=60, NNODES=nodes, WHEN_STOPPED="137")
    assert stopped(job, tmp_path, signal.SIGUSR1) == (75 if nodes == "2:3" else 137)
    assert ("requeue 123456" in calls(tmp_path, "scontrol")) == (nodes == "2:3")


def stopped(job, folder, number):
    """The status of a job that is sent a signal while its launcher runs."""
    deadline = time.monotonic() + 30
    while not calls(folder, "task"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    job.send_signal(number)
    job.wait(timeout=30)
    return job.returncode


def test_two_other_nodes_watch_a_job_that_may_lose_its_first(slurm, tmp_path):
    job = slurm(TEMPLATE, "my.toml", NNODES="2:3")
    assert job.wait(timeout=30) == 0, job.stderr.read()
    watches = "\n".join(calls(tmp_path, "watch"))
    assert sorted(re.findall("--nodelist=(.*?) ", watches)) == ["node8", "node9"]
    assert watches.count("done 123456 node7") == 2


@pytest.mark.parametrize(("status", "comes_back"), [(75, True), (1, False)])
def test_only_status_75_comes_back(slurm, tmp_path, status, comes_back):
    job = slurm(TEMPLATE, "my.toml", STATUS=str(status))
    assert job.wait(timeout=30) == status
    assert ("requeue 123456" in calls(tmp_path, "scontrol")) == comes_back


def test_containers(slurm, tmp_path):
    job = slurm(
        TEMPLATE,
        "my.toml",
        CONTAINER="docker://an/image",
        CONTAINER_MOUNTS="/data:/data",
        NNODES="2:3",
    )
    assert job.wait(timeout=30) == 0, job.stderr.read()
    here = tmp_path
    root = slurm.root
    assert calls(tmp_path, "srun") == [
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--container-image=docker://an/image",
        f"--container-mounts={root}:{root},{here}:{here},/data:/data",
        f"--container-workdir={here}",
    ]
    assert not calls(tmp_path, "setup")


def test_no_configuration_is_refused(slurm):
    job = slurm(TEMPLATE)
    assert job.wait(timeout=30) == 2
    assert "give a TOML file" in job.stderr.read()


LAYOUT = ["--parallelism.data_parallel_shard_degree=4", "--parallelism.tensor_parallel_degree=4"]


def submit(*arguments):
    return main([str(BASE), "--gpus-per-node=8", *arguments])


def test_the_layout_decides_on_the_nodes_and_the_job_runs(slurm, tmp_path, monkeypatch, capsys):
    """The written file, run as a job: its settings reach the launcher."""
    monkeypatch.chdir(tmp_path)
    extra = [
        "--time=1:00:00",
        "--partition=big",
        "--account=mine",
        "--sbatch=--qos=high",
        "--job-name=my run",
    ]
    assert (
        submit(*extra, *LAYOUT, "--training.global_batch_size=64", "--job.description=it's mine")
        == 0
    )
    assert capsys.readouterr().out == "sbatch 'my run.sbatch'\n"
    script = tmp_path / "my run.sbatch"
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert lines[-7:] == [
        "#SBATCH --job-name='my run'",
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=1:00:00",
        "#SBATCH --partition=big",
        "#SBATCH --account=mine",
        "#SBATCH --qos=high",
    ]
    assert not list(tmp_path.glob(".*"))
    text = script.read_text().replace(f"TORCHTITAN_ROOT={ROOT}", f"TORCHTITAN_ROOT='{slurm.root}'")
    script.write_text(text)
    job = slurm(script)
    assert job.wait(timeout=30) == 0, job.stderr.read()
    task = json.loads(calls(tmp_path, "task")[0])
    assert task.pop("RDZV_ENDPOINT")
    assert task.pop("RDZV_SECRET")
    assert task == {
        "argv": [*LAYOUT, "--training.global_batch_size=64", "--job.description=it's mine"],
        "CONFIG_FILE": str(BASE),
        "NNODES": "2",
        "NGPU": "8",
    }


@pytest.fixture
def here(slurm, tmp_path, monkeypatch):
    """A folder to submit from, on a machine that has Slurm."""
    monkeypatch.chdir(tmp_path)
    for name in ("PATH", "CALLS"):
        monkeypatch.setenv(name, slurm.env[name])
    return tmp_path


def test_submit_calls_sbatch(here, monkeypatch):
    flags = ["--submit", *LAYOUT, "--training.global_batch_size=64"]
    assert submit(*flags) == 0
    assert calls(here, "sbatch") == ["debug_model.sbatch"]
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(UserError, match=r"no sbatch; submit .* on a machine that has Slurm"):
        submit(*flags)


def test_a_job_that_can_not_be_written_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    flags = [*LAYOUT, "--training.global_batch_size=64"]
    for place, why in {
        "--output=folder": "folder: Is a directory",
        "--output=/proc/none/job": "/proc/none/job: No such file or directory",
        f"--job-name={'n' * 250}": "nnn.sbatch: File name too long",
    }.items():
        with pytest.raises(UserError, match=f"can't write .*{why}"):
            submit(place, *flags)
    assert submit("--output=new/job", *flags) == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "job", "new"]


BAD = {
    "all ranks": ([], "give the number of nodes"),
    "part of a node": (
        ["--parallelism.data_parallel_shard_degree=12"],
        "12 ranks, which don't fill nodes of 8",
    ),
    "batch": (["--nodes=2", "--training.global_batch_size=7"], "not a multiple"),
    "range": (
        ["--nodes=1:2", "--", "--training.global_batch_size=128"],
        "need fault_tolerance.elastic = true",
    ),
    "key": (["--nodes=2", "--training.stpes=7"], "did you mean"),
}


@pytest.mark.parametrize("case", BAD)
def test_nothing_is_written_for_a_configuration_that_is_wrong(tmp_path, monkeypatch, case):
    arguments, text = BAD[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=text):
        submit(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flag", ["job-name", "time", "partition", "account", "container", "sbatch", "output"]
)
@pytest.mark.parametrize("end", ["\n", "\r", "\x00", "\u2028", "\udcff"])
def test_what_would_end_its_line_of_the_script_is_refused(tmp_path, monkeypatch, capsys, flag, end):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        submit(f"--{flag}=1:00{end}touch injected #", *LAYOUT, "--training.global_batch_size=64")
    error = capsys.readouterr().err
    assert f"--{flag}: '1:00" in error
    assert "has a newline or another unprintable character" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "a/b", "../b", "..", ".hidden", "-rf", "/tmp/b"])
def test_a_job_name_is_no_path(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        submit(f"--job-name={name}", *LAYOUT, "--training.global_batch_size=64")
    assert f"--job-name: '{name}' can't be part of a file name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_newlines_in_the_configurations_name_and_flags_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        main(
            [
                "a\nb.toml",
                "--gpus-per-node=8",
                "--nodes=2",
                "--job.description",
                "c\nd",
                "--model.flavor=e\nf",
            ]
        )
    assert [problem.partition(":")[0] for problem in error.value.problems] == [
        "the configuration's file",
        "--job.description",
        "--model.flavor",
    ]


def test_nothing_in_a_name_runs(slurm, tmp_path, monkeypatch):
    """What means something to a shell, in all that `submit` takes: nothing but the launcher runs in
    the job.
    """
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"my {HOSTILE}.toml"
    file.write_text(f'extends = "{BASE}"')
    settings = [
        f"--{flag}={HOSTILE}" for flag in ("job-name", "time", "partition", "account", "sbatch")
    ]
    overrides = [*LAYOUT, "--training.global_batch_size=64", f"--job.description={HOSTILE}"]
    assert main([str(file), "--gpus-per-node=8", "--output=job", *settings, *overrides]) == 0
    script = tmp_path / "job"
    script.write_text(
        script.read_text().replace(f"TORCHTITAN_ROOT={ROOT}", f"TORCHTITAN_ROOT='{slurm.root}'")
    )
    job = slurm(script)
    assert job.wait(timeout=30) == 0, job.stderr.read()
    task = json.loads(calls(tmp_path, "task")[0])
    assert (task["CONFIG_FILE"], task["argv"]) == (str(file), overrides)
    assert not list(tmp_path.rglob("injected*"))


# ---- arrays

HOSTILE = "'\"`touch injected`$(touch injected);touch injected|&<>(){}*?[]!#~\\ %x"
RUNS = f"""\
--optimizer.lr 1e-4 --debug.seed=1   # a comment

# none
--job.description {shlex.quote(HOSTILE)} --job.dump_folder=elsewhere
"""
NODE = ["--nodes=1", "--runs=runs.txt"]


def write_runs(folder, text):
    (folder / "runs.txt").write_text(text)


def test_each_task_is_a_line_of_flags(slurm, here):
    """Nothing in a value runs."""
    write_runs(here, RUNS)
    assert submit(*NODE, "--at-most=3", "--training.steps=7") == 0
    file = here / "outputs/debug_model/debug_model.sbatch"
    text = file.read_text()
    assert f"#SBATCH --output={file.parent}/%x-%A_%a.log\n" in text
    assert "#SBATCH --array=0-1%3\n" in text
    file.write_text(text.replace(f"TORCHTITAN_ROOT={ROOT}", f"TORCHTITAN_ROOT='{slurm.root}'"))
    argv = []
    for task in range(3):
        (here / "calls/task").unlink(missing_ok=True)
        job = slurm(file, SLURM_ARRAY_JOB_ID="1", SLURM_ARRAY_TASK_ID=str(task))
        assert job.wait(timeout=30) == (2 if task == 2 else 0), job.stderr.read()
        argv += [json.loads(line)["argv"] for line in calls(here, "task")]
    dump = "--job.dump_folder=./outputs/debug_model"
    assert argv == [
        ["--training.steps=7", f"{dump}/0", "--optimizer.lr", "1e-4", "--debug.seed=1"],
        [
            *("--training.steps=7", f"{dump}/1", "--job.description", HOSTILE),
            "--job.dump_folder=elsewhere",
        ],
    ]
    assert not list(here.rglob("injected"))


def test_only_the_preempted_task_is_put_back(slurm, here):
    write_runs(here, RUNS)
    submit(*NODE, "--output=job")
    file = here / "job"
    file.write_text(
        file.read_text().replace(f"TORCHTITAN_ROOT={ROOT}", f"TORCHTITAN_ROOT='{slurm.root}'")
    )
    job = slurm(file, seconds=60, SLURM_ARRAY_JOB_ID="123450", SLURM_ARRAY_TASK_ID="1")
    assert stopped(job, here, signal.SIGUSR1) == 75, job.stderr.read()
    assert calls(here, "scontrol")[-2:] == ["show job 123450_1", "requeue 123450_1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--runs: runs.txt has no line with flags"),
        ("optimizer.lr=1", "--runs: runs.txt:1: unexpected argument"),
        ("--optimizer.lr 'a", "--runs: runs.txt:1: no closing quotation"),
        ("\n--optimizer.lrr 1\n--optimizer.lrr 1", "runs.txt:2: --optimizer.lrr: unknown key"),
        ("--config=llama3_8b", "--runs: runs.txt:1: --config: all runs have one"),
        ("--training.global_batch_size=17", "runs.txt:1: .*not a multiple"),
        ("--job.description='a\u2028b'", "runs.txt:1: .*newline"),
        ("--job.dump_folder=a\n" * 2, "runs.txt:2: job.dump_folder: a is also that of runs.txt:1"),
        (
            "--checkpoint.folder=s3://b/all\n" * 2,
            "runs.txt:2: checkpoint.folder: s3://b/all is also",
        ),
    ],
)
def test_an_array_with_a_wrong_run_is_not_written(here, text, message):
    write_runs(here, text)
    before = sorted(here.rglob("*"))
    with pytest.raises(ConfigError, match=message) as error:
        submit(*NODE)
    assert len(error.value.problems) == 1
    assert sorted(here.rglob("*")) == before


def test_all_tasks_have_as_many_ranks(here):
    degree = "--parallelism.data_parallel_shard_degree"
    write_runs(here, f"{degree}=8\n{degree}=16")
    with pytest.raises(
        ConfigError, match=r"runs.txt:2: needs 2 nodes of 8 ranks, the first run 1 node"
    ):
        submit("--runs=runs.txt")


def test_a_range_of_nodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [
        "--nodes=1:2",
        "--output=job",
        "--",
        "--training.global_batch_size=64",
        "--fault_tolerance.elastic",
    ]
    assert submit(*argv) == 0
    text = (tmp_path / "job").read_text()
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --no-kill\n" in text
    assert "export NNODES=1:2\n" in text
    assert node_range("3") == (3, 3)


def test_shell_scripts_are_clean(tmp_path, monkeypatch):
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    assert MARK in TEMPLATE.read_text()
    monkeypatch.chdir(tmp_path)
    submit(*LAYOUT, "--training.global_batch_size=64")
    scripts = [
        ROOT / "run_train.sh",
        *(ROOT / "scripts").glob("*.sh"),
        TEMPLATE,
        tmp_path / "debug_model.sbatch",
    ]
    done = subprocess.run([shellcheck, *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


NOT_IN_BASH_3_2 = (
    r"mapfile|readarray|coproc|wait -n|local -[Anr]|declare -[Anr]|&>>|\|&|\[\[ -v|%\("
    r"|\$\{\w+[\^,@]|\$\{\w+\[-"
    r"|readlink -f|sed -i|date -d|grep -P|stat -c|\$\(nproc"  # GNU's, not in macOS
)
"""What macOS lacks: its bash is 3.2, and it has few of GNU's options."""


def test_the_scripts_suit_bash_3_2():
    """Before 4.4, bash also fails on `"${array[@]}"` under `set -u` if the array is empty."""
    bash = shutil.which("bash", path="/bin:/usr/bin")
    for script in (ROOT / "run_train.sh", *(ROOT / "scripts").glob("*.sh")):
        text = script.read_text()
        assert re.findall(NOT_IN_BASH_3_2, text) == [], script.name
        assert re.findall(r"\b\w+=\(\)", text) == [], script.name
        done = subprocess.run([bash, "-n", str(script)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), script.name


def test_a_node_without_gpus_is_refused(capsys):
    with pytest.raises(SystemExit):
        submit("--gpus-per-node=0", *LAYOUT)
    assert "--gpus-per-node: 0: must be 1 or more" in capsys.readouterr().err
