"""The wheel, installed into an environment of its own and used from a folder that is not the
checkout.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from torchtitan import __version__

ROOT = Path(__file__).parents[1]
SOURCES = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "torchtitan",
    "train_configs",
    "tests/assets",
)
pytestmark = pytest.mark.e2e


def call(*command, **options):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=240, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built without network from a copy, which no earlier build has left files in."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    call(*pip, "-w", folder, folder / "source")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of the installed commands. Dependencies are those of this interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    )
    (packages / "dependencies.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n"
    )
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "-q"]
    call(*pip, "--no-deps", "--no-index", "--ignore-installed", wheel)
    return folder / "bin"


@pytest.fixture
def torchtitan(environment, tmp_path):
    """Runs the installed command in `tmp_path`; returns what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    return lambda *argv: call(environment / "torchtitan", *argv, cwd=tmp_path, env=env)


def test_the_wheel_holds_every_module_and_shipped_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "torchtitan").rglob("*.py")}
    shipped = [
        *(ROOT / "train_configs").glob("*.toml"),
        *(ROOT / "tests/assets/tokenizer").iterdir(),
    ]
    assert modules <= names
    assert {f"torchtitan/assets/{path.relative_to(ROOT)}" for path in shipped} <= names
    assert {
        "torchtitan/py.typed",
        "torchtitan/commands/slurm.sbatch",
        "torchtitan/tools/planner/page.js",
    } <= names
    report = {
        f"torchtitan/tools/reports/{path.name}"
        for path in (ROOT / "torchtitan/tools/reports").iterdir()
        if path.is_file()
    }
    assert (
        {"torchtitan/tools/reports/page.js", "torchtitan/tools/reports/page.css"} <= report <= names
    )
    web = {
        f"torchtitan/tools/web/{path.name}"
        for path in (ROOT / "torchtitan/tools/web").iterdir()
        if path.is_file()
    }
    assert "torchtitan/tools/web/uPlot.LICENSE" in web
    assert web <= names
    assert not [
        name
        for name in names
        if not name.startswith(("torchtitan/", f"titan_pretrain-{__version__}"))
    ]


def test_the_demo_trains(torchtitan, tmp_path):
    small = [
        "--training.seq_len=32",
        "--validation.seq_len=32",
        "--validation.steps=1",
        "--job.dump_folder=out",
    ]
    out = torchtitan("train", "debug_model", "--training.steps", "2", *small)
    assert "Done: step 2" in out
    assert (tmp_path / "out/checkpoint/step-2/manifest.json").exists()


def test_shipped_configurations_are_found_and_extended(torchtitan, tmp_path):
    (tmp_path / "my.toml").write_text(
        'extends = "train_configs/llama3_8b.toml"\n[training]\nsteps = 7\n'
    )
    tokenizer = [
        "--model.hf_assets_path=./tests/assets/tokenizer",
        "--model.overrides.vocab_size=2048",
    ]
    data = ["--training.dataset=demo", "--world", "8"]
    for name in ("my.toml", "llama3_8b"):
        checked = torchtitan("config", name, *tokenizer, *data)
        assert checked.startswith("OK: llama3 8B with overrides on 8 ranks")
    assert "steps = 7" in torchtitan("config", "my.toml", "--toml", *tokenizer, *data)


def test_a_job_is_written_and_a_run_planned(torchtitan, environment, tmp_path):
    (tmp_path / "sbatch").touch(0o755)  # a machine of the cluster
    layout = ["--parallelism.data_parallel_shard_degree=8", "--training.global_batch_size=64"]
    torchtitan("submit", "debug_model", "--gpus-per-node", "8", *layout)
    job = (tmp_path / "debug_model.sbatch").read_text()
    assert f"export TORCHTITAN_PYTHON={environment / 'python'}\n" in job
    assert "assets/train_configs/debug_model.toml --parallelism.data_parallel_shard_degree=8" in job
    assert "GiB" in torchtitan(
        "plan", "llama3_8b", "--world", "8", "--hardware", "h100-sxm", "--html", "plan.html"
    )
    assert "uPlot" in (tmp_path / "plan.html").read_text()
