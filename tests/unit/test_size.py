"""scripts/size.py: what it counts, and that its table is that of the tree."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/size.py"
CODE = '''"""Docstring of the module."""

import os
from a import (
    b,
)


def f(own_x):  # a comment
    """Docstring, found."""
    return own_x + "found"
'''
"""Six tokens and four in the function, and nine in imports, which aren't code lines."""


@pytest.fixture
def size():
    spec = importlib.util.spec_from_file_location("size", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path):
    for file in ("__init__.py", "models/a.py", "models/deep/b.py", "tools/c.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(CODE)
    return tmp_path


def test_tokens_code_lines_and_vague_names_of_a_file(size, package):
    counts = size.size_of(package / "models/a.py")
    assert (counts.files, counts.code_lines, counts.tokens) == (1, 2, 9 + 6 + 4)
    assert counts.words == {"own": 2}  # neither the docstring nor the string


def test_rooms_the_core_and_all_are_printed(size, package, capsys):
    size.main([str(package)])
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["models"] == ["2", "4", "38", "9.50"]
    assert rows["core"] == ["2", "4", "38", "9.50"]
    assert rows["all"] == ["4", "8", "76", "9.50"]


@pytest.mark.parametrize(
    ("rooms", "message"),
    [
        ({"models": 30, "tools": 20}, "models: 40 tokens, 30 in ROOMS; simplify, or raise the row"),
        ({"models": 50, "tools": 20}, "models: 40 tokens, 50 in ROOMS; lower the row"),
        ({"models": 40}, "tools: not in ROOMS"),
        ({"models": 40, "tools": 30}, "the rows add up to 70, and SUM is 60; it only falls"),
        ({"models": 40, "tools": 10}, "the rows add up to 50, and SUM is 60; lower it"),
    ],
)
def test_a_room_that_differs_from_its_row_is_an_error(
    size, package, capsys, monkeypatch, rooms, message
):
    monkeypatch.setattr(size, "STEP", 10)
    monkeypatch.setattr(size, "ROOMS", {"models": 40, "tools": 20})
    monkeypatch.setattr(size, "SUM", 60)
    assert size.main([str(package)]) == 0
    monkeypatch.setattr(size, "ROOMS", rooms)
    assert size.main([str(package)]) == 1
    assert message in capsys.readouterr().err


def test_the_table_is_that_of_the_tree(size):
    assert size.problems(size.sizes(ROOT / "torchtitan")) == []


def test_the_sum_never_rose(size):
    """By the commits that set it; a copy without its history shows only itself."""
    log = subprocess.run(
        ["git", "log", "--format=", "-p", "-G^SUM = ", "--", "scripts/size.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    earlier = [
        int(n.replace("_", "")) for n in re.findall(r"^\+SUM = ([\d_]+)$", log, re.MULTILINE)
    ]
    newest_first = [size.SUM, *earlier]
    assert newest_first == sorted(newest_first)
