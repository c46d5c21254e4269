"""A few of the soak's faults, one of each kind."""

import pytest

from tests.faults.soak import KINDS, Soak, assert_same, undisturbed


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_disturbed_run_is_the_undisturbed_one(tmp_path):
    soak = Soak(tmp_path / "soak", 100, list(KINDS), seed=4)
    soak.run()
    assert soak.made == list(KINDS)
    assert_same(soak.dump, undisturbed(tmp_path / "reference", 100), 100)
