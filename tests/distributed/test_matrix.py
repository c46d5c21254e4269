"""The support matrix, of which a subset runs in the suite, and the published one against what
validation says today.
"""

import re
from pathlib import Path

import pytest

from tests.support_matrix.__main__ import main
from tests.support_matrix.cells import FEATURES, NAMED_SCHEDULES, SCHEDULE_LAYOUTS, Cell, cells
from tests.support_matrix.document import document, read_document
from tests.support_matrix.measure import Lab
from torchtitan.utils.torch_compat import torch_is_before_2_13

ROOT = Path(__file__).parents[2]
PIPELINE = (2, 1, 1, 1, 1)
CORNER = [
    Cell((1, 1, 2, 1, 1)),
    Cell((1, 1, 2, 1, 1), "compile"),
    Cell((1, 1, 1, 1, 2)),
    Cell((1, 1, 1, 1, 2), "float8 all-gather"),
    Cell((1, 1, 1, 2, 1)),
    Cell(PIPELINE, "validation"),
    Cell((1, 1, 1, 1, 2), "accumulation", ep=2),
]
"""On every release of torch: each axis, and what depends on torch's internals."""
CELLS = [
    Cell((1, 1, 2, 1, 1), "Muon"),
    Cell((1, 1, 2, 1, 1), "AC full"),
    Cell((1, 1, 1, 1, 2), "chunked loss"),
    Cell((1, 1, 1, 1, 2), "no loss parallel"),
    Cell((1, 1, 1, 1, 2), "optimizer in backward"),
    Cell((1, 1, 1, 2, 1), "AC selective op"),
    Cell((1, 1, 1, 2, 1), "all-to-all"),
    Cell(PIPELINE, "CPU offload"),
    Cell((2, 1, 2, 1, 1), "accumulation", ep=2),
    Cell(PIPELINE, schedule="InterleavedZeroBubble", family="gpt_oss"),
    Cell(PIPELINE, schedule="ZBVZeroBubble", family="deepseek_v3"),
    Cell(PIPELINE, schedule="DualPipeV", family="qwen3_next"),
    Cell(PIPELINE, schedule="Interleaved1F1B", family="glm4_moe"),
    Cell(PIPELINE, schedule="LoopedBFS", family="gemma3"),
    Cell(PIPELINE, schedule="GPipe", family="olmo3"),
]
"""In the suite: what no other test compares with one process, on one axis each, and a cell of each
schedule and family.
"""


@pytest.fixture(scope="module")
def lab(pools, tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("matrix"), pools)


PROOFS = [
    Cell((1, 1, 2, 1, 1), "Muon"),
    Cell((1, 1, 1, 1, 2), "chunked loss"),
    Cell((1, 1, 1, 2, 1), "all-to-all"),
    Cell((2, 1, 2, 1, 1), "accumulation", ep=2),
    Cell(PIPELINE, schedule="InterleavedZeroBubble", family="gpt_oss"),
]
"""Of the suite: a cell of each axis, one of which splits the backward."""
SUITE = [
    pytest.param(cell, marks=pytest.mark.proof) if cell in PROOFS else cell
    for cell in CELLS
    if cell not in CORNER
]
REST = [
    pytest.param(cell, marks=pytest.mark.slow) for cell in cells() if cell not in (*CORNER, *CELLS)
]


def check(lab, cell):
    outcome = lab.measure(cell)
    if isinstance(outcome, str):
        texts, notes, _ = published()
        if texts[cell].startswith("["):
            assert outcome == notes[int(texts[cell].strip("[]")) - 1]
        else:
            assert torch_is_before_2_13()
            assert cell.feature in ("AC selective op", "compile", "chunked loss")
    else:
        assert outcome.problems(cell.tolerances) == []


PAGE = ROOT / "docs/reference/support-matrix.md"


def published() -> tuple[dict[Cell, str], list[str], list[str]]:
    return read_document(PAGE.read_text())


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[pytest.mark.slow, pytest.mark.corner]) for cell in CORNER],
    ids=lambda cell: cell.title,
)
def test_corner(lab, cell):
    check(lab, cell)


@pytest.mark.parametrize("cell", [*SUITE, *REST], ids=lambda cell: cell.title)
def test_cell_equals_one_process_or_is_refused(lab, cell):
    check(lab, cell)


def test_the_published_matrix_is_complete_and_has_no_bad_cell():
    texts, notes, measured = published()
    assert document(texts, notes, measured) == PAGE.read_text()
    assert set(texts) == set(cells())
    line = r"(until )?\d{4}-\d\d-\d\d, commit [0-9a-f]+(-dirty)?, torch .*: ([\d,]+) cells?"
    counts = [re.fullmatch(line, each)[3] for each in measured]
    assert sum(int(count.replace(",", "")) for count in counts) >= len(texts)
    for cell, text in texts.items():
        assert re.fullmatch(r"\[\d+\]|\d(e[+-]\d+)? / \d(e[+-]\d+)?( \(\d+ moved\))?", text), (
            f"{cell}: {text}"
        )
    plain = [cell for cell in texts if cell.feature == "plain" and cell.world > 1]
    assert len({cell.layout for cell in plain}) + len({cell.schedule for cell in plain}) > 35
    assert len(SCHEDULE_LAYOUTS) * len(NAMED_SCHEDULES) == 40
    assert len(FEATURES) == 21
    assert {cell.ep for cell in plain} == {0, 1, 2, 4, 8}


@pytest.mark.slow
@pytest.mark.skipif(torch_is_before_2_13(), reason="more is refused with torch before 2.13")
def test_the_published_matrix_agrees_with_validation(tmp_path):
    """A cell is refused today exactly if the document says so, with the sentence it shows."""
    from torchtitan.testing.observe import write_corpus

    write_corpus(tmp_path / "corpus.jsonl")
    write_corpus(tmp_path / "held-out.jsonl")
    texts, notes, _ = published()
    for cell, text in texts.items():
        refusal = cell.refusal(tmp_path / "run")
        assert refusal == (notes[int(text.strip("[]")) - 1] if text.startswith("[") else None), cell


def test_cells_are_kept_of_a_named_file(capsys):
    with pytest.raises(SystemExit):
        main(["--missing"])
    assert "name it with --output" in capsys.readouterr().err
