"""Everything that only a GPU can tell, in one command: `python benchmarks/gpu/gpu.py --out
outputs/gpu`.

Each stage is a process of its own with a time limit, and ends in one JSON line: its figures, why
this machine can't run it, or the last line of its error. A failure costs only its stage. The lines
are appended to `results.jsonl` in the output folder, with the machine, the date and the command;
logs and profiler traces go into `details.zip` beside it.

    --stages '8b_*,groups'    only these; by default all, in order of importance, until --limit
    --two-gpus                only what two GPUs tell: 20 minutes
    --dry-run                 every stage on the CPU, with a toy model and gloo
    --tables results.jsonl    write docs/reference/performance.md's tables from results, anywhere

Compiled graphs are kept in build/inductor (or TORCHINDUCTOR_CACHE_DIR), so a second call starts
faster.

A machine without a network: run `python benchmarks/gpu/gpu_wheels.py` elsewhere, and take
build/wheels along. It needs only Python and torch.
"""

import argparse
import fnmatch
import importlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _gpu_bench import ROOT, Bench, Beyond, Figures, Skip, machine, send_output
from _gpu_stages import STAGES, Stage
from _gpu_tables import expected_tables, write_tables
from _gpu_two import names
from gpu_wheels import WHEELS, unpack_missing

LIMIT = 540
"""Seconds of a call, all stages together."""
TWO_GPUS_LIMIT = 1200
"""Seconds of a call with `--two-gpus`."""
TO_START = 20
"""Seconds below which no stage is started."""
TAIL = 15
"""Lines of the output that a failure's line keeps."""
DETAILS_BYTES = 15 * 2**20


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--stages", default="*", metavar="A,B", help="names or patterns; --list prints them"
    )
    made.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help=f"time for all stages ({LIMIT}; with --two-gpus {TWO_GPUS_LIMIT})",
    )
    made.add_argument(
        "--out", type=Path, default=Path("outputs/gpu"), metavar="DIR", help="where results go"
    )
    made.add_argument(
        "--wheels",
        type=Path,
        default=WHEELS,
        metavar="DIR",
        help="packages that may be missing here",
    )
    made.add_argument("--two-gpus", action="store_true", help="only the stages of two GPUs")
    made.add_argument("--dry-run", action="store_true", help="run on the CPU at toy size")
    made.add_argument("--list", action="store_true", help="print the stages and their time limits")
    made.add_argument(
        "--expected",
        action="store_true",
        help="print the plan's speed and memory of each stage on H100s, and steps line by line",
    )
    made.add_argument(
        "--tables",
        type=Path,
        nargs="+",
        metavar="JSONL",
        help="write docs/reference/performance.md from results",
    )
    return made


def chosen(patterns: str) -> list[Stage]:
    """The stages that any of the comma-separated patterns names, in their order. Ends the program
    if one names none.
    """
    names = [pattern.strip() for pattern in patterns.split(",")]
    for name in names:
        if not fnmatch.filter(STAGES, name):
            sys.exit(f"--stages: no stage {name!r}; --list prints them")
    return [
        stage
        for stage in STAGES.values()
        if any(fnmatch.fnmatch(stage.name, name) for name in names)
    ]


def main() -> None:
    options = parser().parse_args()
    if options.list:
        print("\n".join(f"{stage.name:30} {stage.seconds:4} s" for stage in STAGES.values()))
        return
    if options.tables:
        print(f"wrote {write_tables(options.tables)}")
        return
    if options.expected:
        print(expected_tables())
        return
    if options.two_gpus:
        options.stages = ",".join(names(list(STAGES)))
    options.limit = options.limit or (TWO_GPUS_LIMIT if options.two_gpus else LIMIT)
    options.out = options.out.resolve()
    options.wheels = options.wheels.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="titan-gpu-") as folder:
        _set_environment(options, Path(folder))
        left = run_all(chosen(options.stages), options, Path(folder))
    if left:
        print(f"not started, for lack of time: --stages {','.join(left)}", file=sys.stderr)


