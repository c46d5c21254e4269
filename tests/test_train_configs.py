"""The shipped configurations that a CPU can train run to their ends, with the loss that their
comments print. The others: `unit/test_config.py`, `unit/test_plan_command.py` and
`distributed/test_rehearsal.py`.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.processes import run_module
from tests.runs import read_metrics

FILES = {
    file: re.search(r"# Hardware: any CPU.* [Vv]alidation loss ([\d.]+)\.\n", file.read_text())
    for file in sorted((Path(__file__).parents[1] / "train_configs").glob("*.toml"))
    if "# Hardware: any CPU" in file.read_text()
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="its text is Python 3.11's")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_ends_with_the_loss_of_its_comment(file, tmp_path):
    done = run_module("torchtitan", "train", str(file), "--job.dump_folder=out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = read_metrics(tmp_path / "out")
    assert last["validation_loss"] == pytest.approx(float(FILES[file][1]), rel=0.01)
