"""The locked requirements: complete, with a hash for each file, and of the tested versions."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


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
    assert {p: v for p, v in locked.items() if p in tested} == {p: v for p, v in tested.items() if p in locked}
