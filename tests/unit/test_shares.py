"""The shares of the tests that `--share` chooses."""

import pytest

from tests.shares import share_of


def test_shares_are_all_tests_once():
    shares = [share_of(range(100), f"{index}/8") for index in range(1, 9)]
    assert sorted(x for share in shares for x in share) == list(range(100))
    assert {len(share) for share in shares} == {12, 13}


@pytest.mark.parametrize("share", ["0/8", "9/8", "1", "1/0", "-1/8"])
def test_a_share_that_does_not_exist_is_refused(share):
    with pytest.raises(pytest.UsageError, match=f"not {share}"):
        share_of(range(100), share)
