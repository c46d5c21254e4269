"""Write a pipeline schedule that torch doesn't have, as a file for
parallelism.pipeline_parallel_schedule_csv:

    torchtitan pipeline-schedule v-half --pp 8 --microbatches 32 --output v-half.csv

zb-h1 keeps as many activations as 1F1B and fills most of its bubble. v-half keeps about half of
them, v-min a third.
"""

import argparse
from pathlib import Path

from torchtitan.tools.planner.pipeline_orders import NAMES, as_csv, most_kept, orders_of
from torchtitan.tools.planner.pipeline_timeline import Program, simulate
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output
from torchtitan.utils.limits import PIPELINE_SCHEDULE_BYTES
from torchtitan.utils.text import count


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan pipeline-schedule",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument(
        "--pp",
        required=True,
        type=lambda text: count(text, fewest=2, most=256),
        metavar="P",
        help="parallelism.pipeline_parallel_degree",
    )
    parser.add_argument(
        "--microbatches",
        required=True,
        type=lambda text: count(text, most=100_000),
        metavar="N",
        help="training.local_batch_size / pipeline_parallel_microbatch_size",
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="CSV file to write"
    )
    return parser


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    degree = options.pp
    microbatches = options.microbatches
    file = options.output
    shortest = 3 * degree * microbatches * len("0F0,")
    content = b""
    if shortest <= PIPELINE_SCHEDULE_BYTES:  # else computing it would take minutes
        orders = orders_of(options.name, degree, microbatches)
        content = as_csv(orders).encode()
    if max(shortest, len(content)) > PIPELINE_SCHEDULE_BYTES:
        raise UserError(
            f"--microbatches {microbatches}: a schedule file may have {PIPELINE_SCHEDULE_BYTES:,} "
            "bytes; use fewer"
        )
    write_output({file: content})
    stages = len({action.stage for order in orders for action in order})
    idle = simulate(Program(orders, ()), lambda stage, kind: 2.0 if kind == "B" else 1.0, 0.0).idle
    kept = most_kept(orders) * degree / stages
    theirs = min(degree, microbatches)
    bubble = (degree - 1) / (microbatches + degree - 1)
    print(
        f"wrote {file}: {stages} stages on {degree} ranks, {microbatches} microbatches\nkeeps the "
        f"activations of at most {kept:g} microbatches on a rank (1F1B: {theirs})\nidle "
        f"{idle:.1%} (1F1B: {bubble:.1%}), if forwards and both parts of backwards take equally "
        f"long\nfor a run: --parallelism.pipeline_parallel_degree={degree} "
        f"--parallelism.pipeline_parallel_schedule_csv={file} "
        f"--training.local_batch_size={microbatches} "
        "--parallelism.pipeline_parallel_microbatch_size=1"
    )
    return 0
