"""A week in the life of a run, in minutes: preemptions, faults, a rewind, other layouts, a second
stage of data.

    python -m tests.faults.week outputs/week --steps-per-day 100

One event a day, and a start after it if the event ended the run. `torchtitan watch outputs/week`
shows it meanwhile; the pictures of `docs/guides/monitoring.md` are made from what it leaves behind.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.runs import EXPERTS, TINY

ROOT = Path(__file__).parents[2]
MODEL = [*EXPERTS[1:], *(f"--model.overrides.{key}={value}" for key, value in TINY.items())]
TENSOR_PARALLEL = ["--parallelism.tensor_parallel_degree=2"]
SPIKE = """
from torchtitan.config.registry import callbacks
from torchtitan.train.callbacks import Callback

@callbacks.register("spike")
class Spike(Callback):
    hook = None
    done = False

    def on_start(self, run):
        if run.progress.step + 1 == {step} and not self.done:
            self.done = True
            self.hook = run.models[-1].norm.register_forward_hook(lambda module, args, output: output * 300)

    def after_step(self, run, result):
        self.end()
        self.on_start(run)

    def on_rewind(self, run, step):
        self.end()

    def end(self):
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
"""  # noqa: E501
CONFIG = """
[job]
description = "a week"
dump_folder = "{dump}"
[training]
steps = {steps}
seq_len = 64
global_batch_size = 8
local_batch_size = 4
mixed_precision_param = "float32"
callbacks = ["spike"]
[[training.sources]]
name = "code"
dataset = "demo"
weight = 0.8
[[training.sources]]
name = "prose"
dataset_path = "{root}/docs/*.md"
weight = 0.2
[[training.stages]]
from_step = {stage}
weights = {{code = 0.3, prose = 0.7}}
lr_scale = 0.5
[sampling]
prompts = ["def main(", "Each rank"]
freq = 50
max_new_tokens = 24
[activation_checkpoint]
mode = "none"
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 20
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = {interval}
keep_latest_k = 3
async_mode = "async"
[validation]
enable = true
dataset = "demo_validation"
seq_len = 64
freq = {interval}
steps = 4
[guard]
policy = "rewind"
window = 16
warmup_steps = 8
loss_threshold = 20.0
grad_norm_threshold = 0.0
[experimental]
custom_import = "spike"
"""


class Week:
    """The run in `folder`. `happened` is called with the kind of each event once it is on
    record.
    """

    def __init__(self, folder: Path, steps_per_day: int, happened: Callable[[str], object]):
        self.folder = folder
        self.dump = folder / "run"
        self.day = steps_per_day
        self.happened = happened
        self.awaited: Counter[str] = Counter()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spike.py").write_text(SPIKE.format(step=self.day * 5 // 2))
        places = {"dump": self.dump, "root": ROOT}
        steps = {
            "steps": 7 * self.day,
            "stage": 4 * self.day + 1,
            "interval": max(self.day // 4, 1),
        }
        (folder / "week.toml").write_text(CONFIG.format(**places, **steps))

    def run(self) -> None:
        """Seven days, to the last step."""
        process = self.start(2)
        self.reach(1, process)
        self.stop(process)
        process = self.start(2)
        self.await_event("resumed", process)
        self.reach(2, process)
        ranks(process)[1].kill()
        self.await_event("resumed", process)  # by the launcher
        self.await_event("rewound", process)
        self.reach(3, process)
        self.stop(process)
        process = self.start(2, *TENSOR_PARALLEL)
        self.await_event("resumed", process)
        self.await_event("stage", process)
        self.reach(5, process)
        for victim in (*ranks(process), process):
            victim.kill()
        process.wait()
        process = self.start(1)
        self.await_event("resumed", process)
        self.reach(6, process)
        self.stop(process)
        process = self.start(2)
        self.await_event("finished", process)
        assert process.wait() == 0, self.log()

    # ---- what happens to it

    def start(self, world: int, *layout: str) -> subprocess.Popen:
        command = [
            "-m",
            "torchtitan",
            "train",
            str(self.folder / "week.toml"),
            f"--nproc-per-node={world}",
        ]
        overrides = ["--model.name=qwen3_moe", *MODEL, *layout]
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, *command, "--max-restarts=1", *overrides],
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{self.folder}", "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    def stop(self, process: subprocess.Popen) -> None:
        """Ask it to save and end, as Slurm does."""
        process.send_signal(signal.SIGUSR1)
        assert process.wait(120) == os.EX_TEMPFAIL, self.log()
        self.await_event("preempted", process)

    def reach(self, day: int, process: subprocess.Popen) -> None:
        self.wait(f"day {day}", lambda: self.step() >= day * self.day, process)

    def await_event(self, kind: str, process: subprocess.Popen) -> None:
        """Until there is one more event of this kind than were awaited."""
        self.awaited[kind] += 1
        wanted = self.awaited[kind]
        self.wait(kind, lambda: self.kinds()[kind] >= wanted, process)
        self.happened(kind)

    def wait(self, what: str, condition: Callable[[], bool], process: subprocess.Popen) -> None:
        deadline = time.monotonic() + 600
        while not condition():
            assert process.poll() is None or condition(), f"{what}: not reached\n{self.log()}"
            assert time.monotonic() < deadline, f"{what}: not reached\n{self.log()}"
            time.sleep(0.1)

    # ---- what it leaves behind

    def step(self) -> int:
        """The last step on record."""
        lines = self.lines("metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def kinds(self) -> Counter[str]:
        return Counter(event["kind"] for event in self.lines("events.jsonl"))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file that is being written."""
        path = self.dump / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def log(self) -> str:
        return (self.folder / "log").read_text()[-4000:]


def ranks(launcher: subprocess.Popen) -> list[psutil.Process]:
    return [p for p in psutil.Process(launcher.pid).children() if "torchtitan.train" in p.cmdline()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps-per-day", type=int, default=100)
    options = parser.parse_args()
    began = time.monotonic()

    def happened(kind: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {kind}", flush=True)

    Week(options.folder.resolve(), options.steps_per_day, happened).run()


if __name__ == "__main__":
    main()
