"""What the gate lets through: `.ci/run` and `scripts/test.sh`, with stand-ins for the programs that
they call.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SETUP = """#!/bin/sh
case "$*" in *--torch*) {newest} ;; esac
echo "$PWD/python"
"""
PYTHON = """#!/bin/sh
case "$*" in
    *TESTED_TORCH*) echo 9.9.9; exit ;;
    *import_graph*) echo tests/unit/test_model.py ;;
esac
echo "$*" >> "$CALLS"
case "$*" in {cases} esac
"""


class Gate:
    """A copy of the scripts. Each program is a stand-in, which records its arguments and fails if
    told to.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.calls = folder / "calls"
        for script in (".ci/run", "scripts/test.sh"):
            (folder / script).parent.mkdir()
            shutil.copy(ROOT / script, folder / script)

    def run(self, script, *arguments, newest="", **statuses):
        """The exit status of a script, and what was run.

        Args:
            newest: what the set-up of the newest torch does.
            statuses: exit status of Python when its arguments contain this word.
        """
        cases = " ".join(f"*{word}*) exit {status} ;;" for word, status in statuses.items())
        for name, text in {
            "scripts/setup.sh": SETUP.format(newest=newest or "true"),
            "python": PYTHON.format(cases=cases),
            "chromium": "#!/bin/sh\n",
            "git": "#!/bin/sh\necho 119\n",
        }.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        self.calls.write_text("")
        env = os.environ | {"CALLS": str(self.calls), "PATH": f"{self.folder}:{os.environ['PATH']}"}
        done = subprocess.run(
            [self.folder / script, *arguments], cwd=self.folder, env=env, capture_output=True
        )
        return done.returncode, self.calls.read_text().splitlines()


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path)


def test_the_gate_opens_when_all_passes(gate):
    status, calls = gate.run(".ci/run")
    assert status == 0
    tests = [call for call in calls if "pytest" in call]
    quick, *rest, share, corner = tests
    assert "not slow and (proof or not (ranks or e2e))" in quick
    assert {call.partition("worksteal -m ")[2].strip() for call in rest} == {
        "not slow and not proof and e2e",
        "not slow and not proof and ranks and not e2e",
    }
    assert "-m slow --share 60/60" in share
    assert "tests/unit/test_model.py tests/distributed/test_matrix.py::test_corner" in corner


@pytest.mark.parametrize("step", ["ruff", "format", "mypy", "import_graph", "corner"])
def test_one_failure_closes_the_gate_and_is_not_tried_again(gate, step):
    status, calls = gate.run(".ci/run", **{step: 1})
    assert status != 0
    assert len(calls) == len(set(calls))


def test_a_newest_torch_that_cannot_be_installed_closes_the_gate(gate):
    status, calls = gate.run(".ci/run", newest="exit 1")
    assert status != 0
    assert any("pytest" in call for call in calls)


@pytest.mark.parametrize("status", [1, 2, 5])
def test_the_status_is_that_of_pytest(gate, status):
    """Of a failure, an interruption, and a choice of no test."""
    assert gate.run("scripts/test.sh", worksteal=status)[0] == status


def test_the_long_tier_runs_every_share_within_a_job_of_six_hours():
    job = yaml.safe_load((ROOT / ".github/workflows/long-tier.yml").read_text())["jobs"]["test"]
    shares = job["strategy"]["matrix"]["share"]
    assert shares == [f"{index}/{len(shares)}" for index in range(1, len(shares) + 1)]
    assert job["timeout-minutes"] < 6 * 60
    assert job["steps"][-1]["run"] == "scripts/test.sh --long --share ${{ matrix.share }}"


def test_the_long_tier_is_the_slow_tests(gate):
    _, calls = gate.run("scripts/test.sh", "--long", "--share", "2/8")
    (tests,) = [call for call in calls if "pytest" in call]
    assert "-m slow --share 2/8" in tests
