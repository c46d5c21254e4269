"""The soak: faults of each kind, one after another, under changing layouts."""

import pytest

from tests.faults.soak import KINDS, Soak, assert_same, undisturbed


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("steps", "rounds"), [(100, 1), (500, 8)])
def test_a_disturbed_run_is_the_undisturbed_one(tmp_path, steps, rounds):
    faults = list(KINDS) * rounds
    soak = Soak(tmp_path / "soak", steps, faults, seed=4)
    soak.run()
    assert soak.made == faults
    assert_same(soak.dump, undisturbed(tmp_path / "reference", steps), steps)
