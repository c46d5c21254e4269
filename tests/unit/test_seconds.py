"""The table of seconds per test file: how it is written, and the ceiling of its sum."""

from pathlib import Path
from types import SimpleNamespace

from tests.seconds import CEILING, TABLE, Seconds, read


def test_the_suite_stays_below_its_ceiling():
    seconds = read(TABLE)
    assert len(seconds) > 100
    assert sum(seconds.values()) <= CEILING
    assert [file for file in seconds if not Path(TABLE.parents[1], file).exists()] == []


def test_a_session_replaces_the_rows_of_its_files_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py", "c.py"):
        Path(name).touch()
    table = tmp_path / "seconds.csv"
    table.write_text("file,seconds\ngone.py,9.0\na.py,2.0\nb.py,1.0\n")
    session = Seconds(table)
    for name, duration in (("b.py", 0.26), ("b.py", 2.0), ("c.py", 0.5)):
        session.pytest_runtest_logreport(
            SimpleNamespace(location=(name, 1, "t"), duration=duration)
        )
    session.pytest_sessionfinish()
    assert table.read_text() == "file,seconds\nb.py,2.3\na.py,2.0\nc.py,0.5\n"
