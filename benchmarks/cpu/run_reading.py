"""Time and memory to read runs of many steps.

    python benchmarks/cpu/run_reading.py [--records 1000000] [--runs 1000]

Writes them to a temporary folder, with a validation every 500 steps.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchtitan.config import load_config
from torchtitan.config.load.render import to_toml
from torchtitan.tools.reports import collect as report
from torchtitan.tools.reports.folder import Runs
from torchtitan.tools.reports.table import as_text, read_rows


def write_run(folder: Path, records: int, *, freq: int = 500) -> None:
    """A run of so many records, like one that trains."""
    folder.mkdir(parents=True)
    began = 1_700_000_000.0
    noise = random.Random(0)
    start = {
        "time": began,
        "last_seen": began + records,
        "resumed_step": 0,
        "step": records,
        "end": "completed",
    }
    about = {"ranks": 8, "layout": {"dp_shard": 8}, "devices": {"NVIDIA H100 80GB HBM3": 8}}
    (folder / "run.json").write_text(
        json.dumps({"format": 1, "goodput": {}, "starts": [start | about]})
    )
    flags = [f"--job.dump_folder={folder}", f"--training.steps={records}", "--validation.enable"]
    config = load_config([*flags, f"--validation.freq={freq}"]).config
    (folder / "config.toml").write_text(to_toml(config))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, records + 1):
            loss = 2 + 8 / step**0.5 + noise.gauss(0, 0.05)
            record = {
                "step": step,
                "loss": loss,
                "max_loss": loss + 0.1,
                "grad_norm": noise.random(),
                "lr": 3e-4,
                "tokens": step * 524288,
                "skipped_steps": 0,
                "tokens_per_second": 7800 + noise.gauss(0, 40),
                "tflops": 401.25,
                "mfu": 40.57,
                "memory_gib": 71.2,
                "memory_pct": 89.1,
                "data_loading_pct": 0.1,
                "step_time_s": 8.4,
                "time": began + step,
            }
            file.write(json.dumps(record) + "\n")
            if step % freq == 0:
                validation = {
                    "step": step,
                    "validation_loss": loss,
                    "validation_tokens": 10**6,
                    "time": began + step,
                }
                file.write(json.dumps(validation) + "\n")


def timed(name: str, action: Callable[[], object]) -> None:
    """Print how long an action takes the second time, and the process's peak memory."""
    action()
    began = time.perf_counter()
    used = time.process_time()
    action()
    seconds = time.perf_counter() - began
    used = time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name}: {seconds:.2f} s, of them {used:.2f} s of CPU time; peak memory of the "
        f"process {peak:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10**6)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "long")
        write_run(run, options.records)
        size = (run / "metrics.jsonl").stat().st_size
        print(f"{options.records:,} records, {size / 2**20:.0f} MiB")
        timed("collect", lambda: report.collect([run]))
        for i in range(options.runs):
            write_run(Path(folder, "many", str(i)), 200)
        many = Path(folder, "many")
        timed(f"table of {options.runs:,} runs", lambda: as_text(read_rows(list(Runs([many])))))
        timed(
            "with differences",
            lambda: as_text(read_rows(list(Runs([many])), with_differences=True)),
        )


if __name__ == "__main__":
    main()
