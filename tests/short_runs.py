"""Folders of runs of a few records, written one by one."""

import json

from torchtitan.tools.reports import collect as report

BEGAN = 1_700_000_000.0


def record(step, **more):
    own = {
        "step": step,
        "loss": 10 - step / 10**5,
        "lr": 0.001,
        "tokens": step * 1000,
        "tokens_per_second": 500.0,
    }
    return own | {"tflops": 3.0, "mfu": None, "time": BEGAN + 60 + step} | more


def write(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


def write_run(folder, records, starts=None, config="[training]\nsteps = 100\n"):
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "metrics.jsonl", records)
    starts = (
        [{"time": BEGAN, "last_seen": BEGAN + 100, "step": 10, "end": "completed"}]
        if starts is None
        else starts
    )
    (folder / "run.json").write_text(
        json.dumps({"starts": starts, "goodput": {"percent": 90.0, "seconds": {}}})
    )
    (folder / "config.toml").write_text(config)
    return folder


def collected(folder, **options):
    (run,) = report.collect([folder], **options)["runs"]
    json.dumps(run, allow_nan=False)
    return run
