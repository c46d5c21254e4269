"""The locked requirements: complete, with a hash for each file, and of the tested versions. The
releases of torch.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from torchtitan.train.preflight import preflight
from torchtitan.utils import torch_versions as releases
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.torch_versions import TESTED_TORCH, feature_release, too_new, too_old

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = dict(
    re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
)


def key(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("run", PROJECT["dependencies"]),
        ("dev", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]),
    ],
)
def test_every_requirement_is_locked_by_hash(name, wanted):
    text = (ROOT / f"requirements/{name}.txt").read_text().replace("\\\n", " ")
    locked = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            package, version = re.match(r"([\w.-]+)==([\w.+!-]+)", line).groups()
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", line), line
            locked[key(package)] = version
    names = {key(re.split(r"[<>=\[ ]", requirement)[0]) for requirement in wanted} - {"torch"}
    assert not names - locked.keys(), "run scripts/lock.sh"
    tested = {key(package): version for package, version in CONSTRAINTS.items()}
    assert {p: v for p, v in locked.items() if p in tested} == {
        p: v for p, v in tested.items() if p in locked
    }


def test_what_is_said_of_torch_follows_from_the_tested_releases():
    assert list(TESTED_TORCH) == sorted(TESTED_TORCH, key=feature_release)
    oldest, newest = (
        ".".join(release.split(".")[:2]) for release in (TESTED_TORCH[0], TESTED_TORCH[-1])
    )
    assert f"torch>={oldest}" in PROJECT["dependencies"]
    assert CONSTRAINTS["torch"] in TESTED_TORCH
    for file in ("README.md", "docs/start/tutorial-laptop.md"):
        assert f"{oldest} to {newest}" in (ROOT / file).read_text(), file
    table = (ROOT / "docs/reference/torch-versions.md").read_text()
    assert re.findall(r"^\| (\d+\.\d+\.\d+) \|", table, re.MULTILINE) == list(TESTED_TORCH)


@pytest.mark.parametrize(
    ("release", "old", "new"),
    [
        ("2.10.2", "torch 2.10.2 is too old; upgrade it to 2.11 or newer", None),
        ("1.13.1+cu117", "torch 1.13.1+cu117 is too old; upgrade it to 2.11 or newer", None),
        ("2.11.0a0+git1234", None, None),
        ("2.15.1", None, None),
        (
            "2.16.0.dev2+cpu",
            None,
            "torch 2.16.0.dev2+cpu is newer than the tested releases, 2.11 to 2.15",
        ),
        ("3.0.0", None, "torch 3.0.0 is newer than the tested releases, 2.11 to 2.15"),
        (None, None, None),
    ],
)
def test_old_releases_are_refused_and_new_ones_warned_of(release, old, new):
    assert (too_old(release), too_new(release)) == (old, new)


def test_a_configuration_is_refused_with_an_old_torch(tmp_path, monkeypatch):
    from torchtitan.config import resolve

    config = resolve([f"--job.dump_folder={tmp_path}"], 1).config
    monkeypatch.setattr(releases.metadata, "version", lambda package: "2.10.0")
    with pytest.raises(ConfigError, match=r"torch 2\.10\.0 is too old"):
        preflight(config, output=False)


@pytest.fixture
def call_with_torch(tmp_path):
    """Runs a command in an environment that claims to have a release of torch; returns the finished
    process.
    """

    def call(release, *command):
        (tmp_path / f"torch-{release}.dist-info").mkdir()
        (tmp_path / f"torch-{release}.dist-info/METADATA").write_text(
            f"Name: torch\nVersion: {release}\n"
        )
        env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TORCHTITAN_PYTHON": sys.executable}
        return subprocess.run(
            [str(c) for c in command], capture_output=True, text=True, env=env, cwd=tmp_path
        )

    return call


@pytest.mark.e2e
@pytest.mark.parametrize("release", ["2.10.0", "2.99.0"])
def test_set_up_refuses_only_an_old_torch(call_with_torch, release):
    done = call_with_torch(release, ROOT / "scripts/setup.sh")
    if release == "2.10.0":
        assert done.returncode == 1
        assert done.stderr.endswith(": torch 2.10.0 is too old; upgrade it to 2.11 or newer\n")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, sys.executable + "\n", "")


@pytest.mark.e2e
def test_training_warns_once_of_a_new_torch(call_with_torch):
    done = call_with_torch(
        "2.99.0", sys.executable, "-m", "torchtitan.train", "--training.dataset_path=missing"
    )
    assert done.returncode == 2
    assert done.stdout.count("torch 2.99.0 is newer than the tested releases, 2.11 to 2.15") == 1
    assert done.stderr.count("2.99.0") == 0


@pytest.mark.e2e
@pytest.mark.parametrize("arguments", [("--torch",), ("--torch", "2.15"), ("--dve",)])
def test_set_up_explains_its_options(arguments):
    done = subprocess.run([ROOT / "scripts/setup.sh", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--torch" in done.stderr
