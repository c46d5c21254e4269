"""The list of tests that the suite leaves to the longest tier names tests that exist."""

import ast
from pathlib import Path

import pytest

from tests.long_tier import LONG_TIER

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("file", LONG_TIER)
def test_every_test_of_the_list_exists(file):
    tree = ast.parse(
        (TESTS.parent / file if file.startswith("tests/") else TESTS / file).read_text()
    )
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert LONG_TIER[file].keys() <= defined
