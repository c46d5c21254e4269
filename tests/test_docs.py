"""Documents hold true: their commands run, their links lead somewhere, their keys exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.config.compat import UNSUPPORTED
from torchtitan.config.keys import FIELDS
from torchtitan.config.load import load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = "--training.seq_len 32 --validation.seq_len 32 --validation.steps 1 --metrics.log_freq 1"


def commands():
    """Lines of ```bash blocks. (```sh blocks need GPUs, several nodes or the reader's own files.)"""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
            yield page.name, list(block.strip().splitlines())


def shrink(line: str) -> str:
    """The command as written, but for fewer and smaller steps."""
    if "run_train.sh" not in line:
        return line
    steps = re.search(r"--training.steps (\d+)", line)
    line = line.replace(steps[0], "") if steps else line
    return f"{line} --training.steps {4 if steps else 2} --training.global_batch_size 8 {SMALL}"


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_commands_run(tmp_path):
    """In order and in a copy of the tree, as a reader would: later ones build on what earlier ones left behind."""
    for name in (
        "run_train.sh",
        "scripts",
        "torchtitan",
        "train_configs",
        "tests",
        "pyproject.toml",
        "constraints.txt",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    ran = 0
    for page, lines in commands():
        for line in lines:
            if "test.sh" in line:
                continue  # this very suite
            done = subprocess.run(shrink(line), shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{page}: {line}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
            ran += 1
            if page == "README.md" and "NGPU=2" in line:
                assert "Resumed from" in done.stdout
    assert ran >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
            continue


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_keys_exist(page):
    """Every `section.key` that a page mentions is one."""
    sections = {key.split(".")[0] for key in FIELDS}
    text = page.read_text()
    for section, key in re.findall(r"[`\s-]([a-z_]+)\.([a-z_]+(?:\.[a-z_]+)?)[`\s=]", text):
        name = f"{section}.{key}"
        if section in sections and not key.endswith((".py", "md", "json", "toml", "jsonl")) and key != "py":
            known = name in FIELDS or name in UNSUPPORTED or any(f.startswith(name + ".") for f in FIELDS)
            assert known or key in ("safetensors", "stpes"), f"{page.name} mentions {name}"


def test_toml_blocks_are_legal(tmp_path):
    """Examples of configuration load, given that what they extend is there."""
    found = 0
    for page in PAGES:
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S):
            file = tmp_path / "example.toml"
            file.write_text(block.replace('"train_configs/', f'"{ROOT}/train_configs/'))
            load_config(["--config", str(file)])
            found += 1
    assert found >= 2


def test_nothing_of_this_machine_is_in_the_project():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(files) > 50
    for name in files:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".sh", ""):
            assert "/" + "work/" not in path.read_text(errors="ignore"), name
