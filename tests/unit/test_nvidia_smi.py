"""nvidia-smi, played by a script: what it prints, and its absence."""

import time

import pytest

from torchtitan.utils.nvidia_smi import LOAD, NoDriver, query, summary, watch

BUSY = "1320, 1980, 699.5, 700.00, 71, 0x0000000000000004"
IDLE = "345, 1980, 70.1, 700.00, 33, 0x0000000000000001"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make `nvidia-smi` a shell script, the only command there is."""

    def install(script):
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    return install


def test_query(install):
    install("""echo "$1" >&2; echo "NVIDIA H100, [N/A]"; echo "NVIDIA H100, 7"; echo cut""")
    rows = query(["name", "memory.used"])
    assert [row["memory.used"] for row in rows] == ["[N/A]", "7"]


def test_without_a_driver(install):
    with pytest.raises(NoDriver, match="there is no nvidia-smi"):
        query(LOAD)
    with watch() as rows:
        pass
    assert rows == []
    assert summary(rows) == {"samples": 0, "slowed_by": []}
    install("echo NVIDIA-SMI has failed because it can\\'t reach the driver; exit 9")
    with pytest.raises(NoDriver, match="NVIDIA-SMI has failed because it can't reach the driver"):
        query(LOAD)


def test_watch(install, tmp_path):
    """The rows up to the end of the body, in one summary."""
    done = tmp_path / "done"
    install(f"echo {IDLE}; echo {BUSY}; : > {done}; while :; do :; done")
    with watch() as rows:
        deadline = time.monotonic() + 30
        while not done.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    found = summary(rows)
    assert found["samples"] == 2
    assert found["clocks.sm"] == [345, 832.5, 1320]
    assert found["power.limit"] == 700
    assert found["slowed_by"] == ["power limit"]
