"""Train while a seeded script makes faults, and see that the run is the one without them.

    python -m tests.faults.soak --faults 25

Ranks are killed, stopped for seconds and continued; the run is asked to stop; the launcher is
killed and a shard of the newest checkpoint damaged. Every start has another number of ranks and
another layout. In the end loss curve and weights must be those of one process that nobody
disturbed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp

from tests.rounding import assert_trained_alike
from tests.runs import arguments, read_metrics
from torchtitan.checkpoint.commit import committed_steps

ROOT = Path(__file__).parents[2]
KINDS = ("kill", "pause", "preempt", "damage")
LAYOUTS = [
    (1, []),
    (2, []),
    (2, ["--parallelism.tensor_parallel_degree=2"]),
    (
        2,
        [
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.module_fqns_per_model_part=layers.1",
            "--training.local_batch_size=2",
        ],
    ),
    (3, []),
    (4, []),
    (
        4,
        [
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=2",
        ],
    ),
]
LEARNING_RATE = 1e-3
BATCH = 12
"""Rows of a step: every number of ranks divides it."""


def command(folder: Path, steps: int, *extra: str) -> list[str]:
    """Arguments of the run. The learning rate is low: rounding, which differs by layout, must not
    grow over the run.
    """
    argv = arguments(folder, steps=steps, global_batch=BATCH, local_batch=1)
    return [*argv, f"--optimizer.lr={LEARNING_RATE}", "--lr_scheduler.warmup_steps=20", *extra]


@dataclass
class Soak:
    folder: Path
    steps: int
    faults: list[str]
    seed: int
    patience: float = 300.0
    """Seconds without a new step that are taken for a hang."""
    starts: int = 0
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.dump = self.folder / "out"
        self.log = self.folder / "log"

    def run(self) -> None:
        """Until the last step; asserts how each start ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        while self.step() < self.steps:
            self.start()
        assert not self.faults, f"finished before {self.faults} were made: take more steps"

    def step(self) -> int:
        """The last step on record."""
        try:
            return read_metrics(self.dump)[-1]["step"]
        except (OSError, LookupError, ValueError):
            return 0

    def start(self) -> None:
        self.starts += 1
        world, layout = self.random.choice(LAYOUTS)
        mode = self.random.choice(["disabled", "async", "async_with_pinned_mem"])
        save = ["--checkpoint.enable", "--checkpoint.interval=10", "--checkpoint.keep_latest_k=3"]
        watch = ["--guard.weight_hash_freq=10", f"--checkpoint.async_mode={mode}"]
        restarts = self.random.choice([0, 1])
        launch = [
            "-m",
            "torchtitan",
            "train",
            f"--nproc-per-node={world}",
            f"--max-restarts={restarts}",
            "--",
        ]
        self.say(
            f"start {self.starts}: {world} ranks {' '.join(layout)} {mode}, {restarts} restarts"
        )
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    *launch,
                    *command(self.folder, self.steps, *save, *watch, *layout),
                ],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        try:
            expected = {0}
            while process.poll() is None:
                if self.let_it_step(process) and self.faults:
                    expected |= self.make(self.faults.pop(0), process)
            assert process.returncode in expected, (
                f"exit {process.returncode}, not {expected}\n{self.tail()}"
            )
            if self.made and self.made[-1] == "damage" and process.returncode:
                self.flip_a_bit()
        finally:
            if process.poll() is None:
                process.kill()

    def let_it_step(self, process: subprocess.Popen) -> bool:
        """Wait for some more steps; whether they came before the end."""
        before = self.step()
        seen = self.step()
        since = time.monotonic()
        # Spread over the steps that are left, and never so that some remain to be made at the end.
        wanted = before + self.random.randint(
            2, max(2, 2 * (self.steps - before) // (len(self.faults) + 2))
        )
        while process.poll() is None:
            now = self.step()
            if now != seen:
                seen = now
                since = time.monotonic()
            if now >= wanted or now < before:  # it went back: a new start is under way
                return now >= wanted
            assert time.monotonic() - since < self.patience, (
                f"no step for {self.patience} s\n{self.tail()}"
            )
            time.sleep(0.05)
        return False

    def make(self, kind: str, process: subprocess.Popen) -> set[int]:
        """Make a fault; statuses that the launcher may then end with."""
        launcher = psutil.Process(process.pid)
        ranks = [
            p
            for p in launcher.children(recursive=True)
            if "torchtitan.train" in " ".join(p.cmdline())
        ]
        victim = self.random.choice(ranks or [launcher])
        self.made.append(kind)
        self.say(f"step {self.step()}: {kind}")
        if kind == "kill":
            victim.kill()
            return {1, 0, -signal.SIGKILL}
        if kind == "pause":
            victim.suspend()
            time.sleep(self.random.uniform(0.5, 3.0))
            victim.resume()
            return set()
        if kind == "preempt":
            self.random.choice([victim, launcher]).terminate()
            return {75}
        launcher.kill()
        process.wait()
        psutil.wait_procs(ranks, timeout=20)
        assert not any(rank.is_running() for rank in ranks), "a rank trains on as an orphan"
        return {-signal.SIGKILL}

    def flip_a_bit(self) -> None:
        """In the newest checkpoint, if there is one before it."""
        checkpoints = self.dump / "checkpoint"
        steps = committed_steps(checkpoints)
        if len(steps) > 1:
            shard = max(
                (checkpoints / f"step-{steps[-1]}").glob("*.distcp"), key=lambda p: p.stat().st_size
            )
            with shard.open("r+b") as file:
                place = self.random.randrange(
                    shard.stat().st_size
                )  # the same one again would restore it
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 1]))
            self.say(f"damaged {shard.relative_to(self.dump)}")

    def say(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(f"---- {text}\n")
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def tail(self) -> str:
        return self.log.read_text()[-4000:]


def final_weights(dump: Path, steps: int) -> dict[str, torch.Tensor]:
    folder = dump / f"checkpoint/step-{steps}"
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(meta.size) for name, meta in stored.items() if name.startswith("model.")
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def undisturbed(folder: Path, steps: int) -> Path:
    """The run of one process, without faults; its dump folder."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = command(folder, steps, "--checkpoint.enable", f"--checkpoint.interval={steps}")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "torchtitan.train", *argv],
        check=True,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    return folder / "out"


def assert_same(dump: Path, reference: Path, steps: int) -> tuple[float, float]:
    """The largest relative difference of the losses, and the largest difference of the weights."""
    own = read_metrics(dump)
    expected = read_metrics(reference)
    assert [r["step"] for r in own] == [r["step"] for r in expected] == list(range(1, steps + 1))
    assert [r["tokens"] for r in own] == [r["tokens"] for r in expected]
    loss = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(own, expected, strict=True))
    theirs = final_weights(reference, steps)
    ours = final_weights(dump, steps)
    weight = max((value - theirs[name]).abs().max().item() for name, value in ours.items())
    assert loss < 1e-4, f"a batch was lost or seen twice: losses differ by {loss:.1e}"
    for name, value in ours.items():
        assert_trained_alike(value, theirs[name], LEARNING_RATE, steps, name)
    return loss, weight


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=25)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    faults = random.Random(options.seed).choices(KINDS, k=options.faults)
    began = time.monotonic()
    soak = Soak(folder / "soak", options.steps, faults, options.seed)
    soak.run()
    minutes = (time.monotonic() - began) / 60
    loss, weight = assert_same(
        soak.dump, undisturbed(folder / "reference", options.steps), options.steps
    )
    made = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(soak.made).items()))
    print(f"{options.steps} steps in {minutes:.1f} minutes, {soak.starts} starts, faults: {made}")
    print(
        f"largest differences to an undisturbed run: loss {loss:.1e} (relative), weight "
        f"{weight:.1e}"
    )


if __name__ == "__main__":
    main()
