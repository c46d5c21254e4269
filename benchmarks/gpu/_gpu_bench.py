"""What the stages of `gpu.py` share: where they run, how they train and start processes, and what
they measure.

A stage is a function of a `Bench` that returns figures. It runs in a process of its own.
"""

import json
import multiprocessing
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NCCL = "libnccl.so.2.xz"
"""In the folder of wheels: an NCCL that lets several ranks share one GPU."""
Figures = dict[str, Any]
"""What a stage found, by name: numbers and short texts, ready for JSON."""

SMALL = (
    "--model.overrides.dim=256",
    "--model.overrides.n_layers=4",
    # of 64: the smallest size for which every attention kernel exists
    "--model.overrides.n_heads=4",
    "--model.overrides.n_kv_heads=2",
    "--model.overrides.ffn_dim=512",
    "--activation_checkpoint.mode=none",
    "--optimizer.lr=1e-3",
    "--lr_scheduler.warmup_steps=2",
    "--training.seq_len=512",
    "--training.local_batch_size=4",
    "--metrics.log_freq=1",
)
"""A model whose numbers are compared."""
TOY = (
    "--model.overrides.dim=64",
    "--model.overrides.n_layers=2",
    "--model.overrides.n_heads=8",
    "--model.overrides.n_kv_heads=8",
    "--model.overrides.ffn_dim=128",
    "--model.overrides.vocab_size=2048",
    "--training.seq_len=64",
    "--optimizer.lr=1e-2",
    "--compile.enable=false",
    "--quantize.linear.float8.emulate=true",
)
"""What a dry run adds to every configuration."""


class Skip(Exception):
    """This machine can't run the stage; the message says why."""


class Beyond(Exception):
    """A figure is beyond its limit."""

    def __init__(self, problems: Sequence[str], figures: Figures):
        super().__init__("; ".join(problems))
        self.figures = figures


@dataclass(frozen=True)
class Bench:
    """Where a stage runs."""

    dry: bool
    """On the CPU, with a toy model and gloo."""
    folder: Path
    """Files of this stage, deleted after it."""
    kept: Path
    """Files of this stage that are kept if they are small."""
    wheels: Path
    """Where `gpu_wheels.py` put what the machine may lack."""

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def steps(self) -> int:
        """Of a run whose numbers are compared."""
        return 2 if self.dry else 6

    @property
    def processes(self) -> BaseContext:
        """How to start processes. CUDA doesn't survive a fork; a dry run saves the imports."""
        return multiprocessing.get_context("fork" if self.dry else "spawn")

    def flags(self, *flags: str, name: str = "run") -> list[str]:
        """A configuration: the demo text, nothing saved, `flags`, and the toy model in a dry
        run.
        """
        return [
            f"--job.dump_folder={self.folder / name}",
            f"--model.hf_assets_path={ROOT / 'tests/assets/tokenizer'}",
            "--training.dataset=demo",
            "--checkpoint.enable=false",
            *flags,
            *(TOY if self.dry else ()),
        ]


def within(figures: Figures, limits: Mapping[str, float]) -> Figures:
    """`figures`, with the limits that were asked of them.

    Raises:
        Beyond: a figure is larger than its limit, or not a number.
    """
    problems = [
        f"{name} is {figures[name]:.3g}, beyond {limit:g}"
        for name, limit in limits.items()
        if not figures[name] <= limit
    ]
    figures = figures | {"limits": dict(limits)}
    if problems:
        raise Beyond(problems, figures)
    return figures


