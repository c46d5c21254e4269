"""Stand-ins for Slurm's programs and the launcher, which record how they are called."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = ROOT / "train_configs/debug_model.toml"

SRUN = """#!/usr/bin/env bash
# Slurm's own would start the task on every node, and pass signals on to it.
[[ $1 == --overlap ]] && { echo "$*" >>"$CALLS/watch"; exit; }
while [[ ${1:-} == --* ]]; do echo "$1" >>"$CALLS/srun"; shift; done
trap 'kill -USR1 $!' USR1
"$@" &
while kill -0 $! 2>/dev/null; do wait $!; status=$?; done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >>"$CALLS/scontrol"
case $1 in
    show) [[ $2 == job ]] && echo "JobId=$3 JobState=$STATE" || printf 'node%s\\n' 7 8 9 ;;
esac
"""
TASK = """#!/usr/bin/env python3
# Stands for run_train.sh: says how it was started, and ends as the launcher does.
import json, os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(int(os.environ.get("WHEN_STOPPED", "75"))))
names = ("CONFIG_FILE", "NNODES", "RDZV_ENDPOINT", "RDZV_SECRET", "NGPU")
with open(os.environ["CALLS"] + "/task", "w") as file:
    json.dump({"argv": sys.argv[1:], **{n: os.environ.get(n) for n in names}}, file)
time.sleep(float(os.environ["SECONDS_TO_RUN"]))
sys.exit(int(os.environ.get("STATUS", "0")))
"""


def job_runner(tmp_path):
    """Yields a function that runs a script as a job on three nodes and returns its process."""
    root = tmp_path / "project with space"
    bin_folder = tmp_path / "bin"
    for path, text in {
        root / "run_train.sh": TASK,
        root / "scripts/setup.sh": "#!/bin/sh\necho set up >>$CALLS/setup\n",
        bin_folder / "srun": SRUN,
        bin_folder / "scontrol": SCONTROL,
        bin_folder / "sbatch": '#!/bin/sh\necho "$@" >>$CALLS/sbatch; echo "77;cluster"\n',
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "calls").mkdir()
    env = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "node[7-9]",
        "SLURM_SUBMIT_DIR": str(root),
        "STATE": "RUNNING",
    }
    processes = []

    def run(script, *arguments, seconds=0, **more):
        command = ["bash", str(script), *arguments]
        processes.append(
            subprocess.Popen(
                command,
                env=env | {"SECONDS_TO_RUN": str(seconds)} | more,
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return processes[-1]

    run.env = env
    run.root = root
    yield run
    for process in processes:
        process.kill()


def calls(folder, name):
    path = folder / "calls" / name
    return path.read_text().splitlines() if path.exists() else []
