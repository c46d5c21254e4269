"""Grids: many runs of one configuration, their overrides and their names."""

import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import tomli

from torchtitan.config.load.command_line import config_flags, flag_text
from torchtitan.config.load.compat import current_key
from torchtitan.config.load.toml_file import flatten, size_problem
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.files import read_regular, text_of
from torchtitan.utils.limits import GRID_FILE_BYTES
from torchtitan.utils.signals import INTERRUPTED, heeded
from torchtitan.utils.storage import is_url, storage_path
from torchtitan.utils.wording import brief, plural

MOST_RUNS = 1000
"""Maximum number of runs, allowed by Slurm's default `MaxArraySize`."""
_LONGEST_VALUE = 40
_LONGEST_NAME = 120
_DUMP = "job.dump_folder"
_CHECKPOINTS = "checkpoint.folder"


@dataclass(frozen=True)
class GridRun:
    """One run of a grid."""

    name: str
    """Name of the run and its folder."""
    flags: tuple[str, ...]
    """Flags that override the shared configuration."""


Flags = dict[str, str]
"""Text after `--key=`, by dotted key."""
NamedFlags = tuple[str | None, Flags]
"""The name of a run, if it has one, and its flags."""


# ---- what varies


def parse_axis(text: str) -> list[NamedFlags]:
    """The values of `section.key=a,b,c`, or of `section.key=[...]`, a list of TOML.

    Raises:
        ConfigError: it is neither.
    """
    key, equals, values = text.partition("=")
    key = _current_key(key.strip().removeprefix("--").replace("-", "_"))
    if not equals or "." not in key:
        raise ConfigError([f"--grid: {brief(text)} is not section.key=value,value,..."])
    words = (
        _toml_values(key, values)
        if values.startswith("[")
        else [word.strip() for word in values.split(",")]
    )
    if "" in words or len(set(words)) < len(words):
        raise ConfigError(
            [f"--grid: {key} has {'an empty value' if '' in words else 'the same value twice'}"]
        )
    return [(None, {key: word}) for word in words]


def _toml_values(key: str, text: str) -> list[str]:
    try:
        values = tomli.loads(f"values = {text}")["values"]
    except (ValueError, RecursionError):
        raise ConfigError(
            [f"--grid: {key}: {brief(text)} is not a list of TOML; quote it for the shell"]
        ) from None
    return [flag_text(key, value) for value in values]


def _current_key(key: str) -> str:
    """The current spelling of a key."""
    return current_key(key) or key


def read_runs(path: Path) -> list[NamedFlags]:
    """Read the runs of a file: lines of flags, or `[[runs]]` tables with an optional `name`.

    Raises:
        ConfigError: the file can't be read, or has another form.
    """
    try:
        text = text_of(read_regular(path, GRID_FILE_BYTES, links=True))
        if path.suffix == ".toml":
            return _runs_from_tables(path, tomli.loads(text))
    except OSError as error:
        raise ConfigError([f"--runs: can't read {path}: {error.strerror or error}"]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"--runs: {path}: {error}"]) from None
    return _runs_from_lines(path, text)


def _runs_from_lines(path: Path, text: str) -> list[NamedFlags]:
    runs: list[NamedFlags] = []
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        words: list[str] = []
        line_problems: list[str] = []
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            line_problems.append(str(error).lower())
        flags = {
            _current_key(key): flag_text(key, setting.value)
            for key, setting in config_flags(words, line_problems)
        }
        problems += [f"--runs: {path}:{number}: {problem}" for problem in line_problems]
        runs += [(None, flags)] if words else []
    if problems or not runs:
        raise ConfigError(problems or [f"--runs: {path} has no line with flags"])
    return runs


