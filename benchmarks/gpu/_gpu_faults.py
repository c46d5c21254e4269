"""Stages of `gpu.py` that start, stop and break runs: a first run, process groups, saves, faults,
several ranks.
"""

import lzma
import os
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _gpu_bench import (
    NCCL,
    SMALL,
    TOY,
    Bench,
    Beyond,
    Figures,
    Skip,
    column,
    furthest,
    gpus,
    records,
    run_command,
    run_ranks,
    start_command,
    start_ranks,
    train,
    within,
)

from torchtitan.checkpoint.load import Reader, read_tensor
from torchtitan.utils.errors import OutOfMemoryError

FP32 = "--training.mixed_precision_param=float32"


def first_run(bench: Bench, compiled: bool) -> Figures:
    """The debug model: does it train, and how often does the host wait for the GPU in a step?"""
    steps = 4 if bench.dry else 30
    flags = [*SMALL, f"--training.steps={steps}", "--debug.report_device_syncs=true"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(bench.flags(*flags, *(["--compile.enable=true"] if compiled else [])))
    waits = [w for w in caught if "synchronizing" in str(w.message)]
    places = Counter(f"{'/'.join(Path(w.filename).parts[-3:])}:{w.lineno}" for w in waits)
    figures = {
        "first_loss": found[0]["loss"],
        "last_loss": found[-1]["loss"],
        "first_step_s": found[0]["step_time_s"],
        **dict(zip(("step_s_min", "step_s", "step_s_max"), _spread(found[1:]), strict=True)),
        "waits_per_step": len(waits) / (steps - 1),  # the first step is not watched
        "waits": dict(places.most_common(12)),
    }
    if not figures["last_loss"] < figures["first_loss"]:
        raise Beyond(
            [f"the loss went from {figures['first_loss']} to {figures['last_loss']}"], figures
        )
    return figures


def _spread(found: Sequence[Figures]) -> tuple[float, float, float]:
    """Minimum, median and maximum of the seconds of a step."""
    seconds = column(found, "step_time_s")
    return min(seconds), median(seconds), max(seconds)


def groups(bench: Bench) -> Figures:
    """Process groups, a split of them, collectives in the Flight Recorder, and the doctor's reading
    of its dump.
    """
    import torch
    import torch.distributed as dist

    from torchtitan.train.callbacks import Callback

    figures = Figures()

    class Failing(Callback):
        def on_start(self, run: Any) -> None:
            figures["backend"] = dist.get_backend_config()
            figures["groups"] = len(dist.distributed_c10d._world.pg_map)
            x = torch.ones(4, device=bench.device)
            dist.all_reduce(x)
            dist.barrier()
            try:
                group = dist.split_group(split_ranks=[[0]])
                dist.all_reduce(x, group=group)
                figures["split"] = "works"
            except Exception as error:  # an assertion of torch's, in some releases
                figures["split"] = str(error).strip().splitlines()[0][:200]

        def after_step(self, run: Any, result: Any) -> None:
            if run.progress.step == 2:
                raise RuntimeError("made by this stage")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(bench.flags(*SMALL, "--training.steps=3"), [Failing()])
        except RuntimeError as error:
            if "made by this stage" not in str(error):
                raise
    figures["warnings"] = sorted({str(w.message).splitlines()[0][:200] for w in caught})[:8]
    status, text = run_command(bench, ["doctor", str(bench.folder / "run")])
    figures |= {
        "doctor_status": status,
        "doctor": text.strip()[:500],
        "recorded": _recorded(bench.folder / "run"),
    }
    problems = (
        []
        if status == 0 and "made by this stage" in text
        else ["the doctor doesn't name the error"]
    )
    problems += [] if figures["recorded"] else ["the Flight Recorder's dump holds no collective"]
    if problems:
        raise Beyond(problems, figures)
    return figures


def _recorded(dump_folder: Path) -> int:
    """Collectives in rank 0's dump. The doctor leaves out those of groups of one."""
    from torchtitan.config.sections.schema import Comm
    from torchtitan.utils.formats import safe_loads

    comm = Comm()
    path = dump_folder / comm.save_traces_folder / f"{comm.save_traces_file_prefix}0"
    return len(safe_loads(path.read_bytes())["entries"]) if path.exists() else 0


# ---- saves


def saves(bench: Bench, mode: str) -> Figures:
    """What a save costs, and a run that is resumed from one: bit for bit that which was never
    stopped.
    """
    from checkpoint import measure

    toy = {"stretch": 1, "extra": TOY} if bench.dry else {}
    cost = measure(mode, bench.folder, 1, **toy)
    half = bench.steps // 2
    steps = bench.steps
    every = [
        "--checkpoint.enable=true",
        f"--checkpoint.interval={half}",
        f"--checkpoint.async_mode={mode}",
        f"--lr_scheduler.total_steps={steps}",
        "--debug.deterministic=true",
    ]
    whole = train(bench.flags(*SMALL, *every, f"--training.steps={steps}", name="whole"))
    train(bench.flags(*SMALL, *every, f"--training.steps={half}", name="resumed"))
    resumed = train(bench.flags(*SMALL, *every, f"--training.steps={steps}", name="resumed"))
    differ = [a["step"] for a, b in zip(whole, resumed, strict=True) if a["loss"] != b["loss"]]
    a, b = (
        Reader(bench.folder / name / "checkpoint" / f"step-{steps}")
        for name in ("whole", "resumed")
    )
    tensors = [
        key
        for key in a.read_metadata().state_dict_metadata
        if not torch.equal(read_tensor(a, key), read_tensor(b, key))
    ]
    figures = {**cost, "steps_that_differ": len(differ), "tensors_that_differ": len(tensors)}
    if differ or tensors:
        problem = f"the resumed run differs: steps {differ}, tensors {tensors[:9]}"
        raise Beyond([problem], figures)
    return figures


def large_saves(bench: Bench, mode: str) -> Figures:
    """What a save of the 1B costs: 15 GB of weights and optimizer state, in its true shapes."""
    from checkpoint import measure

    if bench.dry:
        return measure(mode, bench.folder, 1, stretch=1, extra=TOY)
    shapes = {"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192}
    overrides = [f"--model.overrides.{name}={value}" for name, value in shapes.items()]
    return measure(mode, bench.folder, 1, stretch=10, extra=["--model.flavor=1B", *overrides])


# ---- faults


def out_of_memory(bench: Bench) -> Figures:
    """A step that can't fit: exit status 12, one message that says what to change, no traceback."""
    if bench.dry:
        huge = [
            "--model.overrides.vocab_size=65536",
            "--training.local_batch_size=128",
        ]  # 2 GiB of logits
        flags = [*bench.flags(*SMALL, FP32, "--training.steps=2"), *huge]
        _limit_memory(2**30)
    else:
        flags = bench.flags(
            "--model.flavor=1B", "--training.seq_len=8192", "--training.local_batch_size=64"
        )
        flags += ["--activation_checkpoint.mode=none", "--training.steps=2"]
    status, text = run_command(bench, ["train", *flags])
    message = text[text.find("error:") :].strip() if "error:" in text else text[-500:]
    figures = {"status": status, "message": message[:1500]}
    wrong = []
    if status != OutOfMemoryError.exit_code or "out of memory" not in message:
        wrong.append(f"status {status}, and not the message of a run that is out of memory")
    if "Traceback" in text:
        wrong.append("a traceback was printed")
    if wrong:
        raise Beyond(wrong, figures)
    return figures


def _limit_memory(more: int) -> None:
    """Let this process and those it starts take only `more` bytes beyond what it has mapped."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def stopped(bench: Bench) -> Figures:
    """SIGTERM: the run saves, exits with 75, and the same command resumes after the step that was
    saved.
    """
    steps = 100_000
    flags = bench.flags(*SMALL, "--checkpoint.enable=true", "--lr_scheduler.total_steps=100000")
    flags += ["--checkpoint.async_mode=async", "--metrics.log_freq=1"]
    process, log = start_command(bench, ["train", *flags, f"--training.steps={steps}"])
    run = bench.folder / "run"
    while len(records(run)) < 3:
        if not process.is_alive():
            raise RuntimeError(f"the run ended with {process.exitcode}: {log.read_text()[-500:]}")
        time.sleep(0.1)
    asked = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    seconds = time.monotonic() - asked
    last = records(run)[-1]["step"]
    status, text = run_command(bench, ["train", *flags, f"--training.steps={last + 2}"])
    continued = [record["step"] for record in records(run)][-2:]
    figures = {
        "status": process.exitcode,
        "seconds": seconds,
        "saved_step": last,
        "resumed": continued,
    }
    if (process.exitcode, status, continued) != (75, 0, [last + 1, last + 2]):
        raise Beyond(
            [f"status {process.exitcode}, then {status}, steps {continued}: {text[-300:]}"], figures
        )
    return figures


# ---- several ranks, on one GPU or one each

MOE = "--model.name=qwen3_moe"
LAYOUTS = {
    "fsdp": ["--parallelism.data_parallel_shard_degree=2"],
    "tp": ["--parallelism.tensor_parallel_degree=2"],
    "pp": ["--parallelism.pipeline_parallel_degree=2"],
    "cp": ["--parallelism.context_parallel_degree=2"],
    "ep": ["--parallelism.expert_parallel_degree=2"],
    "muon": ["--parallelism.data_parallel_shard_degree=2"],
}
"""Flags of two ranks."""
OF_BOTH = {"ep": [MOE], "muon": ["--optimizer.name=Muon"]}
"""Flags of one rank and of two."""
LIMITS = {"muon": {"loss": 1e-3, "grad_norm": 1e-2}}
"""Muon's products are in bf16."""


def layout(bench: Bench, axis: str) -> Figures:
    """Two ranks of one layout: the losses of one rank, in fp32."""
    flags = [*SMALL, FP32, f"--training.steps={bench.steps}", "--training.global_batch_size=8"]
    flags += OF_BOTH.get(axis, [])
    shared = _several_ranks(bench)
    two = bench.flags(*flags, *LAYOUTS[axis], name="two")
    found = run_ranks(bench, 2, train, two, **shared)[0]
    reference = run_ranks(bench, 1, train, bench.flags(*flags, name="one"))[0]
    figures = {
        key: furthest(column(found, key), column(reference, key)) for key in ("loss", "grad_norm")
    }
    return within(figures, LIMITS.get(axis, {"loss": 1e-5, "grad_norm": 1e-4}))


def watch(bench: Bench) -> Figures:
    """One of two ranks stops in a step: the watch of the other names it, before the time limit."""
    limit = 4
    shared = _several_ranks(bench)
    flags = bench.flags(*SMALL, "--training.steps=100", f"--comm.train_timeout_seconds={limit}")
    began = time.monotonic()
    started = start_ranks(bench, 2, _sleepy, flags, **shared)
    diagnosis = bench.folder / "run" / "comm_traces" / "diagnosis.txt"
    while not diagnosis.exists() and all(process.is_alive() for process in started):
        time.sleep(0.2)
    text = diagnosis.read_text().strip() if diagnosis.exists() else ""
    for process in started:
        process.kill()
        process.join()
    figures = {"diagnosis": text[:500], "seconds": time.monotonic() - began}
    if "rank 1" not in text:
        raise Beyond(["the diagnosis doesn't name rank 1"], figures)
    return figures


def _sleepy(argv: list[str]) -> None:
    from torchtitan.train.callbacks import Callback

    class Sleeping(Callback):
        def after_step(self, run: Any, result: Any) -> None:
            if run.progress.step == 3 and os.environ["RANK"] == "1":
                time.sleep(600)

    train(argv, [Sleeping()])


def _several_ranks(bench: Bench) -> dict[str, str]:
    """The environment in which two ranks may use one GPU, which takes NCCL 2.30; nothing if each
    has its own.

    Raises:
        Skip: there is only an older one.
    """
    if bench.dry or gpus(bench) >= 2:
        return {}
    import torch

    allowed = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    if torch.cuda.nccl.version() >= (2, 30):
        return allowed
    packed = bench.wheels / NCCL
    if not packed.exists():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        raise Skip(
            f"NCCL {version} refuses several ranks on one GPU: needs 2.30, as {packed} "
            "(gpu_wheels.py --nccl)"
        )
    library = bench.folder / NCCL.removesuffix(".xz")
    with lzma.open(packed) as source, library.open("wb") as target:
        shutil.copyfileobj(source, target)
    return allowed | {"LD_PRELOAD": str(library)}
