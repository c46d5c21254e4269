"""The list of tests that the suite leaves to the longest tier names tests that exist."""

import ast
from pathlib import Path

import pytest

from tests.long_tier import LONG_TIER, share_of

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("file", LONG_TIER)
def test_every_test_of_the_list_exists(file):
    tree = ast.parse(
        (TESTS.parent / file if file.startswith("tests/") else TESTS / file).read_text()
    )
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert LONG_TIER[file].keys() <= defined


def test_shares_are_all_tests_once():
    shares = [share_of(range(100), f"{index}/8") for index in range(1, 9)]
    assert sorted(x for share in shares for x in share) == list(range(100))
    assert {len(share) for share in shares} == {12, 13}


@pytest.mark.parametrize("share", ["0/8", "9/8", "1", "1/0", "-1/8"])
def test_a_share_that_does_not_exist_is_refused(share):
    with pytest.raises(pytest.UsageError, match=f"not {share}"):
        share_of(range(100), share)
