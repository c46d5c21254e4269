"""scripts/walks.py: the page on the architecture lists the files that really run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
def test_the_page_lists_the_files_that_run():
    """In a fresh process: a function whose result is cached runs once."""
    command = [sys.executable, "scripts/walks.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout in (ROOT / "docs/internals/architecture.md").read_text()
