"""Many runs by `torchtitan submit`, with stand-ins for Slurm's commands."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli

from tests.slurm_stand_ins import BASE, ROOT, calls
from torchtitan.commands.jobs import main as jobs
from torchtitan.commands.submit import main
from torchtitan.tools.launch.grid import flags_with_folder, group_problems, make_runs, run_in_turn
from torchtitan.tools.launch.slurm_jobs import read_record
from torchtitan.utils.errors import ConfigError, UserError

GRID = ["--grid", "optimizer.lr=1e-4,3e-4", "--grid", "debug.seed=1,2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def submit(*arguments):
    return main([str(BASE), "--gpus-per-node=2", "--nodes=1", *arguments])


def names(*axes, file=None):
    return [run.name for run in make_runs(axes, file)]


# ---- what varies


def test_a_grid_is_the_product_of_its_values():
    runs = make_runs(["optimizer.lr=1e-4,3e-4", "training.seed=1,2,3"], None)
    assert [run.name for run in runs] == [
        f"lr={lr}_seed={seed}" for lr in ("1e-4", "3e-4") for seed in (1, 2, 3)
    ]
    assert runs[4].flags == ("--optimizer.lr=3e-4", "--debug.seed=2")  # by its new name


def test_names_tell_runs_apart():
    assert names("training.steps=1,2", "validation.steps=3") == [
        "training.steps=1",
        "training.steps=2",
    ]
    assert names("training.dataset_path=/a b/x.jsonl,/a;b/x.jsonl") == [
        "dataset_path=a-b-x.jsonl",
        "dataset_path=a-b-x.jsonl_1",
    ]
    long = names(f"job.description={'x' * 300},{'x' * 299}y")
    assert len(set(long)) == 2
    assert max(map(len, long)) < 130
    assert names("optimizer.lr=1") == ["base"]


def test_lists_are_toml():
    (none, one) = make_runs(['model.converters=[[], ["float8"]]'], None)
    assert (none.flags, one.flags) == (
        ("--model.converters=[]",),
        ('--model.converters=["float8"]',),
    )


def test_runs_from_lines(tmp_path):
    file = tmp_path / "runs.txt"
    file.write_text(
        "--optimizer.lr 1e-3 --compile.enable   # faster\n\n# none\n--job.description='a b'\n"
    )
    runs = make_runs(["debug.seed=1,2"], file)
    assert [run.flags for run in runs][::2] == [
        ("--optimizer.lr=0.001", "--compile.enable=true", "--debug.seed=1"),
        ("--job.description=a b", "--debug.seed=1"),
    ]
    assert [run.name for run in runs] == [
        f"{name}_seed={seed}"
        for name in ("lr=0.001_enable=true", "description=a-b")
        for seed in (1, 2)
    ]


def test_runs_from_tables(tmp_path):
    file = tmp_path / "runs.toml"
    file.write_text(
        '[[runs]]\nname = "wide net"\nmodel.overrides.dim = '
        '512\n[[runs]]\nmodel.converters = ["float8"]\n'
    )
    runs = make_runs([], file)
    assert [(run.name, *run.flags) for run in runs] == [
        ("wide-net", "--model.overrides.dim=512"),
        ("base", '--model.converters=["float8"]'),
    ]


@pytest.mark.parametrize(
    ("axes", "text", "message"),
    [
        (["lr=1,2"], None, "is not section.key=value"),
        (["optimizer.lr"], None, "is not section.key=value"),
        (["optimizer.lr="], None, "an empty value"),
        (["optimizer.lr=1,1"], None, "the same value twice"),
        (["optimizer.lr=[1,"], None, "not a list of TOML"),
        (["debug.seed=1,2", "training.seed=3,4"], None, "debug.seed is varied twice"),
        (["job.dump_folder=a,b"], None, "job.dump_folder can't vary"),
        (
            [
                "debug.seed=" + ",".join(map(str, range(50))),
                "training.steps=" + ",".join(map(str, range(1, 22))),
            ],
            None,
            "1,050 runs are more than 1,000",
        ),
        ([], "", "no line with flags"),
        ([], "--optimizer.lr 1\n--optimizer.lr=1\n", "runs 1 and 2 are the same"),
        ([], "optimizer.lr=1", "runs.txt:1: unexpected argument"),
        ([], "--optimizer.lr 'a", "runs.txt:1: no closing quotation"),
    ],
)
def test_what_is_no_grid(tmp_path, axes, text, message):
    file = tmp_path / "runs.txt"
    file.write_text(text or "")
    with pytest.raises(ConfigError, match=message):
        make_runs(axes, None if text is None else file)


@pytest.mark.parametrize(
    "text", ["", "x = 1", "runs = 1", "[[runs]]\nname = 1", "[[runs]\n", "runs = []", "a" * 2**21]
)
def test_what_is_no_file_of_runs(tmp_path, text):
    file = tmp_path / "runs.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"--runs: "):
        make_runs([], file)


def test_checkpoints_outside_of_the_folder_are_not_shared():
    (run,) = make_runs(["debug.seed=1"], None)
    folder = Path("/g")
    assert flags_with_folder(run, folder, "checkpoint") == (
        "--debug.seed=1",
        "--job.dump_folder=/g/base",
    )
    for shared in ("s3://bucket/all", "/scratch/all"):
        assert flags_with_folder(run, folder, shared)[-1] == f"--checkpoint.folder={shared}/base"


def test_a_problem_of_many_runs_is_said_once():
    problems = {"a": ["x", "y"], "b": ["x"], "c": ["x"]}
    assert group_problems(problems) == ["runs a and 2 more: x", "run a: y"]


# ---- an array


def test_each_task_is_a_run(slurm, tmp_path):
    assert submit(*GRID, "--at-most=3", "--time=1:00:00", "--training.steps=7") == 0
    folder = tmp_path / "outputs/debug_model-grid"
    script = folder / "debug_model.sbatch"
    text = script.read_text()
    assert f"#SBATCH --output={folder}/%x-%A_%a.log\n" in text
    assert "#SBATCH --array=0-3%3\n" in text
    script.write_text(text.replace(f"TORCHTITAN_ROOT={ROOT}", f"TORCHTITAN_ROOT='{slurm.root}'"))
    found = []
    for task in range(5):
        (tmp_path / "calls/task").unlink(missing_ok=True)
        job = slurm(script, SLURM_ARRAY_JOB_ID="123450", SLURM_ARRAY_TASK_ID=str(task))
        assert job.wait(timeout=30) == (2 if task == 4 else 0), job.stderr.read()
        found += [json.loads(line)["argv"] for line in calls(tmp_path, "task")]
    values = [(lr, seed) for lr in ("1e-4", "3e-4") for seed in (1, 2)]
    assert found == [
        [
            "--training.steps=7",
            f"--optimizer.lr={lr}",
            f"--debug.seed={seed}",
            f"--job.dump_folder={folder}/lr={lr}_seed={seed}",
        ]
        for lr, seed in values
    ]
    assert read_record(folder).runs == [f"lr={lr}_seed={seed}" for lr, seed in values]


def test_only_the_preempted_task_is_put_back(slurm, tmp_path):
    submit(*GRID)
    script = tmp_path / "outputs/debug_model-grid/debug_model.sbatch"
    script.write_text(
        script.read_text().replace(f"TORCHTITAN_ROOT={ROOT}", f"TORCHTITAN_ROOT='{slurm.root}'")
    )
    job = slurm(script, seconds=60, SLURM_ARRAY_JOB_ID="123450", SLURM_ARRAY_TASK_ID="2")
    deadline = time.monotonic() + 30
    while not calls(tmp_path, "task"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 75, job.stderr.read()
    assert calls(tmp_path, "scontrol")[-2:] == ["show job 123450_2", "requeue 123450_2"]


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    assert submit(*GRID, "--dry-run") == 0
    out = capsys.readouterr()
    assert "3  lr=3e-4_seed=2  --optimizer.lr=3e-4 --debug.seed=2" in " ".join(
        out.out.split(" ", 3)
    ).replace("   ", "")
    assert "#SBATCH --array=0-3" in out.out
    assert "4 runs, each on 1 node of 2 ranks" in out.err
    assert submit("--dry-run") == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid=optimizer.lrr=1,2"], "runs lrr=1 and 1 more: --optimizer.lrr: unknown key"),
        (["--grid=training.global_batch_size=16,17"], "run global_batch_size=17: .*not a multiple"),
        (["--grid=job.description=a,b\nc"], "run .*newline"),
        (
            ["--grid=debug.seed=1,2", "--job.dump_folder=x"],
            "--job.dump_folder: each run has its own",
        ),
    ],
)
def test_nothing_is_written_if_a_run_is_wrong(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        submit(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_all_tasks_have_as_many_ranks(tmp_path):
    flags = ["--gpus-per-node=8", "--grid=parallelism.data_parallel_shard_degree=8,16"]
    with pytest.raises(ConfigError, match=r"8 ranks \(.*degree=8\) and 16 ranks \(.*degree=16\)"):
        main([str(BASE), *flags])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--at-most=2", "--folder=x", "--local"])
def test_options_of_grids_need_one(option, capsys):
    with pytest.raises(SystemExit):
        submit(option)
    assert "add --grid or --runs" in capsys.readouterr().err


def test_a_folder_of_runs_is_local(tmp_path, capsys):
    with pytest.raises(SystemExit):
        submit(*GRID, "--folder=s3://bucket/grid")
    assert "--folder: s3://bucket/grid is no local folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_in_names_and_values_does_not_run(slurm, tmp_path):
    hostile = "'\"`touch injected`$(touch injected);touch injected|&<>(){}*?[]!#~\\ %x"
    folder = tmp_path / f"my {hostile.replace('/', '')}"
    file = tmp_path / "runs.toml"
    file.write_text(f"[[runs]]\njob.description = '''{hostile}'''\n[[runs]]\ndebug.seed = 1\n")
    assert submit("--runs", str(file), "--folder", str(folder)) == 0
    script = folder / "debug_model.sbatch"
    script.write_text(
        script.read_text().replace(f"TORCHTITAN_ROOT={ROOT}", f"TORCHTITAN_ROOT='{slurm.root}'")
    )
    job = slurm(script, SLURM_ARRAY_JOB_ID="1", SLURM_ARRAY_TASK_ID="0")
    assert job.wait(timeout=30) == 0, job.stderr.read()
    argv = json.loads(calls(tmp_path, "task")[0])["argv"]
    assert argv[0] == f"--job.description={hostile}"
    assert argv[1].startswith(f"--job.dump_folder={folder}/")
    assert not list(tmp_path.rglob("injected"))
    logs = read_record(folder).logs(7, "0")
    assert logs == [folder / "debug_model-7_0.log"]


# ---- one after the other, here


def test_runs_here_go_on_after_a_failure(tmp_path, monkeypatch, capfd):
    log = tmp_path / "log"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" >>{log}\ncase "$*" in *two*) exit 3;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    }
    try:
        assert (
            run_in_turn(
                ["1", "2", "3"], [["train", "one"], ["train", "two"], ["train", "three"]], tmp_path
            )
            == 1
        )
        assert log.read_text().splitlines() == [
            f"-m torchtitan train {name}" for name in ("one", "two", "three")
        ]
        assert "failed: 2 (status 3)" in capfd.readouterr().err
        fake.write_text("#!/bin/sh\nexit 130\n")
        assert run_in_turn(["1", "2"], [["train", "one"], ["train", "two"]], tmp_path) == 130
        assert "Interrupted in run 1 of 2; the same command resumes" in capfd.readouterr().err
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("moment", ["before a run exists", "before a run is known"])
def test_a_signal_that_no_run_receives_is_not_lost(tmp_path, monkeypatch, capfd, moment):
    log = tmp_path / "log"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" >>{log}\ncase "$*" in *two*) exec sleep 30;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))

    class Popen(subprocess.Popen):
        def __init__(self, command):
            if moment == "before a run exists" and "two" in command:
                signal.raise_signal(signal.SIGTERM)
            super().__init__(command)
            if moment == "before a run is known" and "two" in command:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        assert run_in_turn(["1", "2"], [["train", "one"], ["train", "two"]], tmp_path) == 75
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "Stopped in run 2 of 2; the same command resumes" in capfd.readouterr().err


@pytest.mark.slow
def test_a_grid_trains_here_and_stops_when_asked(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torchtitan",
        "submit",
        str(BASE),
        "--local",
        "--grid",
        "optimizer.lr=1e-3,2e-3",
    ]
    small = [
        "--training.seq_len=32",
        "--validation.enable=false",
        "--metrics.log_freq=1",
        "--folder=grid",
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([*command, *small, "--training.steps=2"], env=env).returncode == 0
    for name in ("lr=1e-3", "lr=2e-3"):
        config = tomli.loads((tmp_path / "grid" / name / "config.toml").read_text())
        assert config["optimizer"]["lr"] == float(name[3:])
    process = subprocess.Popen(
        [*command, *small[:-1], "--folder=other", "--training.steps=10000"], env=env
    )
    deadline = time.monotonic() + 200
    metrics = tmp_path / "other/lr=1e-3/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=60) == 75
    assert list((tmp_path / "other/lr=1e-3/checkpoint").iterdir())
    assert not (tmp_path / "other/lr=2e-3").exists()


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match="this machine has no squeue; ask on a machine of the cluster"
    ):
        jobs([])
    with pytest.raises(
        UserError, match=r"no sbatch; --submit: submit .* on a machine that has Slurm"
    ):
        submit("--submit", *GRID)
    with pytest.raises(UserError, match="not the folder of a submitted grid"):
        jobs([str(tmp_path)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_between_two_runs_starts_no_further_one(tmp_path, monkeypatch, number):
    started = []

    class Terminal(io.StringIO):
        def write(self, text):
            if "run 2 of 2" in text:
                os.kill(os.getpid(), number)
            return super().write(text)

    def status_of(runner, command):
        started.append(command[-1])
        return 0

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    monkeypatch.setattr("torchtitan.tools.launch.grid._Runner.status_of", status_of)
    monkeypatch.setattr(sys, "stderr", Terminal())
    try:
        assert run_in_turn(["a", "b"], [["a"], ["b"]], tmp_path) == os.EX_TEMPFAIL
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert started == ["a"]
