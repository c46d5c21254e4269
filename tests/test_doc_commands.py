"""Commands of the documents run and print what the pages say, or are right as far as this machine
can tell.
"""

import contextlib
import math
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doc_blocks import CHECKED, PAGES, ROOT, RUN, Block, workspace
from tests.doc_commands import check_command, options_of, parser_of, script_options
from tests.processes import run_module
from torchtitan.utils.errors import UserError

# ---- ```bash: commands run, and print what the page says

SMALL = (
    "--training.seq_len 32 --training.global_batch_size 8 --validation.steps 1 --metrics.log_freq 1"
)
START = {"README.md", *(page.name for page in (ROOT / "docs/start").glob("*.md"))}
"""Pages whose commands run in the suite; those of the others run in the longest tier."""
CHAIN = re.compile(r"train debug_model|outputs/debug_model")
"""Pages that work on this run build on what earlier ones left behind; the others run beside them.
"""


def shrink(line: str) -> str:
    """The command as written, but with a twentieth of its steps, and smaller ones."""
    if "torchtitan train" not in line:
        return line
    steps = re.search(r"--training\.steps (\d+)", line)
    line = line.replace(steps[0], "") if steps else line
    return f"{line} --training.steps {max(2, int(steps[1] if steps else 100) // 20)} {SMALL}"


@dataclass
class Ran:
    """The commands that ran."""

    whole: bool
    """All pages, as written; otherwise the first ones, shrunk."""
    results: dict[str, tuple[int, str]]
    """Command to exit status and output."""

    @property
    def blocks(self) -> list[Block]:
        return [block for block in RUN if self.whole or block.page in START]

    def skips(self, line: str) -> bool:
        """Whether a command is left to the longest tier: parity, and starts under layouts that
        the support matrix proves. A start of two ranks that resumes stays. There, the speedrun is
        left to its own test.
        """
        if self.whole and "speedrun" in line:
            return True
        several = "torchtitan train" in line and "--nproc-per-node" in line
        layout = several and "--parallelism." in line
        return not self.whole and (layout or "torchtitan parity" in line)


@pytest.fixture(scope="module", params=["small", pytest.param("whole", marks=pytest.mark.slow)])
def ran(request, tmp_path_factory) -> Ran:
    """The commands of some pages, two at a time: most use one core."""
    whole = request.param == "whole"
    folder = workspace(tmp_path_factory.mktemp("docs"))
    bin = tmp_path_factory.mktemp("bin")
    (bin / "torchtitan").write_text(f'#!/bin/sh\nexec {sys.executable} -m torchtitan "$@"\n')
    (bin / "torchtitan").chmod(0o755)
    env = os.environ | {
        "PATH": f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{folder}",
    }
    ran = Ran(whole, {})

    def run(blocks: list[Block]) -> None:
        for line in (line for block in blocks for line in block.lines):
            if line not in ran.results and not ran.skips(line):
                ran.results[line] = run_command(line if whole else shrink(line), folder, env)

    chained = {block.page for block in ran.blocks if CHAIN.search(block.text)}
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                run,
                (
                    [block for block in ran.blocks if (block.page in chained) is first]
                    for first in (True, False)
                ),
            )
        )
    return ran


ALONE = [
    ["torchtitan", name]
    for name in ("train", "plan", "config", "ckpt", "generate", "submit", "report")
]


