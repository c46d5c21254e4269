"""What activation checkpointing and the chunked loss save, and cost.

    python benchmarks/cpu/memory.py [--ranks 2]

Each way of training runs in processes of its own, in turn. Printed: peak resident memory, and
tokens per CPU-second relative to keeping everything. fp32, a model of 8 layers with a vocabulary
large for its width.
"""

from _sides import Results, median, ratios
from _training import Run, framework, measure, parser, run_side

MODEL = [
    "--model.overrides.n_layers=8",
    "--model.overrides.vocab_size=32768",
    "--training.loss_chunks=1",
    "--metrics.log_freq=1000000",
]
AC = "--activation_checkpoint"
WAYS = {
    "none": [],
    "selective_2": [f"{AC}.mode=selective"],
    "selective_op": [f"{AC}.mode=selective", f"{AC}.selective_ac_option=op"],
    "full": [f"{AC}.mode=full"],
    "full_chunked": [f"{AC}.mode=full", "--training.loss_chunks=8"],
    "chunked": ["--training.loss_chunks=8"],
    "compile": ["--compile.enable"],
    "compile_selective_op": [
        "--compile.enable",
        f"{AC}.mode=selective",
        f"{AC}.selective_ac_option=op",
    ],
    "compile_budget_half": [
        "--compile.enable",
        f"{AC}.mode=memory_budget",
        f"{AC}.memory_budget=0.5",
    ],
    "compile_chunked": ["--compile.enable", "--training.loss_chunks=8"],
}


def way(name: str):
    def side(run: Run) -> None:
        framework(run, [*MODEL, *WAYS[name]])

    return side


def table(results: Results) -> None:
    print("| | peak memory, GiB | tokens per CPU-second, relative to `none` |\n|---|---|---|")
    for name in results:
        speed = ratios(results, name, "none", "tokens_per_cpu_s")
        print(f"| {name} | {median(results, name, 'peak_gib'):.2f} | {speed} |")


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--only", nargs="*", default=list(WAYS), help="these ways, of " + ", ".join(WAYS)
    )
    options = made.parse_args()
    if options.side:
        return run_side(options, {name: way(name) for name in WAYS})
    names = ["none", *(name for name in options.only if name != "none")]
    return table(measure(options, names))


if __name__ == "__main__":
    main()
