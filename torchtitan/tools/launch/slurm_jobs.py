"""Slurm jobs: submitting them, listing them by squeue and sacct, showing their logs."""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output
from torchtitan.utils.formats import read_json_object
from torchtitan.utils.wording import aligned, plural, printable

RECORD = "job.json"
_TIMEOUT = 60
_JOB = re.compile("([0-9]{1,18})(?:_([0-9]{1,18}))?")
_QUEUED = "%i|%T|%M|%l|%N|%r|%j"
"""squeue's codes of `JobEntry`'s fields."""
_PATTERNS = {"%": "%", "j": r"(\d+)", "A": r"(\d+)", "a": r"\d+"}
"""Slurm's patterns in the name of a log, as regular expressions."""
_ENDED = "JobID,State,Elapsed,Timelimit,NodeList,ExitCode,JobName"


@dataclass(frozen=True)
class JobRecord:
    """Record that `torchtitan submit` writes to the folder of the runs."""

    name: str
    """The job's name."""
    log: str
    """File of the output, with Slurm's `%` patterns."""
    runs: list[str]
    """Names of an array's runs, in the order of its tasks; empty for one job."""
    jobs: list[int] = field(default_factory=list)
    """Numbers of submitted jobs, the newest last."""

    def encode(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    def run(self, task: str | None) -> str:
        """The name of a task's run."""
        number = int(task) if task else -1
        return self.runs[number] if 0 <= number < len(self.runs) else ""

    def known(self) -> list[int]:
        """Numbers of submitted jobs, the newest last; with those by hand that left a log."""
        folder, _, name = self.log.rpartition("/")
        folder = folder.replace("%%", "%")
        pattern = _filled(re.escape(name), _PATTERNS | {"x": re.escape(self.name)})
        files = os.listdir(folder) if os.path.isdir(folder) else []
        matches = [re.fullmatch(pattern, file) for file in files]
        return sorted({*self.jobs, *(int(match[1]) for match in matches if match)})

    def logs(self, job: int, task: str | None = None) -> list[Path]:
        """Log files of a job, or of one of its tasks."""
        tasks = [task] if task else [str(i) for i in range(len(self.runs))] or [""]
        values = {"%": "%", "x": self.name, "j": str(job), "A": str(job)}
        return [Path(_filled(self.log, values | {"a": task})) for task in tasks]


def _filled(log: str, values: Mapping[str, str]) -> str:
    """The name of a log with values for Slurm's patterns in it."""
    return re.sub("%([%xjAa])", lambda match: values[match[1]], log)


@dataclass(frozen=True)
class JobEntry:
    """A job, or a task of an array, as the scheduler describes it."""

    job: str
    state: str
    elapsed: str
    limit: str
    nodes: str
    why: str
    """Reason why the job waits, or its exit code and signal."""
    name: str


def read_record(folder: Path) -> JobRecord:
    """
    Raises:
        UserError: the folder has no record, or a damaged one.
    """
    try:
        return TypeAdapter(JobRecord).validate_python(read_json_object(folder / RECORD))
    except (OSError, ValueError) as error:
        problem = f"{RECORD} is damaged" if isinstance(error, ValidationError) else error
        raise UserError(
            f"{folder} is not the folder of a submitted grid or job: {problem}; give the number "
            "of a job"
        ) from None


def submit(script: Path, record: JobRecord, folder: Path) -> None:
    """Submit a job and add its number to `folder`'s record.

    Raises:
        UserError: there is no Slurm here, or it refuses the job.
    """
    answer = _query(
        ["sbatch", "--parsable", str(script)],
        f"--submit: submit {script} on a machine that has Slurm",
    )
    match = re.match(r"\d+", answer)
    if match is None:
        raise UserError(f"--submit: sbatch answered {answer[:200]!r} instead of a job's number")
    print(f"Submitted job {match[0]}; `torchtitan jobs {folder}` shows its state", flush=True)
    jobs = [*record.jobs, int(match[0])]
    write_output({folder / RECORD: replace(record, jobs=jobs).encode()})


def submitted(folder: Path) -> list[int]:
    """Numbers of the jobs in a folder's record; empty without a record."""
    try:
        return read_record(folder).jobs
    except UserError:
        return []


def _query(command: Sequence[str], without: str) -> str:
    """Run a command of Slurm and return its output.

    Args:
        without: advice if there is no such command; may be empty.

    Raises:
        UserError: there is no such command, or it fails.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT
        )
    except FileNotFoundError:
        advice = f"; {without}" if without else ""
        raise UserError(f"this machine has no {command[0]}{advice}") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command[0]} did not answer within {_TIMEOUT} s; try again later"
        ) from None
    if done.returncode:
        raise UserError(
            f"{command[0]}: {done.stderr.strip()[:500] or f'exit status {done.returncode}'}"
        )
    return done.stdout.strip()


# ---- state


def find_jobs(target: str | None) -> tuple[list[int], str | None, JobRecord | None]:
    """Numbers of jobs, task and record for a number (`123`, `123_4`) or folder; all for None.

    Raises:
        UserError: the folder has no record.
    """
    if target is None:
        return [], None, None
    if match := _JOB.fullmatch(target):
        return [int(match[1])], match[2], None
    record = read_record(Path(target))
    return record.known(), None, record


def list_jobs(
    jobs: Sequence[int], task: str | None, record: JobRecord | None
) -> tuple[list[JobEntry], str | None]:
    """These jobs, or all unfinished jobs of the user, and a note if the list may be incomplete.

    A job that was submitted by hand from a record's script is found by its name, until it ends.

    Raises:
        UserError: there is no Slurm here.
    """
    answer = _query(
        ["squeue", "--noheader", "--array", "--me", "-o", _QUEUED],
        "ask on a machine of the cluster",
    )
    queued = _entries(answer)
    numbers = {str(job) for job in jobs}
    if numbers:
        queued = [entry for entry in queued if entry.job.partition("_")[0] in numbers]
    elif record:
        queued = [entry for entry in queued if entry.name == record.name]
        numbers = {entry.job.partition("_")[0] for entry in queued}
    ended, note = _ended(numbers) if numbers else ([], None)
    running = {entry.job for entry in queued}
    listed = queued + [
        entry for entry in ended if entry.job not in running and "[" not in entry.job
    ]
    if task:
        listed = [entry for entry in listed if entry.job.partition("_")[2] == task]
    return sorted(listed, key=lambda entry: [int(n) for n in re.findall(r"\d+", entry.job)]), note


def _ended(jobs: set[str]) -> tuple[list[JobEntry], str | None]:
    """Jobs in Slurm's accounting, and a note if the cluster has none."""
    command = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={','.join(sorted(jobs))}",
        f"--format={_ENDED}",
    ]
    try:
        answer = _query(command, "")
    except UserError as error:
        return [], f"jobs that have ended are not shown, since there is no accounting ({error})"
    return _entries(answer), None


