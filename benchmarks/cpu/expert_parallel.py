"""Expert parallelism against FSDP alone: `python benchmarks/cpu/expert_parallel.py [--ranks 2]
[--rounds 3] [--compile]`.

Both sides train Qwen3-MoE's debug model with our trainer on the same ranks and tokens. With FSDP
alone, every rank gathers all experts; with expert parallelism over all ranks, rows travel to the
experts instead. Losses are equal. On gloo, bytes cost CPU time, so the ratio shows what is
communicated, not what a network takes.
"""

from functools import partial

from _training import Run, compare, framework, measure, parser, run_side


def side(run: Run, *, parallel: bool) -> None:
    degree = run.ranks if parallel else 1
    framework(run, ["--model.name=qwen3_moe", f"--parallelism.expert_parallel_degree={degree}"])


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(ranks=2)
    options = options.parse_args()
    sides = {"experts": partial(side, parallel=True), "fsdp": partial(side, parallel=False)}
    if options.side:
        return run_side(options, sides)
    results = measure(options, [f"{name}_compiled" if options.compile else name for name in sides])
    compare(results, [tuple(results)], options)
    print("loss of the last step:")
    for name, rounds in results.items():
        print(f"  {name:30}{rounds[-1]['loss']:.6f}")
    return None


if __name__ == "__main__":
    main()
