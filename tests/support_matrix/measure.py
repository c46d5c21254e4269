"""Measures cells of the support matrix on gloo ranks."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from tests.support_matrix.cells import BAD, Cell
from torchtitan.config import resolve
from torchtitan.testing.difference import Difference, Tolerances, difference
from torchtitan.testing.observe import observe, write_corpus
from torchtitan.testing.ranks import RankFailure, RankPool
from torchtitan.testing.reference import reference
from torchtitan.train.preflight import preflight


def run_cell(argv: list[str], tolerances: Tolerances) -> Difference | None:
    """The difference between the run on all ranks and the reference, on rank 0."""
    config = resolve(argv, dist.get_world_size()).config
    setup = preflight(config)
    run = observe(config, setup)
    if dist.get_rank() != 0:
        return None
    expected = reference(config, setup, run=run, rounding=tolerances.gradient)
    return difference(run, expected, config.optimizer)


class Lab:
    """Measures cells, and reuses ranks from one to the next."""

    def __init__(self, folder: Path, pools: dict[int, RankPool] | None = None):
        self.folder = folder
        self.pools = {} if pools is None else pools
        self.runs = 0
        write_corpus(folder / "corpus.jsonl")
        write_corpus(folder / "held-out.jsonl", documents=40, seed=1)

    def measure(self, cell: Cell, timeout: float = 240) -> Difference | str:
        """The difference to the reference, or the message that refuses the configuration.

        Raises:
            RankFailure: a rank failed or hung.
        """
        self.runs += 1
        folder = self.folder / str(self.runs)
        if refusal := cell.refusal(folder):
            return refusal
        pool = self.pools.setdefault(cell.world, RankPool(cell.world))
        return pool.run(run_cell, cell.arguments(folder), cell.tolerances, timeout=timeout)[0]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def measure_all(
    todo: list[Cell], results: dict[Cell, str], notes: list[str]
) -> Iterator[tuple[Cell, str]]:
    """Measure cells, and enter each into `results` as the document shows it, and its refusal into
    `notes`.

    Yields:
        Each measured cell, and a report for the terminal.
    """
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        lab = Lab(Path(folder))
        try:
            for cell in todo:
                started = time.monotonic()
                results[cell], details = _text_of(lab, cell, notes)
                yield (
                    cell,
                    f"{results[cell]} ({time.monotonic() - started:.0f} s) {details}".rstrip(),
                )
        finally:
            lab.close()


def _text_of(lab: Lab, cell: Cell, notes: list[str]) -> tuple[str, str]:
    """A cell's text in the document, and details for the terminal."""
    try:
        outcome = lab.measure(cell, timeout=900)
    except RankFailure as error:
        return BAD[1], str(error)
    if isinstance(outcome, str):
        if outcome not in notes:
            notes.append(outcome)
        return f"[{notes.index(outcome) + 1}]", outcome
    problems = outcome.problems(cell.tolerances)
    flips = f" ({outcome.flips} moved)" if outcome.flips else ""
    return BAD[0] if problems else f"{outcome.loss:.0e} / {outcome.gradient:.0e}{flips}", "; ".join(
        problems
    )
