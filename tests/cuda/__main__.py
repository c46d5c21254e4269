"""`python -m tests.cuda [NAME...]` compiles the configurations whose names begin so, or all, and
writes their rows of tests/cuda/compiled-kernels.md. Needs a CUDA build of the newest torch.
"""

import sys

from tests.cuda.configurations import CONFIGURATIONS
from tests.cuda.measured import measure, on_page, tables, write


def main() -> None:
    names = tuple(sys.argv[1:]) or ("",)
    measured = {}
    for configuration in CONFIGURATIONS:
        if configuration.name.startswith(names):
            print(configuration.name, file=sys.stderr)
            measured[configuration.name] = tables(configuration, measure(configuration))
    page: list[list[str]] = [[], [], []]
    for configuration in CONFIGURATIONS:
        rows = measured.get(configuration.name) or on_page(configuration)
        for table, more in zip(page, rows, strict=True):
            table += more
    write(page)


main()