def distance(a: Any, b: Any) -> float:
    """Relative error of tensor `a`: the 2-norm of a - b over that of b, in fp64."""
    a = a.detach().double().cpu()
    b = b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def furthest(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest relative difference of two series."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


# ---- training


def train(
    argv: list[str], callbacks: Sequence[Any] = (), world: int | None = None
) -> list[Figures]:
    """Train in this process, as `torchtitan train` does.

    Args:
        callbacks: called before the framework's.
        world: ranks; by default those of the environment.

    Returns:
        The records of `metrics.jsonl`.
    """
    from torchtitan.config import resolve
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    config = resolve(argv, world or int(os.environ.get("WORLD_SIZE", "1"))).config
    trainer = Trainer(config, preflight(config), arrange=lambda ours: (*callbacks, *ours))
    try:
        trainer.train()
    except BaseException as error:
        trainer.close(error)
        raise
    trainer.close()
    return records(Path(config.job.dump_folder))


def records(dump_folder: Path) -> list[Figures]:
    """The lines of `metrics.jsonl` that report a training step; none if there is no file yet."""
    with suppress(FileNotFoundError):
        lines = (dump_folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if "loss" in record]
    return []


def column(found: Sequence[Figures], key: str) -> list[float]:
    return [record[key] for record in found]


# ---- processes


def run_ranks(
    bench: Bench, world: int, function: Callable[..., Any], *args: Any, **env: str
) -> list[Any]:
    """Call `function(*args)` on `world` ranks of this machine; their results. Each has a GPU, or
    all share the only one.

    Args:
        env: environment variables of the ranks.

    Raises:
        RuntimeError: a rank failed.
    """
    started = start_ranks(bench, world, function, *args, **env)
    for process in started:
        process.join()
    failed = {rank: process.exitcode for rank, process in enumerate(started) if process.exitcode}
    if failed:
        raise RuntimeError(f"ranks that failed, with their exit status: {failed}")
    return [json.loads(_result(bench, rank).read_text()) for rank in range(world)]


def start_ranks(
    bench: Bench, world: int, function: Callable[..., Any], *args: Any, **env: str
) -> list[Any]:
    """Start `run_ranks` and return the processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    started = []
    apart = gpus(bench) >= world
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank if apart else 0}
        own = {name: str(value) for name, value in (shared | place).items()} | env
        target = (function, args, _result(bench, rank))
        before = dict(os.environ)
        os.environ.update(
            own
        )  # a spawned process has them from its beginning, as LD_PRELOAD must be
        try:
            process = bench.processes.Process(target=_rank, args=target)
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        started.append(process)
    return started


def gpus(bench: Bench) -> int:
    """Number of GPUs for ranks; none in a dry run."""
    import torch

    return 0 if bench.dry else torch.cuda.device_count()


def _result(bench: Bench, rank: int) -> Path:
    return bench.folder / f"rank-{rank}.json"


def _rank(function: Callable[..., Any], args: Sequence[Any], result: Path) -> None:
    result.write_text(json.dumps(function(*args)))


def start_command(bench: Bench, argv: Sequence[str]) -> tuple[Any, Path]:
    """Start `torchtitan ARGV`. Returns the process, and the file that gets its output."""
    log = bench.folder / f"command-{time.monotonic_ns()}.txt"
    process = bench.processes.Process(target=_command, args=(list(argv), log))
    process.start()
    return process, log


def run_command(bench: Bench, argv: Sequence[str]) -> tuple[int, str]:
    """Run `torchtitan ARGV`: its exit status and output."""
    process, log = start_command(bench, argv)
    process.join()
    return process.exitcode, log.read_text()


def _command(argv: list[str], log: Path) -> None:
    send_output(log)
    sys.argv = ["torchtitan", *argv]
    from torchtitan.commands import main

    sys.exit(main())


def send_output(log: Path) -> None:
    """From now on, write this process's output to `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def machine() -> Figures:
    """What the figures depend on."""
    import torch

    from torchtitan.utils.accelerators import NoDriver, query

    about: Figures = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    if not torch.cuda.is_available():
        return about | {"device": "CPU"}
    device = torch.cuda.get_device_properties(0)
    with suppress(NoDriver):
        about["driver"] = query(["driver_version"])[0]["driver_version"]
    return about | {
        "device": device.name,
        "memory_gib": round(device.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
