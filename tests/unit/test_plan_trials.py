"""The best proposals, tried: what is written, and that the fastest by measurement is adopted."""

import json
import shlex
from pathlib import Path

import pytest

from tests.slurm_stand_ins import ROOT, calls
from torchtitan.commands.plan import main
from torchtitan.config import resolve
from torchtitan.tools.launch.slurm_jobs import read_record
from torchtitan.utils.errors import UserError

PLAN = ["--model.flavor=1B", "--training.global_batch_size=16", "--hardware=h100-sxm", "--world=8"]


def measured(folder, rates):
    """A run's folder, of a step that compiles and some that don't."""
    folder.mkdir()
    start = {"ranks": 8, "devices": {"GPU": 8}, "resumed_step": 0, "time": 0}
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))
    records = [
        {"step": step, "tokens_per_second": rate, "step_time_s": 1 / rate, "memory_gib": 1.0}
        for step, rate in enumerate(rates, 1)
    ]
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_the_fastest_of_the_best_is_adopted(tmp_path, capsys):
    output = tmp_path / "best.toml"
    folder = tmp_path / "best-tries"
    assert main([*PLAN, "--search", "--try=3", f"--write={output}"]) == 0
    *trains, adopts = [
        shlex.split(line)
        for line in (folder / "try.sh").read_text().splitlines()
        if not line.startswith("#")
    ]
    tried = [folder / f"{i}.toml" for i in (1, 2, 3)]
    assert [words[4] for words in trains] == [str(file) for file in tried]
    layouts = set()
    for _, command, option, ranks, file, *flags, more in trains:
        assert (command, option, ranks, more) == ("train", "--nproc-per-node", "8", "$@")
        config = resolve([f"--job.config_file={file}", *flags], 8).config
        assert config.training.steps == 20
        p, t = config.parallelism, config.training
        layouts.add((p.model_dump_json(), t.local_batch_size, config.activation_checkpoint.mode))
    assert len(layouts) == 3
    assert output.read_text() == tried[0].read_text()

    with pytest.raises(UserError, match=r"--adopt: no run in .* has trained; start .*try\.sh"):
        main(adopts[2:])
    measured(folder / "run-1", [900, 100, 101, 102])  # one step was fast, before any is counted
    measured(folder / "run-3", [10, 200, 201, 202])  # and the second ran out of memory
    capsys.readouterr()
    assert main(adopts[2:]) == 0
    assert output.read_text() == tried[2].read_text()
    out = capsys.readouterr().out
    assert f"The fastest: {tried[2]}" in out
    assert "failed" in out


def test_trials_on_several_nodes_are_jobs_of_slurm(slurm, tmp_path, monkeypatch):
    """An array with a task for each layout, and a job that adopts the fastest once all have ended;
    both as they run.
    """
    monkeypatch.chdir(tmp_path)
    assert main([*PLAN, "--world=16", "--search", "--try=2", "--write=best.toml"]) == 0
    folder = tmp_path / "best-tries"
    assert slurm("best-tries/try.sh", "--partition=big one").wait(timeout=30) == 0
    trains, adopts = calls(tmp_path, "sbatch")
    assert trains == f"--parsable --partition=big one {folder}/try.sbatch"
    adopt, _, command = adopts.partition(" --wrap=")
    assert adopt == (
        "--dependency=afterany:77 --ntasks=1 --job-name=best-tries-adopt "
        f"--output={folder}/%x-%j.log --partition=big one"
    )
    script = folder / "try.sbatch"
    lines = script.read_text().splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --array=0-1%1"} < {*lines}
    assert read_record(folder).runs == ["run-1", "run-2"]

    root = f"TORCHTITAN_ROOT={ROOT}"
    script.write_text(script.read_text().replace(root, f"TORCHTITAN_ROOT='{slurm.root}'"))
    for task in (0, 1):
        job = slurm(script, SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_JOB_ID="77")
        assert job.wait(timeout=30) == 0, job.stderr.read()
        started = json.loads(calls(tmp_path, "task")[0])
        assert (started["CONFIG_FILE"], started["NNODES"], started["NGPU"]) == (
            *(f"{folder}/{task + 1}.toml", "2", "8"),
        )
        flags = [f"--job.config_file={started['CONFIG_FILE']}", *started["argv"]]
        config = resolve(flags, 16).config
        assert (config.training.steps, config.checkpoint.enable) == (20, False)
        measured(Path(config.job.dump_folder), [10, 100 + task])

    assert main(shlex.split(command)[2:]) == 0
    assert (tmp_path / "best.toml").read_text() == (folder / "2.toml").read_text()


def test_trials_need_a_search_and_a_file():
    for more in ["--try=3"], ["--try=3", "--search"], ["--adopt=somewhere"]:
        with pytest.raises(SystemExit):
            main([*PLAN, *more])
