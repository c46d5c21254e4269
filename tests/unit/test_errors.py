"""Exit codes and messages of each kind of failure."""

import os
import pickle
import subprocess
import sys

import pytest

from torchtitan.utils.errors import CheckpointError, ConfigError, GuardError, NonFiniteError
from torchtitan.utils.files import write_whole
from torchtitan.utils.process import run_main


def failing(error):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "rank", "code", "shown"),
    [
        (ConfigError(["a: wrong"]), 0, 2, "error: a: wrong\n"),
        (ConfigError(["a: wrong"]), 1, 2, ""),
        (CheckpointError("no space\nfree some"), 1, 1, "error: no space\n       free some\n"),
        (KeyboardInterrupt(), 0, 130, "interrupted\n"),
        (
            RuntimeError("Connection closed by peer [::1]"),
            3,
            1,
            "rank 3: stopped because another rank failed\n",
        ),
    ],
)
def test_failures_are_told_once(error, rank, code, shown, capsys, monkeypatch):
    monkeypatch.delenv("TORCHTITAN_DEBUG", raising=False)
    assert run_main(failing(error), [], rank=rank) == code
    assert capsys.readouterr().err == shown


def test_an_unexpected_error_keeps_its_traceback(capsys):
    assert run_main(failing(ZeroDivisionError("by zero")), [], rank=2) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: by zero" in err


def test_success():
    assert run_main(lambda argv: None, []) == 0
    assert run_main(lambda argv: 75, []) == 75


@pytest.mark.e2e
def test_a_reader_that_ends_is_no_error():
    """As `| head` does."""
    code = (
        "import sys; from torchtitan.utils.process import run_main; sys.exit(run_main(lambda "
        "_: print('x' * 99999)))"
    )
    tool = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    tool.stdout.close()
    assert tool.stderr.read() == b""
    assert tool.wait() == 141


@pytest.mark.e2e
def test_a_command_that_explains_errors_of_files_ends_quietly_too(tmp_path):
    """`ckpt` makes a UserError of every OSError; its output is more than a pipe holds."""
    code = """
import sys
from torchtitan.utils.errors import UserError
from torchtitan.utils.process import run_main

def main(argv):
    try:
        print("x" * 99999)
    except OSError as error:
        raise UserError(str(error)) from error

sys.exit(run_main(main))
"""
    tool = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    tool.stdout.close()
    assert tool.stderr.read() == b""
    assert tool.wait() == 141


def test_advice_is_no_problem(capsys, monkeypatch):
    monkeypatch.delenv("TORCHTITAN_DEBUG", raising=False)
    error = ConfigError(
        ["--a is missing", "--b is missing"], where="on the command line", advice="Pass --yes"
    )
    assert run_main(failing(error), []) == 2
    shown = (
        "error: 2 problems on the command line\n  - --a is missing\n  - --b is missing\nPass "
        "--yes\n"
    )
    assert capsys.readouterr().err == shown
    assert run_main(failing(ConfigError(["--a is missing"], advice="Pass --yes")), []) == 2
    assert capsys.readouterr().err == "error: --a is missing\n       Pass --yes\n"


def test_another_broken_pipe_is():
    assert run_main(failing(BrokenPipeError()), []) == 1


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_writers_of_one_file_with_one_process_number_do_not_mix(tmp_path, monkeypatch):
    """Containers on different nodes number their processes alike."""
    file = tmp_path / "file"
    sync = os.fsync

    def other_first(handle):
        monkeypatch.setattr(os, "fsync", sync)
        write_whole(file, b"of the other node")
        assert file.read_bytes() == b"of the other node"

    monkeypatch.setattr(os, "fsync", other_first)
    write_whole(file, b"ours")
    assert file.read_bytes() == b"ours"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_problems_survive_the_way_from_another_process():
    error = ConfigError(["a: wrong", "b: wrong"], where="on the command line", advice="ask")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.problems, copy.where, str(copy)) == (error.problems, error.where, str(error))


@pytest.mark.parametrize("error", [NonFiniteError, GuardError])
def test_what_all_ranks_see_is_said_once(monkeypatch, capsys, error):
    monkeypatch.setattr("torchtitan.utils.process._GIVE_WAY_SECONDS", 0)

    def fails(_):
        raise error("step 5: loss nan")

    for rank in range(3):
        assert run_main(fails, [], rank=rank) == 1
    assert capsys.readouterr().err == "error: step 5: loss nan\n"