def _entries(answer: str) -> list[JobEntry]:
    """The jobs in an answer of squeue or sacct. A name may hold the separator."""
    lines = [line.split("|", 6) for line in answer.splitlines()]
    return [
        JobEntry(*(printable(text.strip()) for text in fields))
        for fields in lines
        if len(fields) == 7
    ]


def held_jobs_advice(entries: Sequence[JobEntry]) -> str | None:
    """Advice for jobs that Slurm holds because a node could not start them."""
    jobs = [entry.job for entry in entries if "launch failed requeued held" in entry.why]
    if not jobs:
        return None
    return (
        "a node failed to start what is held, and is drained: `sinfo -R` names it. To start "
        f"again: scontrol release {' '.join(jobs)}"
    )


def state_table(entries: Sequence[JobEntry], record: JobRecord | None) -> str:
    """A table of the jobs, and the number of jobs in each state."""
    runs = bool(record and record.runs)
    rows = [["job", "run" if runs else "name", "state", "elapsed", "limit", "nodes", "why"]]
    for entry in entries:
        name = record.run(entry.job.partition("_")[2]) if record and runs else entry.name
        why = "" if entry.why in ("None", "0:0") else entry.why
        rows.append(
            [entry.job, name, entry.state.lower(), entry.elapsed, entry.limit, entry.nodes, why]
        )
    states = Counter(entry.state.partition(" ")[0].lower() for entry in entries)
    total = ", ".join(f"{number:,} {state}" for state, number in states.most_common())
    return f"{aligned(rows)}\n{plural(len(entries), 'job')}: {total}"


# ---- logs


def log_files(jobs: Sequence[int], task: str | None, record: JobRecord | None) -> list[Path]:
    """Existing logs of the newest of these jobs.

    Raises:
        UserError: there is no log.
    """
    if not jobs:
        raise UserError(
            "--logs: name a job, or the folder of one that `torchtitan submit --submit` submitted"
        )
    job = jobs[-1]
    if record:
        files = record.logs(job, task)
    else:
        name = f"{job}_{task}" if task else str(job)
        answer = _query(["scontrol", "show", "job", name], "ask on a machine of the cluster")
        files = [
            Path(path) for path in dict.fromkeys(re.findall(r"^\s*StdOut=(.+)$", answer, re.M))
        ]
    if existing := [file for file in files if file.is_file()]:
        return existing
    raise UserError(
        f"--logs: job {job} has no log yet (looked for {files[0] if files else 'StdOut'})"
    )


def show_logs(files: Sequence[Path], lines: int, *, follow: bool) -> int:
    """Print the ends of logs; with `follow`, keep printing. Returns the exit status."""
    command = [
        "tail",
        f"--lines={lines}",
        *(["--follow=name", "--retry"] if follow else []),
        "--",
        *map(str, files),
    ]
    if follow:
        os.execvp(command[0], command)
    return subprocess.run(command).returncode
