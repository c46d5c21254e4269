"""scripts/size.py: what it counts, and that it fails above its limits."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/size.py"
CODE = '''"""Docstring of the module."""

import os
from a import (
    b,
)


def f(x):  # a comment
    """Docstring."""
    return x + "text"
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


def test_tokens_and_code_lines_of_a_file(size, package):
    found = size.size_of(package / "models/a.py")
    assert (found.files, found.code_lines, found.tokens) == (1, 2, 9 + 6 + 4)


def test_rooms_the_core_and_all_are_printed(size, package, capsys):
    assert size.main([str(package)]) in (0, 1)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["models"] == ["2", "4", "38", "9.50"]
    assert rows["core"] == ["2", "4", "38", "9.50"]
    assert rows["all"] == ["4", "8", "76", "9.50"]


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MAX_DENSITY", 9.4, "9.50 tokens per code line, above 9.4"),
        ("MAX_CORE", 37, "38 tokens in the core, above 37"),
        ("MAX_ALL", 75, "76 tokens in all, above 75"),
    ],
)
def test_each_limit_has_a_sentence(size, package, capsys, monkeypatch, limit, value, message):
    for name, most in {"MAX_DENSITY": 9.5, "MAX_CORE": 38, "MAX_ALL": 76}.items():
        monkeypatch.setattr(size, name, most)
    assert size.main([str(package)]) == 0
    monkeypatch.setattr(size, limit, value)
    assert size.main([str(package)]) == 1
    assert capsys.readouterr().err == f"error: the package is too large: {message}\n"


def test_every_room_of_the_engine_and_the_services_exists(size):
    rooms = size.rooms_of(SCRIPT.parents[1] / "torchtitan")
    assert {*size.ENGINE, *size.SERVICES} <= rooms.keys()
