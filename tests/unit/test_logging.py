"""Log files: complete, appended to, rotated, and never a reason to fail."""

import json
import logging
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import tomli

from torchtitan import commands
from torchtitan.config.load.render import to_toml_value
from torchtitan.utils import logging as own
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import (
    event,
    init_command_logging,
    init_logging,
    log_failure,
    log_to_file,
    logger,
)
from torchtitan.utils.process import run_main, unescaped

DATED = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Starts the logs of a process, as `rank`, with its file in `tmp_path / "logs"`."""
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)

    def start(rank=0, as_json=False, max_megabytes=1, keep=2, before=()):
        init_logging(rank)
        for line in before:
            logger.info(line)
        log_to_file(
            tmp_path / "logs", rank, as_json=as_json, max_megabytes=max_megabytes, keep=keep
        )
        return tmp_path / "logs" / f"rank_{rank}.{'jsonl' if as_json else 'log'}"

    yield start
    for handler in logger.handlers:
        handler.close()


def test_every_rank_logs_to_its_file_from_the_first_line(logs, capsys):
    path = logs(rank=3, before=["before the folder was known"])
    logger.info("later")
    logger.error("and an error")
    lines = path.read_text().splitlines()
    assert [re.sub(DATED, "", line) for line in lines] == [
        "INFO before the folder was known", "INFO later", "ERROR and an error",
    ]  # fmt: skip
    assert all(re.match(DATED, line) for line in lines)
    assert re.fullmatch(rf"{DATED}\[rank 3\] and an error\n", capsys.readouterr().out)


def test_commands_log_to_stderr(logs, capsys):
    """Their stdout may be JSON for a script."""
    init_command_logging(0)
    logger.info("what was read")
    logger.warning("most was ignored")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "what was read\nwarning: most was ignored\n")
    init_command_logging(3)
    logger.info("on rank 0 alone")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [name for name in commands.COMMANDS if name != "train"])
def test_every_command_starts_the_log(logs, capsys, monkeypatch, command):
    module = SimpleNamespace(main=lambda argv: logger.info("read by a person"))
    monkeypatch.setattr(commands, "command_module", lambda name: module)
    monkeypatch.setattr("sys.argv", ["torchtitan", command])
    assert commands.main() == 0
    assert capsys.readouterr() == ("", "read by a person\n")


def test_a_restart_appends_after_a_line_that_was_cut_off(logs):
    path = logs()
    path.parent.mkdir()
    path.write_text("2026-11-23 04:05:06 INFO a proc")
    logger.info("again")
    assert [line.split("INFO ")[1] for line in path.read_text().splitlines()] == ["a proc", "again"]


def test_json_lines_hold_events_and_tracebacks(logs, capsys):
    path = logs(as_json=True)
    logger.info("Saved\nsomething", extra=event("saved", 7, folder="x"))
    log_failure(ValueError("unexpected"))
    log_failure(UserError("can be fixed"))
    saved, failed, refused = map(json.loads, path.read_text().splitlines())
    assert saved["message"] == "Saved\nsomething"
    assert (saved["level"], saved["rank"], saved["kind"], saved["step"]) == ("info", 0, "saved", 7)
    assert failed["traceback"].endswith("ValueError: unexpected")
    assert (refused["level"], refused["message"], "traceback" in refused) == (
        "error",
        "can be fixed",
        False,
    )
    assert "fixed" not in capsys.readouterr().out, "the terminal gets it once, for all ranks"


def test_files_are_rotated_by_size(logs):
    path = logs(keep=2)
    for number in range(45):
        logger.info(f"{number} {'x' * 100_000}")
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "rank_0.log",
        "rank_0.log.1",
        "rank_0.log.2",
    ]
    assert all(p.stat().st_size <= 1_000_000 for p in path.parent.iterdir())
    assert "INFO 44 " in path.read_text()


def test_a_deleted_folder_is_made_again(logs):
    path = logs()
    logger.info("one")
    shutil.rmtree(path.parent)
    logger.info("two")
    assert path.read_text().endswith("INFO two\n")


def test_a_full_disk_is_reported_once_and_survived(logs, capsys):
    path = logs()
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    for number in range(3):
        logger.info(f"lost {number}")
    out = capsys.readouterr().out
    assert out.count("can't write") == 1
    assert "No space left on device" in out
    assert "lost 2" in out
    path.unlink()
    logger.info("space again")
    assert path.read_text().endswith("INFO space again\n")


def test_lines_before_the_folder_survive_a_full_disk_too(logs, tmp_path, capsys):
    (tmp_path / "logs").write_text("not a folder")
    logs(before=["one", "two"])
    logger.info("three")
    assert capsys.readouterr().out.count("can't write") == 1


def test_a_program_with_logs_of_its_own_gets_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    log_to_file(tmp_path, 0, as_json=False, max_megabytes=1, keep=1)
    logger.info("line")
    assert not list(tmp_path.iterdir())
    assert own.logger.handlers[0].__class__ is logging.NullHandler


HOSTILE = "a\x1b[31mb\x07\u202ec\u2028d\x9be"


def test_what_is_printed_cannot_control_the_terminal(capsys):
    """On either stream, by print, by an error's message or a traceback; progress bars may."""

    def printing(_):
        print(HOSTILE, "é漢\tx")
        print("\r 10 %", end="")
        sys.stdout.writelines([HOSTILE])
        unescaped(sys.stdout).write("\x1b[2K")
        raise UserError(HOSTILE)

    def failing(_):
        raise RuntimeError(HOSTILE)

    before = sys.stdout, sys.stderr
    assert run_main(printing, []) == 1
    assert run_main(failing, []) == 1
    assert (sys.stdout, sys.stderr) == before
    out, err = capsys.readouterr()
    shown = r"a\u001b[31mb\u0007\u202ec\u2028d\u009be"
    assert out == f"{shown} é漢\tx\n\r 10 %{shown}\x1b[2K"
    assert err.count(shown[:22]) == 2
    assert not set("\x1b\x07\u202e\u2028\x9b") & set(err)


def test_what_is_logged_cannot_control_the_terminal(logs, capsys):
    path = logs()
    logger.warning(HOSTILE)
    for text in (capsys.readouterr().out, path.read_text()):
        assert r"a\u001b[31mb\u0007\u202ec\u2028d\u009be" in text
        assert "\x1b" not in text


def test_what_is_written_to_toml_cannot_either():
    assert not set("\x1b\x07\u202e\u2028\x9b") & set(to_toml_value(HOSTILE))
    assert tomli.loads(f"x = {to_toml_value(HOSTILE)}") == {"x": HOSTILE}
