"""Every mistake in the museum is caught by the check that it names, which passes without it.

The tests that exhibits name are run without a mistake by the suite itself; here, with one.
"""

import pytest

from tests.distributed.museum import BY_NAME, EXHIBITS, compared, outcomes, with_mistake
from tests.doc_blocks import ROOT
from tests.runs import arguments

CASES = [
    pytest.param(exhibit.name, marks=[pytest.mark.slow] if exhibit.slow else [])
    for exhibit in EXHIBITS
]


@pytest.mark.parametrize("name", CASES)
def test_it_is_caught(ranks, tmp_path, name):
    exhibit = BY_NAME[name]
    if exhibit.flags:
        argv = arguments(tmp_path, *exhibit.flags, steps=1, global_batch=4)
        text = ranks(2, with_mistake, name, compared, argv)[0]
        assert exhibit.check.removeprefix("parity: ") in text, text
        return
    phases = outcomes(name, ranks, tmp_path)
    assert [phase for phase, _ in phases] == ["setup passed", "call failed", "teardown passed"]
    reason = phases[1][1]
    assert reason.startswith(("AssertionError", "assert", "Failed")), reason


@pytest.mark.parametrize("flags", sorted({e.flags for e in EXHIBITS if e.flags}), ids=str)
def test_parity_passes_without_a_mistake(ranks, tmp_path, flags):
    assert ranks(2, compared, arguments(tmp_path, *flags, steps=1, global_batch=4))[0] == ""


def test_the_documented_table_is_complete():
    text = (ROOT / "docs/internals/numerics.md").read_text()
    table = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert table.keys() == BY_NAME.keys()
    for name, exhibit in BY_NAME.items():
        check = exhibit.check.rpartition("/")[2].partition("[")[0]
        assert f"`{'torchtitan parity' if exhibit.flags else check}`" in table[name], name
        assert exhibit.published in table[name], name
