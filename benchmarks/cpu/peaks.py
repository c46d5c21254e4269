"""Peak memory of ten layouts, planned and measured.

    python benchmarks/cpu/peaks.py [--only NAME ...] [--json FILE]

To compare two versions, run this file under each (`PYTHONPATH=...`) with `--json`, then `--compare
BEFORE AFTER`. Layouts of 8B, 70B and 405B are traced (GiB that CUDA's allocator reserves, the
largest of the first, largest and last pipeline ranks); those of the debug model run on gloo ranks
(MiB that PyTorch's CPU allocator holds at most in a step, beyond what it holds between steps).
"""

import argparse
import json
import logging
import sys
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.config import resolve
from torchtitan.testing.ranks import RankPool
from torchtitan.tools.planner.memory import GIB, memory_of
from torchtitan.tools.planner.workload import Workload
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight
from torchtitan.train.step import HostUpdate, forward_backward

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "train_configs"
T = "--training."
P = "--parallelism."
LONG = f"{T}seq_len=8192"
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
SMALL = ["--model.flavor=8B", LONG, *OP]
LARGE = ["--model.flavor=70B", LONG, "--activation_checkpoint.mode=full", "--compile.enable"]
TRACED = {
    "8B on 8, 2 rows": (8, [*SMALL, f"{T}local_batch_size=2", f"{T}global_batch_size=16"]),
    "8B on 8, 1 row x 2": (8, [*SMALL, f"{T}local_batch_size=1", f"{T}global_batch_size=16"]),
    "8B on 2 x 4, 1 row x 2": (
        8,
        [
            *SMALL,
            f"{T}local_batch_size=1",
            f"{T}global_batch_size=16",
            f"{P}data_parallel_replicate_degree=2",
        ],
    ),
    "8B, elastic, 6 of 8, 1 row x 3": (
        6,
        [*SMALL, f"{T}local_batch_size=1", f"{T}global_batch_size=16"]
        + ["--fault_tolerance.elastic", "--checkpoint.enable"],
    ),
    "8B, cp 8, 65,536 tokens, 1 row x 2": (
        8,
        [
            "--model.flavor=8B",
            f"{T}seq_len=65536",
            "--activation_checkpoint.mode=full",
            f"{T}local_batch_size=1",
        ]
        + [f"{T}global_batch_size=2", f"{P}context_parallel_degree=8"],
    ),
    "70B on 64, 2 rows": (64, [*LARGE, f"{T}local_batch_size=2", f"{T}global_batch_size=128"]),
    "70B on 8 x tp 8, 2 rows x 8": (
        64,
        [
            *LARGE,
            f"{T}local_batch_size=2",
            f"{T}global_batch_size=128",
            f"{P}tensor_parallel_degree=8",
        ],
    ),
    "70B on 64, 1 row x 2": (64, [*LARGE, f"{T}local_batch_size=1", f"{T}global_batch_size=128"]),
    "405B on 512": (
        512,
        [
            f"--job.config_file={CONFIGS / 'llama3_405b.toml'}",
            "--model.hf_assets_path=./tests/assets/tokenizer",
        ],
    ),
}
MEASURED = {
    "debug model, fsdp 2, 1 row x 8": (2, []),
    "debug model, ddp 2, 1 row x 8": (2, [f"{P}data_parallel_replicate_degree=2"]),
}
DEBUG = [
    "--model.overrides.n_layers=4",
    f"{T}seq_len=64",
    f"{T}local_batch_size=1",
    f"{T}global_batch_size=16",
    f"{T}mixed_precision_param=float32",
]


def traced(world: int, argv: list[str]) -> float:
    """GiB."""
    sys.path.append(str(ROOT))
    from tests.traced_step.trace import trace_ranks

    config = resolve(argv, world).config
    setup = preflight(config, output=False)
    w = Workload(config, setup.args, setup.stages)
    forms = [memory_of(w, rank).reserved for rank in range(w.pp)]
    ranks = sorted({0, forms.index(max(forms)), w.pp - 1})
    return max(made.peak_reserved for made in trace_ranks(config, world, ranks)) / GIB


def measured(argv: list[str]) -> float:
    """MiB on this rank, the lowest of five steps: the profiler may miss that gloo's threads free a
    message.
    """
    logging.disable(logging.WARNING)
    config = resolve(argv, dist.get_world_size()).config
    engine = build(config, preflight(config, output=False), torch.device("cpu"))
    batches = iter(engine.loader)
    peaks = []
    for _ in range(6):
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            forward_backward(engine, next(batches), HostUpdate(engine, config.training.max_norm))
            engine.optimizer.step()
            engine.optimizer.zero_grad(set_to_none=True)
        events = (
            event
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
        )
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        peaks.append(max(accumulate(changes)))
    engine.loader.close()
    return min(peaks[1:]) / 2**20  # the first step allocates the optimizer's state


def run(names: list[str]) -> dict[str, float]:
    results = {name: traced(*TRACED[name]) for name in names if name in TRACED}
    for name in (name for name in names if name in MEASURED):
        world, argv = MEASURED[name]
        pool = RankPool(world)
        results[name] = max(pool.run(measured, [*DEBUG, *argv], timeout=300))
        pool.close()
    return results


def main() -> None:
    names = [*MEASURED, *TRACED]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=names, choices=names, metavar="NAME", help="these layouts"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="files of --json"
    )
    options = parser.parse_args()
    if options.compare:
        sides = [json.loads(file.read_text()) for file in options.compare]
    else:
        sides = [run(options.only)]
        if options.json:
            options.json.write_text(json.dumps(sides[0], indent=1))
    columns = ["layout", *(("before", "after") if options.compare else ["peak"])]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in sides[-1]:
        unit = "GiB" if name in TRACED else "MiB"
        print(f"| {name} | {' | '.join(f'{side[name]:.1f} {unit}' for side in sides)} |")


if __name__ == "__main__":
    main()
