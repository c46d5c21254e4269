"""The training that several benchmarks measure: its shape, its meter, its command line, and our own
side of it.

The debug model trains on the demo text. A side is one process per rank, which calls `Meter.tick`
after every step and `Meter.report` at the end. A side called `*_compiled` compiles, one called
`*_bf16` computes in bf16, with weights and optimizer state in fp32.
"""

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _sides import Results, alternate, median, ratios, run

SEQ_LEN = 512
BATCH = 8
LR = 1e-3


@dataclass(frozen=True)
class Run:
    """What a side is told."""

    ranks: int
    steps: int
    warm: int
    """Steps that the throughput leaves out: they compile, and allocate."""
    compiled: bool
    bf16: bool
    folder: Path
    """Of this comparison, gone when it ends."""
    tokens: int = BATCH * SEQ_LEN
    """Of a step."""


def cpu_seconds() -> float:
    """User + system seconds of this process and of all that it started, compiler workers still
    alive included.
    """
    import psutil

    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(usage.ru_utime + usage.ru_stime for usage in used)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:4])  # its own, and its ended children's
    return total


class Meter:
    """CPU-seconds of this rank: to the end of the first step, and from the end of the warm-up to
    the last step.
    """

    def __init__(self, run: Run):
        self.run = run
        self.at = dict[int, float]()

    def tick(self, step: int) -> None:
        if step in (1, self.run.warm, self.run.steps):
            self.at[step] = cpu_seconds()

    def report(self, loss: float, **more: float) -> None:
        """Print rank 0's line: all ranks' CPU time and the largest peak."""
        import torch
        import torch.distributed as dist

        run = self.run
        at = self.at
        totals = torch.tensor([at[1], at[run.steps] - at[run.warm]], dtype=torch.float64)
        peak = torch.tensor(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, dtype=torch.float64
        )
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(totals)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        first, timed = totals.tolist()
        line = {
            "tokens_per_cpu_s": (run.steps - run.warm) * run.tokens / timed,
            "peak_gib": peak.item(),
            "first_step_cpu_s": first,
            "loss": loss,
        }
        print(json.dumps(line | more), flush=True)


def loader(rank: int, ranks: int) -> Any:
    """The rows that our trainer reads on `rank`."""
    from torchtitan.config.sections.data import DataLoader, Source
    from torchtitan.data.encode.tokenizer import build_tokenizer
    from torchtitan.data.loader import build_loader
    from torchtitan.data.sources import DataSpec

    spec = DataSpec(
        sources=[Source(name="data", dataset="demo")],
        tokenizer=build_tokenizer("./tests/assets/tokenizer"),
        seq_len=SEQ_LEN,
        rows_per_step=BATCH,
        seed=0,
        infinite=True,
        options=DataLoader(),
    )
    return build_loader(spec, dp_rank=rank, dp_degree=ranks)


def framework(run: Run, extra: Sequence[str] = (), dp: int | None = None) -> None:
    """This project's trainer, as a user runs it.

    Args:
        dp: data-parallel degree, if that isn't the number of ranks.
    """
    arguments = [
        f"--training.seq_len={SEQ_LEN}",
        f"--training.local_batch_size={BATCH // (dp or run.ranks)}",
        f"--training.mixed_precision_param={'bfloat16' if run.bf16 else 'float32'}",
        f"--optimizer.lr={LR}",
        "--lr_scheduler.warmup_steps=1",
        "--lr_scheduler.decay_ratio=0.0",
        "--activation_checkpoint.mode=none",  # the other sides recompute nothing either
        *(["--compile.enable"] if run.compiled else []),
        *extra,
    ]
    train(run, arguments)


