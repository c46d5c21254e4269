"""The shipped configurations that a CPU can train run to their ends, with the losses that their
comments print. The others: `unit/test_config.py`, `unit/test_plan_command.py` and
`distributed/test_rehearsal.py`.
"""

import re
from pathlib import Path

import pytest

from tests.processes import run_module
from tests.runs import read_metrics

FILES = [
    file
    for file in sorted((Path(__file__).parents[1] / "train_configs").glob("*.toml"))
    if "# Hardware: any CPU" in file.read_text()
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_loss_falls_as_its_comment_says(file, tmp_path):
    done = run_module("torchtitan", "train", str(file), "--job.dump_folder=out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    *records, last = read_metrics(tmp_path / "out")
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert losses[1] == pytest.approx(8.1, abs=0.3)
    assert last["validation_loss"] < 6.5
    comment = re.search(r"falls from 8.1 to (?:about )?(\d+\.\d)(?: in (\d+))?", file.read_text())
    if comment:
        loss = losses[int(comment[2] or max(losses))]
        assert loss == pytest.approx(float(comment[1]), abs=0.3), "one batch's, so it is noisy"
