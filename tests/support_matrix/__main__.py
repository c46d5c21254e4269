"""Measure which features work together, for docs/reference/support-matrix.md.

A cell is a tiny Llama, trained on gloo ranks under one layout with one feature or pipeline
schedule, and compared with plain PyTorch on one process; or the message that refuses the
configuration. Exits with 1 if a cell is neither.
"""

import argparse
import sys
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.support_matrix", description=__doc__)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the matrix to this Markdown file"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="measure only cells whose layout, feature or schedule contains TEXT",
    )
    parser.add_argument(
        "--missing", action="store_true", help="keep the cells that the file already has"
    )
    return parser


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    if options.only and options.output and not options.missing:
        parser().error(
            "--only with --output also needs --missing, which keeps the other cells of the file"
        )
    if options.missing and not options.output:
        parser().error("--missing keeps the cells of a file; name it with --output")

    from tests.support_matrix.cells import BAD, cells
    from tests.support_matrix.document import document, environment, read_document
    from tests.support_matrix.measure import measure_all
    from torchtitan.utils.wording import plural

    known, notes, measured = {}, [], []
    if options.missing:
        known, notes, measured = read_document(options.output.read_text())
    now = environment()
    results = {cell: known[cell] for cell in cells() if known.get(cell, BAD[0]) not in BAD}
    todo = [cell for cell in cells() if options.only in cell.title and cell not in results]
    failures = 0
    for count, (cell, report) in enumerate(measure_all(todo, results, notes), 1):
        failures += results[cell] in BAD
        print(f"{cell.title}: {report}", flush=True)
        if options.output:
            lines = [*measured, f"{now}: {plural(count, 'cell')}"]
            options.output.write_text(document(results, notes, lines))
    print(f"{len(results)} cells, {failures} of them wrong", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