def train(
    run: Run,
    arguments: Sequence[str],
    after_step: Callable[[], object] = lambda: None,
    summary: Callable[[], dict[str, float]] = dict,
) -> None:
    """Run the trainer with these flags.

    Args:
        after_step: called at the end of each step.
        summary: further numbers to report.
    """
    from torchtitan.config import resolve
    from torchtitan.train.callbacks import Callback
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    arguments = [
        *arguments,
        f"--job.dump_folder={run.folder}/framework",
        f"--training.steps={run.steps}",
    ]
    config = resolve(arguments, int(os.environ.get("WORLD_SIZE", "1"))).config
    meter = Meter(run)

    class Ticking(Callback):
        def after_step(self, run: Any, result: Any) -> None:
            meter.tick(run.progress.step)
            after_step()

    trainer = Trainer(config, preflight(config), callbacks=[Ticking()])
    progress = trainer.train()
    meter.report(progress.losses[-1], **summary())
    trainer.close()


# ---- the command line


def parser(doc: str) -> argparse.ArgumentParser:
    """The options of a comparison, and those by which it starts its sides."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ranks", type=int, default=1)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--steps", type=int, default=12, help="of each run")
    made.add_argument(
        "--warm", type=int, default=3, help="steps at the beginning that are not timed"
    )
    made.add_argument("--compile", action="store_true", help="measure compiled sides too")
    made.add_argument("--bf16", action="store_true", help="measure sides in bf16 too")
    made.add_argument("--tokens", type=int, default=BATCH * SEQ_LEN, help=argparse.SUPPRESS)
    made.add_argument("--side", help=argparse.SUPPRESS)
    made.add_argument("--folder", help=argparse.SUPPRESS)
    return made


def run_side(options: argparse.Namespace, sides: dict[str, Callable[[Run], None]]) -> None:
    """Be the side that `measure` asks for."""
    name = options.side.removesuffix("_bf16").removesuffix("_compiled")
    compiled = "_compiled" in options.side
    bf16 = options.side.endswith("_bf16")
    folder = Path(options.folder)
    run = Run(options.ranks, options.steps, options.warm, compiled, bf16, folder, options.tokens)
    sides[name](run)


def measure(
    options: argparse.Namespace, sides: Sequence[str], prepare: str | None = None
) -> Results:
    """Run the sides of the script that is running, in turn.

    Args:
        prepare: a side that runs once before, as one process, to leave something in the folder for
        the others.
    """
    with tempfile.TemporaryDirectory(prefix="titan-benchmark-") as folder:

        def command(side: str, ranks: int) -> list[str]:
            # A compiler cache for each side, or one would find what another has compiled.
            cache = ["env", f"TORCHINDUCTOR_CACHE_DIR={folder}/cache-{side}"]
            launch = (
                ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
                if ranks > 1
                else []
            )
            told = {
                "side": side,
                "ranks": ranks,
                "steps": options.steps,
                "warm": options.warm,
                "tokens": options.tokens,
                "folder": folder,
            }
            return [
                *cache,
                sys.executable,
                *launch,
                sys.argv[0],
                *(f"--{key}={value}" for key, value in told.items()),
            ]

        if prepare:
            run(command(prepare, 1), threads=1)
        return alternate(
            {side: command(side, options.ranks) for side in sides}, options.rounds, threads=1
        )


def compare(
    results: Results, pairs: Sequence[tuple[str, str]], options: argparse.Namespace
) -> None:
    """Print the ratios of each pair of sides."""
    print(f"{options.ranks} rank(s), {options.tokens} tokens a step:")
    for ours, theirs in pairs:
        print(f"{ours} / {theirs}:")
        print(
            f"  tokens per CPU-second         {ratios(results, ours, theirs, 'tokens_per_cpu_s')}"
        )
        print(f"  peak memory                   {ratios(results, ours, theirs, 'peak_gib')}")
        print(
            f"  CPU-seconds to step 1's end   {ratios(results, ours, theirs, 'first_step_cpu_s')}"
        )
    compiled = any(side.endswith("_compiled") for side in results)
    print(
        "CPU-seconds from the start to the end of step "
        f"1{' (nothing compiled yet)' if compiled else ''}:"
    )
    for side, rounds in results.items():
        cold = f" ({rounds[0]['first_step_cpu_s']:.1f})" if compiled else ""
        print(f"  {side:30}{median(results, side, 'first_step_cpu_s'):.1f}{cold}")
