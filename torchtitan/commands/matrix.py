"""Measures what works together: `torchtitan matrix --output docs/support-matrix.md`.

A cell is a tiny Llama trained on real gloo ranks, under a layout with a feature or a pipeline schedule, and compared to
plain PyTorch on one process; or the sentence with which the configuration is refused. Exits with 1 if one is neither.
"""

import argparse
import tempfile
import time
from pathlib import Path

from torchtitan.lab.matrix import BAD, Cell, Lab, cells, document, name_of, read_document
from torchtitan.lab.ranks import RankError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchtitan matrix", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the matrix to this Markdown file")
    parser.add_argument("--only", default="", help="only cells whose layout, feature or schedule contains this text")
    parser.add_argument("--missing", action="store_true", help="keep the cells that are in the file already")
    options = parser.parse_args(argv)
    results: dict[Cell, str] = {}
    notes: list[str] = []
    failures = 0
    if options.only and options.output and not options.missing:
        parser.error("--only leaves cells out; with --output it needs --missing, to keep the others")
    if options.missing and not options.output:
        parser.error("--missing keeps the cells of a file; name it with --output")
    if options.missing:
        known, notes = read_document(options.output.read_text())
        results = {cell: text for cell, text in known.items() if cell in set(cells()) and text not in BAD}
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        lab = Lab(Path(folder))
        for cell in cells():
            title = f"{name_of(cell.layout)}, {cell.schedule if cell.layout[0] > 1 else 'no pipeline'}, {cell.feature}"
            if options.only not in title or cell in results:
                continue
            started = time.monotonic()
            try:
                outcome = lab.measure(cell, timeout=900)
            except RankError as error:
                failures += 1
                results[cell] = BAD[1]
                print(f"{title}: FAILS\n{error}", flush=True)
                continue
            if isinstance(outcome, str):
                notes += [] if outcome in notes else [outcome]
                results[cell] = f"[{notes.index(outcome) + 1}]"
            else:
                wrong = outcome.problems(cell.tolerances)
                failures += bool(wrong)
                results[cell] = BAD[0] if wrong else f"{outcome.loss:.0e} / {outcome.gradient:.0e}"
                outcome = f"{results[cell]} {'; '.join(wrong)}"
            print(f"{title}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)
            if options.output:
                options.output.write_text(document(results, notes))
        lab.close()
    print(f"{len(results)} cells, {failures} of them wrong", flush=True)
    return 1 if failures else 0