def run_command(line: str, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of a command. Those that start no processes are forked from a server
    that has torch.
    """
    words = shlex.split(line.removeprefix("PYTHONPATH=. "))
    alone = words[:2] in ALONE and "--nproc-per-node" not in words
    if not alone or set(line) & set("|&;<>$"):
        done = subprocess.run(
            line,
            shell=True,
            cwd=folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout
    done = run_module(*words, cwd=folder, merged=True)
    return done.returncode, done.stdout


MASKS = {
    r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b": "TIME",
    r"ETA (?:unknown|[\d. hmins]+\([\dTIME :-]+\))": "ETA #",
    r"[\d.,]+(?= (?:tok/s|TFLOP/s|GiB))": "#",
    r"\(\d+%\)": "(#%)",
    r"\d\.\de-\d\d(?!\))": "#",  # a measured difference, not a limit
    r"largest: \S+": "largest: #",
}
"""What varies from machine to machine."""
SHRUNK = r"(?<![\w.])[\d.,]*\d(?:e-\d+)?(?:/\d+)?(?:K(?= tokens))?|(?<=step-)\d+"
"""Numbers of a training step, which differ in a shrunk run."""


def masked(text: str, *, shrunk: bool) -> list[str]:
    lines = []
    for line in text.replace(f"{ROOT}/", "").splitlines():
        for pattern, mask in MASKS.items():
            line = re.sub(pattern, mask, line)
        if shrunk and re.search(r"\bstep[ -]", line):
            line = re.sub(SHRUNK, "#", line)
        lines.append(" ".join(line.split()))
    return [line for line in lines if line]


def same(ours: str, theirs: str) -> bool:
    """Equal but for the last digits of losses, which differ between processors. A shown line that
    ends in `…` is the beginning of one.
    """

    def close(a: str, b: str) -> bool:
        with contextlib.suppress(ValueError):
            return math.isclose(float(a), float(b), rel_tol=0.02)
        return a == b

    words = ours.split()
    others = theirs.split()
    if others[-1] == "…":
        others.pop()
        words = words[: len(others)]
    return len(words) == len(others) and all(map(close, words, others))


def prints(actual: list[str], expected: list[str]) -> bool:
    """Whether the runs of lines between `...` occur in `actual`, in order."""
    position = 0
    for chunk in "\n".join(expected).split("..."):
        wanted = chunk.strip().splitlines()
        places = range(position, len(actual) - len(wanted) + 1)
        found = next((i for i in places if all(map(same, actual[i:], wanted))), None)
        if found is None:
            return False
        position = found + len(wanted)
    return True


def problem(block: Block, ran: Ran) -> str | None:
    """How a block's commands failed, or printed something else than the page says."""
    refused = (block.prints or "").startswith("error:")
    lines = [line for line in block.lines if not ran.skips(line)]
    for line in lines:
        status, output = ran.results[line]
        if (status != 0) != refused:
            return f"{line}\nstatus {status}\n{output[-2500:]}"
        if "--nproc-per-node 2 --training" in line and "Resumed from" not in output:
            return f"{line}\nshrunk commands must still build on one another\n{output[-2500:]}"
    if block.prints and lines == block.lines:
        output = "\n".join(ran.results[line][1] for line in block.lines)
        actual, expected = (masked(text, shrunk=not ran.whole) for text in (output, block.prints))
        if not prints(actual, expected):
            return "\n".join([*block.lines, *actual, "--- expected ---", *expected])
    return None


@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_commands_run(ran):
    # One test for all pages: each worker that runs a part of them would run all commands.
    problems = [f"{block.page}: {found}" for block in ran.blocks if (found := problem(block, ran))]
    assert not problems, "\n\n".join(problems)


# ---- ```sh: commands are right as far as this machine can tell


NOT_RUN = [*CHECKED, *(block for block in RUN if block.page not in START)]
"""What the suite checks without running it."""


@pytest.mark.parametrize("page", sorted({block.page for block in NOT_RUN}))
def test_commands_that_do_not_run_are_right(page, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace(tmp_path))
    for block in (block for block in NOT_RUN if block.page == page):
        for line in block.lines:
            for command in line.split(" && "):
                check_command(command)


def test_commands_that_never_run_say_what_they_need():
    for block in CHECKED:
        assert re.match(r"# (?:needs|takes|changes) ", block.text), block


WRONG_COMMANDS = {
    "torchtitan eval --checkpoint outputs/debug_model --tasks helaswag": "helaswag",
    "torchtitan ckpt form-hf exported started": "form-hf",
    "torchtitan ckpt mrege a/checkpoint b/checkpoint --output merged/": "mrege",
    "torchtitan init llama3/8B my-8b --data c4 --hardware h100-smx": "h100-smx",
    "torchtitan init llama3/8B my-8b --data c44 --hardware h100-sxm": "c44",
    "torchtitan rehearse llama3_504b --world 512": "llama3_504b",
    "torchtitan runs outputs --sort los": "los",
    "torchtitan train debug_model --nproc-per-node 8 --training.stpes 100": "training.stpes",
    "torchtitan train debug_model --nproc-per-nod 8": "--nproc-per-nod",
    "torchrun --nproc-per-node 8 -m torchtitan.train --training.stpes 100": "training.stpes",
    "torchrun --nproc-per-nodes 8 -m torchtitan.train": "--nproc-per-nodes",
    "NGPUS=8 CONFIG_FILE=debug_model ./run_train.sh": "NGPUS",
    "python scripts/download_hf_assets.py --repo_id Qwen/Qwen3-0.6B-Base": "--repo_id",
    "sbatch --nodes 4 --gpus-per-node 8 scripts/slurm.sbtach debug_model": "",
    "sbatch --nodes 4 --gpus-per-nod 8 scripts/slurm.sbatch debug_model": "--gpus-per-nod",
    "sbatch --nodes 1 --gpus-per-node 1 scripts/slurm.sbatch "
    "debug_model --training.stpes 9": "training.stpes",
    "./scripts/test.sh --torch 2.15.0 --cornr": "--cornr",
    "pip install 'titan-pretrain[evals]'": "evals",
    "torchfrtrace outputs/run/comm_traces -p rank_ --nonsense": "--nonsense",
    "kill -USR3 PID": "USR3",
    "torchtitna train debug_model": "torchtitna",
}
"""Commands that a page must not show, and what is wrong with each."""


@pytest.mark.parametrize("line", WRONG_COMMANDS)
def test_mistakes_in_commands_are_found(line, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace(tmp_path))
    with pytest.raises((AssertionError, UserError, StopIteration)) as caught:
        check_command(line)
    assert WRONG_COMMANDS[line] in str(caught.value)


def test_commands_in_sentences_exist():
    """`torchtitan X --flag` and `python FILE --flag` within a line."""
    for page in PAGES:
        for code in re.findall(r"(?<!`)`((?:torchtitan|python) [^`\n]+)`", page.read_text()):
            words = [word.strip("[]") for word in code.split()]
            flags = {
                word.partition("=")[0]
                for word in words
                if word.startswith("--") and word != "--" and "." not in word
            }
            if words[0] == "torchtitan" and words[1] not in ("X", "--help"):
                known = options_of(parser_of(words[1]))
            elif words[0] == "python" and words[1] != "-m":
                known = set().union(*map(script_options, (ROOT / words[1]).parent.glob("*.py")))
            else:
                continue
            assert flags <= known | {"--help"}, f"{page.name}: {code}"