def _set_environment(options: argparse.Namespace, folder: Path) -> None:
    """Set what all processes inherit, and import once what a dry run's processes need: they are
    forks of this one.
    """
    paths = [str(ROOT), str(Path(__file__).parent), str(ROOT / "benchmarks/cpu")]
    paths += [str(made)] if (made := unpack_missing(options.wheels, folder / "packages")) else []
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `torchtitan train`
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build/inductor"))
    if options.dry_run:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        for name in (
            "torchtitan.commands.train",
            "torchtitan.train.trainer",
            "torch._dynamo",
            "torchao.float8",
        ):
            importlib.import_module(name)


# ---- running


def run_all(stages: list[Stage], options: argparse.Namespace, folder: Path) -> list[str]:
    """Run the stages one after another, and write a line for each. Returns the names of those there
    was no time for.
    """
    deadline = time.monotonic() + options.limit
    for i, stage in enumerate(stages):
        seconds = min(stage.seconds, deadline - time.monotonic())
        if seconds < TO_START:
            return [later.name for later in stages[i:]]
        here = folder / stage.name
        bench = Bench(options.dry_run, here / "work", here / "kept", options.wheels)
        for made in (bench.folder, bench.kept):
            made.mkdir(parents=True)
        line = json.dumps(run_stage(stage, bench, seconds, here))
        print(line, flush=True)
        with (options.out / "results.jsonl").open("a") as file:
            file.write(line + "\n")
        _keep(options.out / "details.zip", here, stage.name)
    return []


def run_stage(stage: Stage, bench: Bench, seconds: float, here: Path) -> Figures:
    """Run one stage, at most so long; its line. Whatever it started is killed."""
    log = here / "log.txt"
    result = here / "result.json"
    began = time.monotonic()
    process: Any = bench.processes.Process(target=_be, args=(stage.name, bench, log, result))
    process.start()
    process.join(seconds)
    late = process.is_alive()
    with suppress(ProcessLookupError):  # the stage leads a group of its own
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    line: Figures = {
        "stage": stage.name,
        "ok": False,
        "dry": bench.dry,
        "seconds": round(time.monotonic() - began, 1),
    }
    line |= {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }
    if result.exists():
        line |= json.loads(result.read_text())
    elif late:
        line["error"] = f"killed after {seconds:.0f} s"
    else:
        line["error"] = f"ended with exit status {process.exitcode}"
    if "error" in line and log.exists():
        line["tail"] = log.read_text(errors="replace").splitlines()[-TAIL:]
    return line


def _be(name: str, bench: Bench, log: Path, result: Path) -> None:
    """Be the process of a stage. Ends it without the clean-up of libraries, which may hang after a
    failure.
    """
    os.setsid()
    send_output(log)
    told: Figures
    try:
        _check_device(bench)
        told = {"ok": True, "figures": STAGES[name].run(bench)}
    except Skip as reason:
        told = {"skipped": str(reason)}
    except Beyond as error:
        told = {"error": str(error), "figures": error.figures}
    except BaseException as error:
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[-1][:500]}
    with suppress(Exception):  # a broken GPU can't be asked
        told["machine"] = machine()
    whole = result.with_suffix(".part")
    whole.write_text(json.dumps(told, default=str))
    whole.rename(result)
    os._exit(0)


def _check_device(bench: Bench) -> None:
    if bench.dry:
        return
    import torch

    if not torch.cuda.is_available():
        raise Skip("there is no CUDA device; --dry-run uses the CPU")


def _keep(archive: Path, here: Path, name: str) -> None:
    """Add a stage's log and small files to the archive, while there is room."""
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as target:
        for file in (here / "log.txt", *sorted((here / "kept").iterdir())):
            used = archive.stat().st_size if archive.exists() else 0
            if file.exists() and used + file.stat().st_size <= DETAILS_BYTES:
                target.write(file, f"{name}/{file.name}")


if __name__ == "__main__":
    main()
