"""What a mixture costs over a single source: `python benchmarks/cpu/mixture.py [--ranks 2]`.

Both sides train the debug model on the demo text in fp32, one from one source, the other from eight
of unequal weights, whose losses it adds up and reports in every step. They alternate.
"""

from _training import Run, compare, framework, measure, parser, run_side

EVERY_STEP = "--metrics.log_freq=1"


def single(run: Run) -> None:
    framework(run, [EVERY_STEP])


def mixture(run: Run) -> None:
    tables = ", ".join(f"{{name = 's{i}', weight = {1 + i}}}" for i in range(8))
    framework(run, [EVERY_STEP, f"--training.sources=[{tables}]"])


def main() -> None:
    options = parser(__doc__).parse_args()
    if options.side:
        return run_side(options, {"single": single, "mixture": mixture})
    return compare(measure(options, ["single", "mixture"]), [("mixture", "single")], options)


if __name__ == "__main__":
    main()
