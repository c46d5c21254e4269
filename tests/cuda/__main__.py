"""`python -m tests.cuda [NAME...]` compiles the configurations whose names begin so, or all, and
writes their rows of tests/cuda/compiled-kernels.md. Needs a CUDA build of the newest torch.
"""

import sys

from tests.cuda.configurations import CONFIGURATIONS
from tests.cuda.measured import PAGE, measure, rows, rows_of_page

_HEADERS = ("| configuration | graphs |", "| configuration | region |")


def main() -> None:
    names = tuple(sys.argv[1:])
    tables: list[list[str]] = [[], []]
    for configuration in CONFIGURATIONS:
        measured = rows_of_page(configuration)
        if not names or configuration.name.startswith(names):
            print(configuration.name, file=sys.stderr)
            measured = rows(configuration, measure(configuration))
        tables[0] += measured[:1]
        tables[1] += measured[1:]
    lines = PAGE.read_text().splitlines()
    for header, table in zip(_HEADERS, tables, strict=True):
        start = next(i for i, line in enumerate(lines) if line.startswith(header)) + 2
        end = start
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        lines[start:end] = table
    PAGE.write_text("\n".join(lines) + "\n")


main()
