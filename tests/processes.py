"""Modules run as programs in processes forked from the ranks' server, which has torch already."""

import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path


def run_module(
    module: str, *argv: str, cwd: Path, merged: bool = False
) -> subprocess.CompletedProcess[str]:
    """`python -m module *argv` in a folder, without the seconds that importing torch takes.

    Args:
        merged: standard output holds the errors, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        if merged:
            files[1].unlink()
            files[1].symlink_to(files[0])
        process = mp.get_context("forkserver").Process(
            target=_run, args=(module, argv, cwd, *files)
        )
        process.start()
        process.join(900)
        assert process.exitcode is not None, f"{module} did not end"
        return subprocess.CompletedProcess(argv, process.exitcode, *(f.read_text() for f in files))


def _run(module: str, argv: tuple[str, ...], cwd: Path, stdout: Path, stderr: Path) -> None:
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