def _runs_from_tables(path: Path, tables: dict[str, Any]) -> list[NamedFlags]:
    entries = tables.get("runs")
    if (
        set(tables) != {"runs"}
        or not isinstance(entries, list)
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise ConfigError(
            [
                f"--runs: {path} must hold [[runs]] tables, with keys as section.key = "
                "value, and no others"
            ]
        )
    if problem := size_problem(tables):
        raise ConfigError([f"--runs: {path}: {problem}"])
    runs: list[NamedFlags] = []
    for entry in entries:
        name = entry.pop("name", None)
        if name is not None and not isinstance(name, str):
            raise ConfigError([f"--runs: {path}: name: got {brief(name)}, must be a string"])
        settings = flatten(entry, names=r"\w+")  # the names that a flag can hold
        flags = {_current_key(key): flag_text(key, value) for key, value in settings}
        runs.append((name, flags))
    if not runs:
        raise ConfigError([f"--runs: {path} has no [[runs]]"])
    return runs


# ---- runs


def make_runs(axes: Sequence[str], file: Path | None) -> list[GridRun]:
    """Every combination of the values of `axes` with the runs of `file`.

    Raises:
        ConfigError: an axis can't be read, a key varies twice, or there are too many runs.
    """
    choices = [read_runs(file)] if file else []
    choices += map(parse_axis, axes)
    keys = Counter(
        key for choice in choices for key in set(itertools.chain(*(flags for _, flags in choice)))
    )
    if twice := sorted(key for key, number in keys.items() if number > 1):
        raise ConfigError([f"--grid: {twice[0]} is varied twice; give all its values at once"])
    for key in (_DUMP, "job.config_file"):
        if key in keys:
            raise ConfigError([f"--grid: {key} can't vary; each run gets a folder below --folder"])
    number = math.prod(map(len, choices))
    if number > MOST_RUNS:
        raise ConfigError(
            [
                f"--grid: {number:,} runs are more than {MOST_RUNS:,}; give fewer values, or "
                "several grids"
            ]
        )
    combined = [_merged(combination) for combination in itertools.product(*choices)]
    settings = [flags for _, flags in combined]
    for i, flags in enumerate(settings):
        if (first := settings.index(flags)) < i:
            raise ConfigError([f"--runs: runs {first + 1} and {i + 1} are the same"])
    return [
        GridRun(name, tuple(f"--{key}={value}" for key, value in flags.items()))
        for name, flags in zip(_names(combined), settings, strict=True)
    ]


def _merged(runs: Sequence[NamedFlags]) -> NamedFlags:
    flags: Flags = {}
    for _, run_flags in runs:
        flags |= run_flags
    return next((name for name, _ in runs if name), None), flags


def _names(runs: Sequence[NamedFlags]) -> list[str]:
    """A folder's name for each run: its name, and the keys that vary, as `lr=3e-4_seed=1`."""
    keys = list(dict.fromkeys(key for _, flags in runs for key in flags))
    by_name = {name: [flags for other, flags in runs if other == name] for name, _ in runs}
    short_keys = _short_keys(keys)
    names: list[str] = []
    for i, (name, flags) in enumerate(runs):
        varied = [key for key in flags if len({other.get(key) for other in by_name[name]}) > 1]
        words = [f"{short_keys[key]}={_safe_name(flags[key], _LONGEST_VALUE)}" for key in varied]
        words = [_safe_name(name, _LONGEST_VALUE), *words] if name else words
        folder = _safe_name("_".join(words), _LONGEST_NAME) or "base"
        while folder in names:
            folder = f"{folder}_{i}"
        names.append(folder)
    return names


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The shortest unique ending of each key, in whole sections."""
    names = {}
    for key in keys:
        sections = key.split(".")
        endings = (".".join(sections[-n:]) for n in range(1, len(sections) + 1))
        names[key] = next(
            end for end in endings if sum(f".{other}".endswith(f".{end}") for other in keys) == 1
        )
    return names


def _safe_name(text: str, longest: int) -> str:
    """`text` with only characters that are safe in file names and shells."""
    return re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-.")[:longest]


def flags_with_folder(run: GridRun, folder: Path, checkpoints: str) -> tuple[str, ...]:
    """The flags of a run, including those that set its own folders.

    Args:
        folder: folder of all runs.
        checkpoints: `checkpoint.folder` of the configuration. Runs would share one outside their
        folders.
    """
    flags = (*run.flags, f"--{_DUMP}={folder / run.name}")
    sets_checkpoints = any(flag.startswith(f"--{_CHECKPOINTS}=") for flag in run.flags)
    outside = is_url(checkpoints) or storage_path(checkpoints).is_absolute()
    shared = not sets_checkpoints and outside
    return (*flags, f"--{_CHECKPOINTS}={checkpoints.rstrip('/')}/{run.name}") if shared else flags


def group_problems(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """Distinct problems of several runs, each with the names of the runs that have it.

    Args:
        problems: problems by name of the run.
    """
    runs: dict[str, list[str]] = {}
    for run, run_problems in problems.items():
        for problem in run_problems:
            runs.setdefault(problem, []).append(run)
    return [
        f"run {first}: {problem}"
        if not others
        else f"runs {first} and {len(others)} more: {problem}"
        for problem, (first, *others) in runs.items()
    ]


# ---- on this machine


class _Runner:
    """Runs one command at a time, and passes signals that ask to stop on to it: it saves, and none
    follows.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self._run: subprocess.Popen[bytes] | None = None
        self._undelivered: int | None = None
        """A signal received before the next run was ready for it; sent to that run."""
        for number in heeded():
            signal.signal(number, self._handle)

    def status_of(self, command: Sequence[str]) -> int:
        """Run a command until it ends."""
        self._run = subprocess.Popen(command)
        if self._undelivered is not None:
            self._run.send_signal(self._undelivered)
        status = self._run.wait()
        self._run = None
        return status

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.stop_requested = True
        if number == signal.SIGINT:  # Ctrl-C reaches the run, too
            return
        if self._run:
            self._run.send_signal(number)
        else:
            self._undelivered = number


def run_in_turn(names: Sequence[str], commands: Sequence[Sequence[str]], folder: Path) -> int:
    """Run `torchtitan` with each command. One that fails doesn't stop the others.

    Args:
        folder: folder of all runs, for the last line.

    Returns:
        75 if asked to stop, 130 after a second Ctrl-C, 1 if a run failed, else 0.
    """
    runner = _Runner()
    failed = []
    for i, (name, words) in enumerate(zip(names, commands, strict=True), 1):
        print(f"\n== run {i} of {len(names)}: {name}", file=sys.stderr, flush=True)
        if runner.stop_requested:  # since the run before has ended
            print("Stopped before it; the same command resumes", file=sys.stderr)
            return os.EX_TEMPFAIL
        status = runner.status_of([sys.executable, "-m", "torchtitan", *words])
        if status == INTERRUPTED:
            print(
                f"Interrupted in run {i} of {len(names)}; the same command resumes", file=sys.stderr
            )
            return INTERRUPTED
        if runner.stop_requested or status == os.EX_TEMPFAIL:
            print(f"Stopped in run {i} of {len(names)}; the same command resumes", file=sys.stderr)
            return os.EX_TEMPFAIL
        if status:
            failed.append(f"{name} (status {status})")
    print(
        f"\n{plural(len(names), 'run')} done: `torchtitan runs {folder}` lists them",
        file=sys.stderr,
    )
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
