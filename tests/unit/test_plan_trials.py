"""The best proposals, tried: what is written, and that the fastest by measurement is adopted."""

import json
import shlex

import pytest

from torchtitan.commands.plan import main
from torchtitan.config import resolve
from torchtitan.utils.errors import UserError

PLAN = ["--model.flavor=1B", "--training.global_batch_size=16", "--hardware=h100-sxm", "--world=8"]


def measured(folder, rates):
    """A run's folder, of a step that compiles and some that don't."""
    folder.mkdir()
    start = {"ranks": 8, "devices": ["GPU"], "resumed_step": 0}
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))
    records = [
        {"step": step, "tokens_per_second": rate, "step_time_s": 1 / rate, "memory_gib": 1.0}
        for step, rate in enumerate(rates, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))


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
    assert [words[2] for words in trains] == [str(file) for file in tried]
    layouts = set()
    for _, command, file, option, ranks, *flags, more in trains:
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


def test_trials_need_a_search_and_a_file():
    for more in ["--try=3"], ["--try=3", "--search"], ["--adopt=somewhere"]:
        with pytest.raises(SystemExit):
            main([*PLAN, *more])
